"""Explains the faults of a model's folder, and the remedies."""

from __future__ import annotations

import os
from collections.abc import Iterable

from nanovllm.utils.display import shown

_POINTER = b"version https://git-lfs.github.com/spec/"
MODEL_FORMS = (
    "a model is a folder with config.json, *.safetensors and a tokenizer, a GGUF file, or a Hub id; an adapter is "
    "loaded into its model, by llm.load_weights; pickled weights (.bin, .pt), which may run code when they are "
    "read, and layouts of a maker's own (consolidated.*) are converted first, by from_pretrained and "
    "save_pretrained of transformers"
)
ADAPTER_CONFIG = "adapter_config.json"


def refuse_pointer(path: str, start: bytes | None = None, *, named: str | None = None) -> None:
    """Raise a `ValueError` if a file is empty, or a Git LFS pointer, as in a clone without LFS.

    `start`: the file's first bytes, read if None; `named`: its name in the message instead of the path.
    """
    if start is None:
        with open(path, "rb") as stream:
            start = stream.read(len(_POINTER))
    path = named or path
    if not start:
        raise ValueError(f"{path!r} is empty: download it again")
    if start.startswith(_POINTER):
        folder = os.path.dirname(path)
        raise ValueError(f"{path!r} is a Git LFS pointer, not the file: run `git lfs pull` in {folder!r}")


def not_in(place: str, missing: str, names: Iterable[str]) -> str:
    """Return an explanation for a folder, URL or Hub id without a part of a model, given the names there."""
    return f"{place!r} has no {missing}, but {shown(sorted(names))}: {MODEL_FORMS}"
