"""Reads JSON files of a model's folder, and explains in one sentence the folder's fault and its remedy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

_POINTER = b"version https://git-lfs.github.com/spec/"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_OF_TRAINING = ("training_args", "optimizer", "scheduler", "rng_state")
_FORMS = "a model is a folder with config.json, *.safetensors and a tokenizer, a GGUF file, or a Hub id"
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


def no_folder(path: str) -> str:
    """Return an explanation for a file given as a model's folder, with advice."""
    if path.endswith(".safetensors"):
        return f"{path!r} is a file of weights: give its folder"
    if path.endswith(_PICKLED):
        return f"{path!r} is a file of pickled weights, which may run code when they are read: {_FORMS}"
    return f"{path!r} is a file that holds no model: {_FORMS}"


def no_model(folder: str) -> str:
    """Return an explanation for a folder without config.json, with advice."""
    names = sorted(os.listdir(folder))
    if ADAPTER_CONFIG in names:
        return _adapter_advice(folder)
    if (advice := other_layout(folder, names)) is not None:
        return advice
    kind, _, name = os.path.basename(folder.rstrip("/")).partition("--")
    if kind == "models" and "snapshots" in names:
        return f"{folder!r} is a folder of the Hub's cache: give the Hub id, {name.replace('--', '/')!r}"
    return f"{folder!r} {'has no config.json' if names else 'is empty'}: {_FORMS}"


def no_weights(place: str, folder: str, names: Iterable[str]) -> str:
    """Return an explanation for a place without weights, given its files; `folder`: a copy of the small ones."""
    if os.path.isfile(os.path.join(folder, ADAPTER_CONFIG)):
        return _adapter_advice(folder)
    if (advice := other_layout(place, sorted(names))) is not None:
        return advice
    return (
        f"no *.safetensors in {place!r}: fetch the weights too, as `hf download` does, or draw random ones with "
        "load_format='dummy'"
    )


def _adapter_advice(folder: str) -> str:
    path = os.path.join(folder, ADAPTER_CONFIG)
    refuse_pointer(path)
    try:
        with open(path, encoding="utf-8") as stream:
            base = json.load(stream)["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path!r} names no base_model_name_or_path: {error!r}") from error
    return (
        f"{folder!r} is an adapter of {base!r}, not a model: load that one, and then the adapter with "
        f"llm.load_weights({folder!r})"
    )


def other_layout(place: str, names: list[str]) -> str | None:
    """Return advice on weights in other formats at a folder, URL or Hub id, given the sorted names there, or None."""
    if found := [name for name in names if name.endswith(".gguf")]:
        return f"{place!r} has its weights in GGUF files, such as {found[0]!r}: give the path of one"
    if found := [name for name in names if name.startswith("consolidated") or name == "params.json"]:
        return (
            f"{place!r} has weights in their maker's own layout, {found[0]!r}: download, or convert to, the layout of "
            "transformers: config.json with model.safetensors"
        )
    if found := [name for name in names if name.endswith(_PICKLED) and not name.startswith(_OF_TRAINING)]:
        return (
            f"no *.safetensors in {place!r}, only pickled weights, which may run code when they are read, such as "
            f"{found[0]!r}: if you trust them, AutoModelForCausalLM.from_pretrained({place!r}).save_pretrained(...) of "
            "transformers writes safetensors"
        )
    return None
