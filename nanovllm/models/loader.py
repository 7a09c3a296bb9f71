"""Fill a model's parameters: from safetensors, strictly, or with seeded random numbers.

Strictly: every parameter is filled, in whole, and every tensor of the checkpoint is used. What this rank holds of a
tensor goes from the memory-mapped file to the device, the rest is not read, and one is done before the next, so that
beside the weights no more than one is ever in host memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanovllm.layers.weight_part import WeightPart
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.checks import read_json

_INDEX = "model.safetensors.index.json"


def load_weights(model: Qwen3ForCausalLM, folder: str) -> None:
    """Fill `model` from the safetensors of a folder.

    Raises:
        ValueError: no weights there, a file missing or damaged, tensors missing, left over or of the wrong shape.
    """
    param_names = {name for name, _ in model.named_parameters()}
    filled: dict[str, set[str | None]] = {name: set() for name in param_names}
    surplus = []
    for file in _weight_files(folder):
        for name, tensor in _slices(file):
            param_name, shard = _target(model, name)
            if param_name not in param_names:
                surplus.append(name)
                continue
            if shard in filled[param_name]:
                raise ValueError(f"tensor {name!r} is there twice, the second time in {file!r}")
            _fill(_part(model, param_name, shard), name, tensor)
            filled[param_name].add(shard)
    # A tied LM head is the embedding; many checkpoints store it all the same.
    if model.config.tie_word_embeddings:
        surplus = [name for name in surplus if name != "lm_head.weight"]
    missing = _missing(model, filled)
    if surplus or missing:
        raise ValueError(f"checkpoint in {folder!r} does not fit: tensors missing {missing}, left over {surplus}")


def init_dummy_weights(model: Qwen3ForCausalLM, seed: int) -> None:
    """Fill `model` with normal random numbers of the config's spread; norms with ones.

    Each tensor of a checkpoint is drawn in whole, whatever this rank holds of it, so that the ranks share one model.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed % 2**63)
    for name, param in model.named_parameters():
        for shard in _shards(model, name):
            part = _part(model, name, shard)
            if "norm" in name:
                part.target.fill_(1.0)
                continue
            drawn = torch.empty(part.shape, dtype=param.dtype, device=device)
            drawn.normal_(0.0, model.config.initializer_range, generator=generator)
            part.target.copy_(drawn[part.index])


def _weight_files(folder: str) -> list[str]:
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
    absent = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if absent:
        raise ValueError(f"{_INDEX} in {folder!r} names files that are not there: {absent}")
    return [os.path.join(folder, name) for name in names]


def _slices(file: str) -> Iterator[tuple[str, Any]]:
    """Names of a file's tensors, and what reads the parts of each that are asked for."""
    try:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                yield name, weights.get_slice(name)
    except SafetensorError as error:
        raise ValueError(f"{file!r} is damaged: {error}") from error


def _target(model: Qwen3ForCausalLM, name: str) -> tuple[str, str | None]:
    """The name of the parameter, and the shard of it, that a checkpoint's tensor would belong to."""
    parts = name.split(".")
    shard = None
    if len(parts) >= 2 and parts[-2] in model.packed_modules_mapping:
        parts[-2], shard = model.packed_modules_mapping[parts[-2]]
    return ".".join(parts), shard


def _part(model: nn.Module, param_name: str, shard: str | None) -> WeightPart:
    """What this rank holds of one tensor of the checkpoint."""
    module_name, _, leaf = param_name.rpartition(".")
    module = model.get_submodule(module_name)
    weight_part = getattr(module, "weight_part", None)
    param = getattr(module, leaf)
    part: WeightPart = WeightPart.whole(param) if weight_part is None else weight_part(param, shard)
    return part


def _fill(part: WeightPart, name: str, tensor: Any) -> None:
    shape = tensor.get_shape()
    if list(part.shape) != shape:
        raise ValueError(f"tensor {name!r} has shape {shape}; the config asks for {list(part.shape)}")
    part.target.copy_(tensor[part.index])


def _shards(model: nn.Module, param_name: str) -> list[str | None]:
    """Names of the checkpoint's tensors that a parameter is made of; None for one that has the parameter's own name."""
    return list(getattr(model.get_submodule(param_name.rpartition(".")[0]), "shards", (None,)))


def _missing(model: Qwen3ForCausalLM, filled: dict[str, set[str | None]]) -> list[str]:
    missing = []
    for name, _ in model.named_parameters():
        absent = set(_shards(model, name)) - filled[name]
        if absent:
            missing.append(name if absent == {None} else f"{name}[{', '.join(sorted(map(str, absent)))}]")
    return missing
