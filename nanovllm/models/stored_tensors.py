"""The tensors in the safetensors of a folder, on this host or where fsspec reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

from safetensors import SafetensorError, safe_open

from nanovllm.models.remote_tensors import SafetensorsFile
from nanovllm.utils.folder_faults import no_weights, refuse_pointer
from nanovllm.utils.remote import filesystem, is_url, list_names, storage_errors, weights_place
from nanovllm.utils.units import shown

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PART = re.compile(r"-of-(\d+)\.safetensors$")
_OTHERS = re.compile(r"consolidated|adapter_|optimizer|scheduler|training")
"""Files beside a model's: the same weights in their maker's layout, an adapter, the state of a training."""
_BUFFERS = re.compile(
    r"(.*\.)?(rotary(_pos)?_emb\.((original_)?inv_freq|cos_cached|sin_cached)|masked_bias|causal_mask|position_ids)"
)
_MASK = re.compile(r"(.*\.)?(attn|attention)\.bias")
"""Where it has four dimensions, and is no bias."""


def misfit(folder: str, missing: list[str], surplus: list[str]) -> str:
    """Return why the weights in a folder do not fit a model, by the names of tensors."""
    return f"checkpoint in {folder!r} does not fit: tensors missing {shown(missing)}, left over {shown(surplus)}"


def weight_files(folder: str) -> list[str]:
    """Return the safetensors of a folder's model, or of where its weights are; see `weights_place`.

    As in transformers, model.safetensors is all of a model, else an index names the files. Without either these are the
    parts that are numbered, or whatever is not known to be something else.

    Raises:
        ValueError: there are none, or one is missing.
    """
    place = weights_place(folder)
    present = list_names(place)
    if _WHOLE in present:
        names = [_WHOLE]
    elif _INDEX in present:
        names = _indexed_names(place)
    else:
        stored = sorted(name for name in present if name.endswith(".safetensors") and not _OTHERS.match(name))
        names = [name for name in stored if name.startswith("model-") and _PART.search(name)] or stored
    if not names:
        raise ValueError(no_weights(place, folder, present))
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
    refuse_pointer(os.path.join(place, _INDEX), content)
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

    Buffers that older code stored and every model now computes are left out: angles, masks, positions.

    Raises:
        ValueError: no weights there, or a file missing or damaged.
    """
    for file in weight_files(folder):
        tensors = SafetensorsFile(file).tensors() if is_url(file) else _mapped_tensors(file)
        for name, tensor in tensors:
            if not _is_computed(name, tensor):
                yield file, name, tensor


def _is_computed(name: str, tensor: Any) -> bool:
    is_mask = _MASK.fullmatch(name) is not None and len(tensor.get_shape()) == 4
    return is_mask or _BUFFERS.fullmatch(name) is not None


def _mapped_tensors(file: str) -> Iterator[tuple[str, Any]]:
    try:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                yield name, weights.get_slice(name)
    except SafetensorError as error:
        refuse_pointer(file)
        raise ValueError(f"{file!r} is damaged: {error}") from error
