"""Fill a model's parameters: from safetensors, strictly, or with seeded random numbers.

Strictly: every parameter is filled, in whole, and every tensor of the checkpoint is used. What this rank holds of a
tensor goes from the memory-mapped file to the device, the rest is not read, and one is done before the next, so that
beside the weights no more than one is ever in host memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.distributed.communicator import Communicator
from nanovllm.model_config import ModelConfig
from nanovllm.models import make_model
from nanovllm.models.base import CausalLM, LoadableCausalLM
from nanovllm.models.stored_tensors import misfit, stored_tensors, weight_files
from nanovllm.quantization.loading import LoadableModule, StackedTensor, TensorRows, WeightSlice, WeightTarget
from nanovllm.utils.loading_bar import loading_bar


def load_model(
    model_config: ModelConfig,
    communicator: Communicator,
    config: Config,
    folder: str,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Make this rank's shard of a model for `max_model_len` positions, and fill it as `config.load_format` says.

    Raises:
        ValueError: weights that do not fit; see `load_weights`.
    """
    if config.load_format == "dummy" and model_config.quantization is not None:
        # What is drawn is quantised.
        model_config = replace(model_config, quantization=model_config.quantization.unstored())
    with torch.device("meta"):
        # What is wrong with a config is said before a file of weights is looked at.
        model = make_model(model_config, communicator)
        if config.load_format != "dummy" and (with_head := with_stored_head(model_config, folder)) is not model_config:
            model = make_model(with_head, communicator)
    if isinstance(model, LoadableCausalLM):
        if config.load_format != "dummy":
            weight_files(folder)
        model.load(config, folder, max_model_len, dtype, device)
        return model
    for module in model.modules():
        if isinstance(module, LoadableModule):
            module.allocate(dtype, device)
    if config.load_format == "dummy":
        init_dummy_weights(model, config.seed or 0)
    else:
        load_weights(model, folder, communicator.rank)
    model.tabulate_rope(max_model_len, device)
    return model


def with_stored_head(model_config: ModelConfig, folder: str) -> ModelConfig:
    """Return the config of a quantised checkpoint with what its files say of the LM head, since `ignore` need not."""
    quantization = model_config.quantization
    if quantization is None or not quantization.is_stored:
        return model_config
    if not any(name.startswith("lm_head.weight_scale") for _, name, _ in stored_tensors(folder)):
        return model_config
    return replace(model_config, quantization=replace(quantization, has_head=True))


def load_weights(model: CausalLM, folder: str, rank: int = 0) -> None:
    """Fill `model` from the safetensors of a folder.

    Args:
        model: gets the weights.
        folder: has the files.
        rank: of this process; 0 shows a bar.

    Raises:
        ValueError: no weights there, a file missing or damaged, tensors missing, left over, or of the wrong shape or
            dtype. Floats are converted to the model's; a warning says so where the config does not have them so.
    """
    slices, stored = model.weight_slices(), dict[str, torch.dtype]()
    _check_names(model, slices, folder)
    num_bytes = sum(part.region.nbytes for part in slices.values())
    with loading_bar("Loading weights", num_bytes, "B", rank) as bar:
        for _, name, tensor in stored_tensors(folder):
            parts = [(target, slices[target]) for target in model.weight_targets(name)]
            for target, rows in rows_of(tensor, parts):
                stored_dtype = slices[target].fill(name, rows)
                if slices[target].has_model_dtype:
                    stored[name] = stored_dtype
                bar.update(slices[target].region.nbytes)
    if rank == 0:
        _warn_of_conversions(folder, stored, getattr(torch, model.config.dtype), next(model.parameters()).dtype)


def _check_names(model: CausalLM, slices: Mapping[WeightTarget, WeightSlice], folder: str) -> None:
    """Refuse, before any is read, tensors that are missing, left over, or there twice."""
    found, surplus = set[WeightTarget](), []
    for file, name, _ in stored_tensors(folder):
        for target in model.weight_targets(name):
            if target in found:
                raise ValueError(f"tensor {name!r} is there twice, the second time in {file!r}")
            found.add(target)
            if target not in slices:
                surplus.append(name)
    missing = [str(target) for target in slices if target not in found]
    if surplus or missing:
        raise ValueError(misfit(folder, missing, surplus))


def rows_of(tensor: Any, parts: list[tuple[WeightTarget, WeightSlice]]) -> Iterator[tuple[WeightTarget, Any]]:
    """Return each target with the rows of a tensor that it gets; the last gets what is left."""
    if len(parts) < 2 or tensor.get_shape() in ([], [1]):
        # One number is that of all.
        yield from ((target, tensor) for target, _ in parts)
        return
    if len(tensor.get_shape()) > len(parts[0][1].shape):
        for number, (_, own) in enumerate(groupby(parts, lambda part: part[0].expert)):
            yield from rows_of(StackedTensor(tensor, number), list(own))
        return
    start, num_rows = 0, tensor.get_shape()[0]
    for number, (target, part) in enumerate(parts, 1):
        stop = num_rows if number == len(parts) else start + part.shape[0]
        yield target, TensorRows(tensor, start, stop)
        start = stop


def shape_of(parts: list[tuple[WeightTarget, WeightSlice]]) -> list[int]:
    """Return the shape of the tensor that has all these parts."""
    experts = {target.expert for target, _ in parts}
    _, first = parts[0]
    rows = sum(part.shape[0] for _, part in parts) // len(experts)
    return [*([len(experts)] if len(experts) > 1 else []), rows, *first.shape[1:]]


def _warn_of_conversions(
    folder: str, stored: dict[str, torch.dtype], config_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Warn of tensors whose stored dtype is neither the config's, which the user or the CPU may change, nor `dtype`."""
    odd = [name for name, stored_dtype in stored.items() if stored_dtype not in (config_dtype, dtype)]
    if odd:
        warnings.warn(
            f"{len(odd)} tensors in {folder!r}, such as {odd[0]!r}, are stored as {stored[odd[0]]}, though the config "
            f"says {config_dtype}: they were converted to {dtype}",
            stacklevel=2,
        )


def init_dummy_weights(model: CausalLM, seed: int) -> None:
    """Fill `model` with normal random numbers of the config's spread; norms with ones.

    Each tensor of a checkpoint is drawn in whole, whatever this rank holds of it, so that the ranks share one model.
    """
    like = next(model.parameters())
    generator = torch.Generator(like.device).manual_seed(seed % 2**63)
    for target, part in model.weight_slices().items():
        if "norm" in target.param:
            part.region.fill_(1.0)
            continue
        drawn = torch.empty(part.shape, dtype=like.dtype, device=like.device)
        drawn.normal_(0.0, model.config.initializer_range, generator=generator)
        part.store(str(target), drawn[part.index])
