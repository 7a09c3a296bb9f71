"""Reads how a folder of sentence-transformers pools hidden states into an embedding."""

from __future__ import annotations

import os

from nanovllm.config import Pooling
from nanovllm.utils.checks import read_json, read_json_list

_MODULES = "modules.json"
_POOLINGS: dict[str, Pooling] = {
    "lasttoken": "last", "mean": "mean", "mean_tokens": "mean",
    # A sum over the root of its length: normalised, as embeddings are here, it is the mean.
    "mean_sqrt_len_tokens": "mean",
}  # fmt: skip
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


def folder_pooling(folder: str) -> Pooling:
    """Return the pooling of a folder's own modules; "last" where it has none.

    Raises:
        ValueError: it has a module, or a pooling, that is not supported.
    """
    pooling: Pooling = "last"
    path = os.path.join(folder, _MODULES)
    for module in read_json_list(path) if os.path.isfile(path) else []:
        kind = str(module.get("type")).rsplit(".", maxsplit=1)[-1]
        if kind not in _KNOWN_MODULES:
            raise ValueError(f"{path!r} has a module {kind!r}, which is not supported: pass `pooling` to leave it out")
        if kind == "Pooling":
            pooling = _module_pooling(os.path.join(folder, str(module.get("path")), "config.json"))
    return pooling


def _module_pooling(path: str) -> Pooling:
    config = read_json(path)
    prefix = "pooling_mode_"
    modes = [name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True]
    # Newer versions name it.
    named = config.get("pooling_mode", [])
    modes += [named] if isinstance(named, str) else named
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ValueError(f"{path!r} asks for pooling {', '.join(modes)!r}: pass `pooling`, which is 'last' or 'mean'")
    return _POOLINGS[modes[0]]
