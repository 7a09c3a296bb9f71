"""The tensors in the safetensors of a folder, on this host or where fsspec reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from safetensors import SafetensorError, safe_open

from nanovllm.models.remote_tensors import SafetensorsFile
from nanovllm.utils.remote import filesystem, is_url, list_names, storage_errors, weights_place

_INDEX = "model.safetensors.index.json"
_PART = re.compile(r"-of-(\d+)\.safetensors$")
_MOST_SHOWN = 8


def shown(names: list[str]) -> str:
    """Return the first of these names for a message, and how many more there are: mixtures have 10,000s of tensors."""
    more = len(names) - _MOST_SHOWN
    return f"{names[:_MOST_SHOWN]}" + (f" and {more} more" if more > 0 else "")


def weight_files(folder: str) -> list[str]:
    """Return the safetensors of a folder, or of where its weights are; see `weights_place`.

    Raises:
        ValueError: there are none, or one is missing.
    """
    place = weights_place(folder)
    present = list_names(place)
    if _INDEX in present:
        names = _indexed_names(place)
    else:
        names = sorted(name for name in present if name.endswith(".safetensors"))
    if not names:
        raise ValueError(f"no *.safetensors in {place!r}; load_format='dummy' needs none")
    if (total := max((int(found[1]) for name in names if (found := _PART.search(name))), default=0)) > len(names):
        # The index is written last.
        raise ValueError(
            f"{place!r} has {len(names)} of {total} files of weights and no {_INDEX}: is it being written?"
        )
    source, path = filesystem(place)
    with storage_errors(place, ValueError):
        # They may be in folders below.
        absent = [name for name in names if name not in present and not source.isfile(f"{path}/{name}")]
    if absent:
        raise ValueError(f"{_INDEX} in {place!r} names files that are not there: {absent}")
    return [os.path.join(place, name) for name in names]


def _indexed_names(place: str) -> list[str]:
    """Return the files that the index of a folder names."""
    source, path = filesystem(place)
    with storage_errors(place, ValueError):
        content = source.cat_file(f"{path}/{_INDEX}")
    try:
        index = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{_INDEX} in {place!r} is not JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{_INDEX} in {place!r} has no weight_map from tensors to files")
    return sorted(set(weight_map.values()))


def stored_tensors(folder: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each tensor of a folder: its file, its name, and what reads the parts of it that are asked for.

    Raises:
        ValueError: no weights there, or a file missing or damaged.
    """
    for file in weight_files(folder):
        tensors = SafetensorsFile(file).tensors() if is_url(file) else _mapped_tensors(file)
        for name, tensor in tensors:
            yield file, name, tensor


def _mapped_tensors(file: str) -> Iterator[tuple[str, Any]]:
    try:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                yield name, weights.get_slice(name)
    except SafetensorError as error:
        raise ValueError(f"{file!r} is damaged: {error}") from error
