"""Safetensors of a folder, local or remote, and tensors in transfer to other processes of this host."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nanovllm.utils.display import shown
from nanovllm.utils.folder_faults import not_in, refuse_pointer
from nanovllm.utils.remote import cached_copy, filesystem, list_names, storage_errors, weights_place

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PART = re.compile(r"-of-(\d+)\.safetensors$")
_OTHERS = re.compile(r"consolidated|adapter_|optimizer|scheduler|training")
"""Files beside a model's: the same weights in their maker's layout, an adapter, training state."""
_BUFFERS = re.compile(
    r"(.*\.)?(rotary(_pos)?_emb\.((original_)?inv_freq|cos_cached|sin_cached)|masked_bias|causal_mask|position_ids)"
)
_MASK = re.compile(r"(.*\.)?(attn|attention)\.bias")
"""A causal mask rather than a bias, if it has four dimensions."""
_FILE_BYTES = 2**30
"""Bytes of tensors gathered per file, all held in memory at once."""


def misfit(folder: str, missing: list[str], surplus: list[str]) -> str:
    """Explain why the weights in a folder do not fit a model, by the names of tensors."""
    return f"checkpoint in {folder!r} does not fit: tensors missing {shown(missing)}, left over {shown(surplus)}"


def weight_files(folder: str) -> list[str]:
    """Return the safetensors of a folder's model, or of its weights' location; ValueError if one is missing.

    As in transformers, model.safetensors is a whole model, else an index names the files. Without either, they are the
    numbered parts, or all files not known to be something else.
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
        raise ValueError(f"{not_in(place, '*.safetensors', present)}; load_format='dummy' draws random weights")
    if (total := max((int(found[1]) for name in names if (found := _PART.search(name))), default=0)) > len(names):
        # The index is written last.
        raise ValueError(
            f"{place!r} has {len(names)} of {total} files of weights and no {_INDEX}: is it being written?"
        )
    source, path = filesystem(place)
    with storage_errors(place, ValueError):
        # They may be in subfolders.
        absent = [name for name in names if name not in present and not source.isfile(f"{path}/{name}")]
    if absent:
        raise ValueError(f"{_INDEX} in {place!r} names files that are not there: {absent}")
    return [os.path.join(place, name) for name in names]


def _indexed_names(place: str) -> list[str]:
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
    """Yield each tensor of a folder: its file, its name, and a reader that is indexed by slices.

    A remote file is copied to the cache first. Buffers that older code stored and every model now computes are left
    out: angles, masks, positions. ValueError if there are no weights, or a file is missing or damaged.
    """
    for file in weight_files(folder):
        path = cached_copy(file)
        try:
            with safe_open(path, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (not a dict)
                    tensor = weights.get_slice(name)
                    is_mask = _MASK.fullmatch(name) is not None and len(tensor.get_shape()) == 4
                    if not is_mask and _BUFFERS.fullmatch(name) is None:
                        yield file, name, tensor
        except SafetensorError as error:
            refuse_pointer(path, named=file)
            raise ValueError(f"{file!r} is damaged: {error}") from error


def weight_pair(item: Any) -> tuple[str, torch.Tensor]:
    """Return a name and its tensor, of 64-bit floats in 32; ValueError for another item, or one without values."""
    if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)):
        raise ValueError(f"weights are pairs of a name and a tensor, not {item!r:.80}")
    name, tensor = item
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"tensor {name!r} is a {type(tensor).__name__}")
    if hasattr(tensor, "full_tensor"):
        raise ValueError(f"tensor {name!r} is a DTensor, which has only a part on each rank: pass its full_tensor()")
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise ValueError(f"tensor {name!r} has no values: {tensor.device}, {tensor.layout}")
    tensor = tensor.detach()
    return name, tensor.float() if tensor.dtype == torch.float64 else tensor


@dataclass(frozen=True)
class TensorFiles:
    """Ordered pairs of a name and a tensor, stored in files; pickles without the tensors."""

    files: list[str]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self.files:
            with safe_open(file, "pt") as opened:
                for key in sorted(opened.keys()):
                    yield key.partition(" ")[2], opened.get_tensor(key)


def write_tensors(folder: str, weights: Iterable[Any]) -> TensorFiles:
    """Write pairs of a name and a tensor to files; another item is a ValueError."""
    files: list[str] = []
    gathered: dict[str, torch.Tensor] = {}

    def write() -> None:
        files.append(str(Path(folder, f"{len(files)}.safetensors")))
        save_file(gathered, files[-1])
        gathered.clear()

    num_bytes = 0
    for item in weights:
        name, tensor = weight_pair(item)
        # A copy, even if tensors share memory; numbered, since names may repeat.
        gathered[f"{len(gathered):06d} {name}"] = tensor.to("cpu", copy=True).contiguous()
        num_bytes += tensor.nbytes
        if num_bytes >= _FILE_BYTES:
            write()
            num_bytes = 0
    write()
    return TensorFiles(files)
