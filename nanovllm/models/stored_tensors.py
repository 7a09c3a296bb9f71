"""The tensors in the safetensors of a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from safetensors import SafetensorError, safe_open

from nanovllm.models.remote_tensors import RemoteFile
from nanovllm.utils.checks import read_json
from nanovllm.utils.remote import filesystem, is_url, list_names, weights_place

_INDEX = "model.safetensors.index.json"
_PART = re.compile(r"-of-(\d+)\.safetensors$")


def weight_files(folder: str) -> list[str]:
    """Return the safetensors of a folder, or of where its weights are; see `weights_place`.

    Raises:
        ValueError: there are none, or one is missing.
    """
    place = weights_place(folder)
    present = list_names(place) if is_url(place) else os.listdir(place)
    if _INDEX in present:
        weight_map = _read_index(place).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{_INDEX} in {place!r} has no weight_map from tensors to files")
        names = sorted(set(weight_map.values()))
    else:
        names = sorted(name for name in present if name.endswith(".safetensors"))
    if not names:
        raise ValueError(f"no *.safetensors in {place!r}; load_format='dummy' needs none")
    if (total := max((int(found[1]) for name in names if (found := _PART.search(name))), default=0)) > len(names):
        # The index is written last.
        raise ValueError(
            f"{place!r} has {len(names)} of {total} files of weights and no {_INDEX}: is it being written?"
        )
    # The local ones may be in folders below.
    absent = set(names) - set(present)
    if not is_url(place):
        absent = {name for name in absent if not os.path.isfile(os.path.join(place, name))}
    if absent:
        raise ValueError(f"{_INDEX} in {place!r} names files that are not there: {sorted(absent)}")
    return [os.path.join(place, name) for name in names]


def _read_index(place: str) -> dict[str, Any]:
    if not is_url(place):
        return read_json(os.path.join(place, _INDEX))
    source, path = filesystem(place)
    try:
        index = json.loads(source.cat_file(f"{path}/{_INDEX}"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{_INDEX} in {place!r} cannot be read: {error}") from error
    return index if isinstance(index, dict) else {}


def stored_tensors(folder: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each tensor of a folder: its file, its name, and what reads the parts of it that are asked for.

    Raises:
        ValueError: no weights there, or a file missing or damaged.
    """
    for file in weight_files(folder):
        if is_url(file):
            for name, tensor in RemoteFile(file).tensors():
                yield file, name, tensor
            continue
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (not a dict)
                    yield file, name, weights.get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"{file!r} is damaged: {error}") from error
