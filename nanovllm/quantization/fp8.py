"""Weights of e4m3 values with float32 scales, and the scales of a KV cache in e4m3."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.quantization import BLOCK, KVGranularity, QuantizationConfig
from nanovllm.kernels.e4m3 import Fp8Matrix, quantize
from nanovllm.kernels.linear.norm_linear import multiply_rounded, row_rounding
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding
from nanovllm.kernels.rms_norm import Norm
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.quantized import QuantizedWeight
from nanovllm.quantization.weight import MatrixShard, Place, Rows, Stream
from nanovllm.weights.slices import LoadableModule, Slices, WeightSlice, WeightTarget


class Fp8Weight(QuantizedWeight):
    """Values in e4m3, with the scales of the whole matrix, so that ranks round as one does.

    Attributes:
        values: [outputs of this rank, inputs of this rank], float8_e4m3fn, after the experts of this rank if there are
            some.
        scales: of `block_outs` by `block_ins` values each, float32; see `Fp8Matrix`.
    """

    scales: torch.Tensor

    def __init__(self, shard: MatrixShard, config: QuantizationConfig, has_bias: bool = False) -> None:
        super().__init__(shard, config, has_bias)
        (num_outs, num_ins), has_blocks = shard.size, config.granularity == "block"
        self.block_ins = BLOCK if has_blocks else num_ins
        # Of projections that are not whole blocks each output has scales of its own.
        self.block_outs = BLOCK if has_blocks and _are_aligned(list(shard.outputs.values())) else 1
        out_blocks, in_blocks = -(-num_outs // self.block_outs), -(-num_ins // self.block_ins)
        values = torch.empty(*shard.stack, num_outs, num_ins, dtype=torch.float8_e4m3fn)
        self.values = nn.Parameter(values, requires_grad=False)
        self.register_buffer("scales", torch.empty(*shard.stack, out_blocks, in_blocks, dtype=torch.float32))

    @property
    @override
    def matrix(self) -> Fp8Matrix:
        return Fp8Matrix(self.values, self.scales, self.block_outs, self.block_ins)

    @override
    def part_slices(self, outputs: Shard, place: Place) -> dict[str, WeightSlice]:
        inputs, region = self.shard.inputs, self.region(place)
        values = region.values.data
        if not self.config.is_stored:
            shape, index = (outputs.total, inputs.total), (outputs.present, slice(None))
            return {"weight": QuantizingSlice(shape, index, values, region.scales, inputs.present)}
        return {
            "weight": replace(WeightSlice.of((outputs, inputs), values), dtypes=(torch.float8_e4m3fn,)),
            "weight_scale": _scale_slice(self.config, outputs, inputs, region),
        }

    @property
    @override
    def kernel_sizes(self) -> tuple[Collection[int], Collection[int]]:
        if self.shard.experts is not None:
            return (), ()
        return self.policy.fp8_rows, self.policy.fp8_tokens

    @override
    def row_rounding(self, num_rows: int, dtype: torch.dtype) -> Rounding | None:
        return row_rounding(num_rows, dtype, self.matrix, self.policy)

    @override
    def takes_gate_up(self, num_rows: int, dtype: torch.dtype) -> bool:
        return self.policy.rounds_gate_up(num_rows, dtype, self.values.device)

    @override
    def multiply(
        self, x: Rows, norm: Norm | None = None, residual: torch.Tensor | None = None, gated: bool = False
    ) -> Stream:
        if isinstance(x, Fp8Rows):
            return multiply_rounded(x, self.matrix, self.bias, gated, self.policy), residual
        return super().multiply(x, norm, residual, gated)


def _are_aligned(shards: list[Shard]) -> bool:
    """Return whether all projections begin with a block, in the checkpoint and here."""
    return all(shard.start % BLOCK == 0 for shard in shards) and all(shard.size % BLOCK == 0 for shard in shards[:-1])


def _as_column(scales: torch.Tensor) -> torch.Tensor:
    return scales.reshape(-1, 1)


def _check_scales(name: str, values: torch.Tensor) -> None:
    if not (values.isfinite() & (values >= 0)).all():
        raise ValueError(f"scales {name!r} must be finite and not negative")


def _check_kv_scales(name: str, values: torch.Tensor) -> None:
    """Raise if keys or values cannot be divided by the scales."""
    if not (values.isfinite() & (values > 0)).all():
        raise ValueError(f"scales {name!r} must be finite and positive")


def _scale_slice(config: QuantizationConfig, outputs: Shard, inputs: Shard, matrix: Fp8Matrix) -> WeightSlice:
    """Return the slice of the scales of this rank's outputs and inputs of a projection."""
    region, present, make = matrix.scales, outputs.present, partial(WeightSlice, check=_check_scales)
    if config.granularity == "tensor":
        return make((), (), region, convert=_as_column, shapes=((1,),))
    if config.granularity == "channel":
        rows = region[: outputs.num_present]
        return make((outputs.total, 1), (present,), rows, convert=_as_column, shapes=((outputs.total,),))
    blocks = -(-outputs.total // BLOCK), -(-inputs.total // BLOCK)
    first, last = present.start // BLOCK, -(-present.stop // BLOCK)
    index = slice(first, last), slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
    if matrix.block_outs == BLOCK:
        return make(blocks, index, region[: last - first], convert=torch.Tensor.float)
    # A scale of several outputs is stored for each. The region may be on the meta device.
    numbers = torch.arange(present.start, present.stop, device="cpu") // BLOCK - first
    return make(blocks, index, region[: outputs.num_present], convert=lambda scales: scales[numbers])


@dataclass(frozen=True)
class QuantizingSlice(WeightSlice):
    """A slice of a tensor of floats that is quantised when it is stored: all inputs of this rank's outputs.

    Attributes:
        scales: where they go.
        inputs: of this rank.
    """

    is_plain = False

    scales: torch.Tensor
    inputs: slice

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        """Quantise rows with the scale of all their inputs, other ranks' included; raise if a value is not finite."""
        quantized = quantize(self.scaled(values), 1, values.shape[1])
        if not quantized.scales.isfinite().all():
            raise ValueError(f"{name!r} has values that are not finite, and cannot be quantised")
        self.region.copy_(quantized.values[:, self.inputs])
        self.scales.copy_(quantized.scales)


class KVCacheScales(LoadableModule):
    """The scales of one layer's keys and values, [KV heads of this rank] float32; one for all heads, or for each."""

    param_dtype = torch.float32

    def __init__(self, kv_heads: Shard, granularity: KVGranularity) -> None:
        super().__init__()
        self.kv_heads, self.granularity = kv_heads, granularity
        self.k_scale, self.v_scale = (
            nn.Parameter(torch.empty(kv_heads.size, dtype=torch.float32), requires_grad=False) for _ in range(2)
        )

    @override
    def weight_slices(self, name: str) -> Slices:
        total = self.kv_heads.total
        shapes = ((), (1,)) if self.granularity == "tensor" else ((total,), (total, 1, 1))
        index = () if self.granularity == "tensor" else (self.kv_heads.present,)
        make = partial(WeightSlice, convert=_as_column, shapes=shapes[1:], check=_check_kv_scales)
        return {
            WeightTarget(f"{name}.{scale}"): make(shapes[0], index, getattr(self, scale).data[:, None])
            for scale in ("k_scale", "v_scale")
        }
