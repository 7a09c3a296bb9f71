"""Reads JSON files of a model's folder, and explains in one sentence the folder's fault and its remedy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

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


def read_json(path: str) -> dict[str, Any]:
    """Return the JSON object in a file."""
    content = _load_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{os.path.basename(path)} in {os.path.dirname(path)!r} must hold a JSON object")
    return content


def read_json_list(path: str) -> list[dict[str, Any]]:
    """Return the list of JSON objects in a file."""
    content = _load_json(path)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ValueError(f"{os.path.basename(path)} in {os.path.dirname(path)!r} must hold a list of JSON objects")
    return content


def _load_json(path: str) -> Any:
    refuse_pointer(path)
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except ValueError as error:
        raise ValueError(f"{os.path.basename(path)} in {os.path.dirname(path)!r} is not JSON: {error}") from error


def refuse_remote_code(folder: str, file: str, auto_class: str) -> None:
    """Raise a `ValueError` if `file` in `folder` names code in its `auto_map` for transformers' `auto_class`."""
    path = os.path.join(folder, file)
    auto_map = read_json(path).get("auto_map") if os.path.isfile(path) else None
    # In old tokenizer configs `auto_map` is a list of the slow and the fast class.
    code = auto_map.get(auto_class) if isinstance(auto_map, dict) else auto_map
    if code:
        raise ValueError(
            f"{file} in {folder!r} names code to run for {auto_class}: {code!r}; read it, and pass "
            "trust_remote_code=True to allow it"
        )


def not_in(place: str, missing: str, names: Iterable[str]) -> str:
    """Return an explanation for a folder, URL or Hub id without a part of a model, given the names there."""
    others = sorted(names)
    return f"{place!r} has no {missing}{f', but {shown(others)}' if others else ''}: {MODEL_FORMS}"
