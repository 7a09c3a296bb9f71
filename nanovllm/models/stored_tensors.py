"""The tensors in the safetensors of a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from safetensors import SafetensorError, safe_open

from nanovllm.utils.checks import read_json

_INDEX = "model.safetensors.index.json"
_PART = re.compile(r"-of-(\d+)\.safetensors$")


def weight_files(folder: str) -> list[str]:
    """Return the safetensors of a folder.

    Raises:
        ValueError: there are none, or one is missing.
    """
    index = os.path.join(folder, _INDEX)
    if os.path.isfile(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{_INDEX} in {folder!r} has no weight_map from tensors to files")
        names = sorted(set(weight_map.values()))
    else:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    if not names:
        raise ValueError(f"no *.safetensors in {folder!r}; load_format='dummy' needs none")
    if (total := max((int(found[1]) for name in names if (found := _PART.search(name))), default=0)) > len(names):
        # The index is written last.
        raise ValueError(
            f"{folder!r} has {len(names)} of {total} files of weights and no {_INDEX}: is it being written?"
        )
    absent = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if absent:
        raise ValueError(f"{_INDEX} in {folder!r} names files that are not there: {absent}")
    return [os.path.join(folder, name) for name in names]


def stored_tensors(folder: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each tensor of a folder: its file, its name, and what reads the parts of it that are asked for.

    Raises:
        ValueError: no weights there, or a file missing or damaged.
    """
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (not a dict)
                    yield file, name, weights.get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{file!r} is damaged: {error}") from error
