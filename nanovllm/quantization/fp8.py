"""Weights of e4m3 values with float32 scales, and the scales of a KV cache in e4m3."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.quantization import BLOCK, KVGranularity, QuantizationConfig
from nanovllm.kernels.e4m3 import Fp8Matrix, quantize
from nanovllm.kernels.linear.norm_linear import linear_into, multiply_rounded, norm_linear, row_rounding
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding
from nanovllm.kernels.rms_norm import Norm
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.weight import MatrixShard, Rows, Stream, Weight
from nanovllm.weights.slices import LoadableModule, WeightSlice, WeightTarget


class Fp8Values(LoadableModule):
    """Values in e4m3, with the scales of the whole matrix, so that ranks round as one does.

    Args:
        shard: this rank's part of the matrix; blocks of scales must not be cut between inputs.
        config: what has one scale, and what the checkpoint has of it.
        stack: sizes of the dimensions before the matrix's own: of experts their number.

    Attributes:
        values: [*stack, outputs of this rank, inputs of this rank], float8_e4m3fn.
        scales: of `block_outs` by `block_ins` values each, float32; see `Fp8Matrix`.
    """

    scales: torch.Tensor

    def __init__(self, shard: MatrixShard, config: QuantizationConfig, stack: tuple[int, ...] = ()) -> None:
        super().__init__()
        num_outs, num_ins = shard.size
        self.shard, self.config = shard, config
        self.has_blocks = config.granularity == "block"
        if self.has_blocks and shard.inputs.start % BLOCK:
            raise ValueError(f"inputs {shard.inputs.start} ... of a rank begin within a block of {BLOCK}")
        self.block_ins = BLOCK if self.has_blocks else num_ins
        # Of projections that are not whole blocks each output has scales of its own.
        self.block_outs = BLOCK if self.has_blocks and _are_aligned(list(shard.outputs.values())) else 1
        out_blocks, in_blocks = -(-num_outs // self.block_outs), -(-num_ins // self.block_ins)
        values = torch.empty(*stack, num_outs, num_ins, dtype=torch.float8_e4m3fn)
        self.values = nn.Parameter(values, requires_grad=False)
        self.register_buffer("scales", torch.empty(*stack, out_blocks, in_blocks, dtype=torch.float32))

    @property
    def matrix(self) -> Fp8Matrix:
        """Values and scales as the kernels take them."""
        return Fp8Matrix(self.values, self.scales, self.block_outs, self.block_ins)

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        self.values = nn.Parameter(torch.empty_like(self.values, device=device), requires_grad=False)
        self.scales = torch.empty_like(self.scales, device=device)

    def part_slices(self, target: WeightTarget, outputs: Shard, region: Fp8Matrix) -> dict[WeightTarget, WeightSlice]:
        """Return the slices of one projection's values and scales.

        Args:
            target: the projection, with the layer's name as `param`.
            outputs: of this rank.
            region: where they go.
        """
        config, inputs, slices = self.config, self.shard.inputs, dict[str, WeightSlice]()
        if not config.is_stored:
            slices["weight"] = QuantizingSlice.of_rows(outputs, inputs, region)
        else:
            slices["weight"] = E4M3Slice.of((outputs, inputs), region.values.data)
            slices["weight_scale"] = ScaleSlice.of_blocks(config, outputs, inputs, region)
        if config.has_input_scale:
            # It is not used.
            slices["input_scale"] = ScaleSlice((), (), torch.empty(1, 1), ((), (1,)))
        return {target._replace(param=f"{target.param}.{name}"): part for name, part in slices.items()}


class Fp8Weight(Fp8Values, Weight):
    """A linear layer's values in e4m3, and its bias, [outputs of this rank], if it has one."""

    def __init__(self, shard: MatrixShard, config: QuantizationConfig, has_bias: bool = False) -> None:
        super().__init__(shard, config)
        self.bias = nn.Parameter(torch.empty(shard.size[0]), requires_grad=False) if has_bias else None

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(dtype, device)
        self.allocate_bias(dtype, device)

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        layer = name.rpartition(".")[0]
        slices, start = self.bias_slices(layer), 0
        for part, outputs in self.shard.outputs.items():
            stop = start + outputs.size
            slices |= self.part_slices(WeightTarget(layer, part), outputs, self.matrix.outputs(start, stop))
            start = stop
        return slices

    @property
    @override
    def kernel_rows(self) -> Collection[int]:
        return self.policy.fp8_rows

    @property
    @override
    def kernel_tokens(self) -> Collection[int]:
        return self.policy.fp8_tokens

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
        return norm_linear(x, self.matrix, self.bias, norm, residual, gated, policy=self.policy)

    @override
    def multiply_into(self, x: Rows, residual: torch.Tensor) -> Stream:
        if self.bias is not None:
            return self.multiply(x)[0], residual
        return linear_into(x, self.matrix, residual, self.policy)


def _are_aligned(shards: list[Shard]) -> bool:
    """Return whether all projections begin with a block, in the checkpoint and here."""
    return all(shard.start % BLOCK == 0 for shard in shards) and all(shard.size % BLOCK == 0 for shard in shards[:-1])


@dataclass(frozen=True)
class E4M3Slice(WeightSlice):
    """A slice of a tensor that is stored in e4m3."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float8_e4m3fn,)
    has_model_dtype: ClassVar[bool] = False

    @override
    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        # Scales have the factor.
        return values


@dataclass(frozen=True)
class ScaleSlice(WeightSlice):
    """Scales, stored as floats of 16 or 32 bits; a scale for each output may be stored for several at once.

    Attributes:
        shape: the usual one, of `shapes`.
        shapes: all shapes that the stored tensor may have.
        rows: of what is read, for each row of the region; None to take them as they are.
    """

    has_model_dtype: ClassVar[bool] = False

    shapes: tuple[tuple[int, ...], ...] = ()
    rows: torch.Tensor | None = None

    @classmethod
    def of_blocks(cls, config: QuantizationConfig, outputs: Shard, inputs: Shard, matrix: Fp8Matrix) -> ScaleSlice:
        """Return the scales of this rank's outputs and inputs of a projection."""
        region = matrix.scales
        if config.granularity == "tensor":
            return cls((), (), region, ((), (1,)))
        present = outputs.present
        if config.granularity == "channel":
            shapes = (outputs.total, 1), (outputs.total,)
            return cls(shapes[0], (present,), region[: outputs.num_present], shapes)
        blocks = -(-outputs.total // BLOCK), -(-inputs.total // BLOCK)
        first, last = present.start // BLOCK, -(-present.stop // BLOCK)
        index = slice(first, last), slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
        if matrix.block_outs == BLOCK:
            return cls(blocks, index, region[: last - first], (blocks,))
        # The region may be on the meta device.
        rows = torch.arange(present.start, present.stop, device="cpu") // BLOCK - first
        return cls(blocks, index, region[: outputs.num_present], (blocks,), rows)

    @override
    def check_shape(self, name: str, shape: list[int]) -> None:
        if shape not in [list(allowed) for allowed in self.shapes]:
            raise ValueError(f"scales {name!r} have shape {shape}; the config asks for {list(self.shape)}")

    @override
    def check_values(self, name: str, tensor: Any) -> None:
        values: torch.Tensor = tensor[()]
        if not (values.isfinite() & (values >= 0)).all():
            raise ValueError(f"scales {name!r} must be finite and not negative")

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        self.check_values(name, values)
        values = self.scaled(values)
        if values.dim() < 2:
            values = values.view(-1, 1)
        self.region.copy_(values if self.rows is None else values[self.rows])


@dataclass(frozen=True)
class QuantizingSlice(WeightSlice):
    """A slice of a tensor of floats that is quantised when it is stored: all inputs of this rank's outputs.

    Attributes:
        matrix: values and scales, of this rank's inputs.
        inputs: of this rank.
    """

    has_model_dtype: ClassVar[bool] = False

    matrix: Fp8Matrix
    inputs: slice

    @classmethod
    def of_rows(cls, outputs: Shard, inputs: Shard, matrix: Fp8Matrix) -> QuantizingSlice:
        """Return the slice whose outputs go into a matrix."""
        index = outputs.present, slice(None)
        return cls((outputs.total, inputs.total), index, matrix.values.data, matrix, inputs.present)

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        """Quantise rows with the scale of all their inputs, other ranks' included; raise if a value is not finite."""
        quantized = quantize(self.scaled(values.to(self.region.device)), 1, values.shape[1])
        if not quantized.scales.isfinite().all():
            raise ValueError(f"{name!r} has values that are not finite, and cannot be quantised")
        self.region.copy_(quantized.values[:, self.inputs])
        self.matrix.scales.copy_(quantized.scales)


class KVCacheScales(LoadableModule):
    """The scales of one layer's keys and values, [KV heads of this rank] float32; one for all heads, or for each."""

    def __init__(self, kv_heads: Shard, granularity: KVGranularity) -> None:
        super().__init__()
        self.kv_heads, self.granularity = kv_heads, granularity
        self.k_scale, self.v_scale = (
            nn.Parameter(torch.empty(kv_heads.size, dtype=torch.float32), requires_grad=False) for _ in range(2)
        )

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(torch.float32, device)

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        total = self.kv_heads.total
        shapes = ((), (1,)) if self.granularity == "tensor" else ((total,), (total, 1, 1))
        index = () if self.granularity == "tensor" else (self.kv_heads.present,)
        return {
            WeightTarget(f"{name}.{scale}"): KVScaleSlice(shapes[0], index, getattr(self, scale).data[:, None], shapes)
            for scale in ("k_scale", "v_scale")
        }


@dataclass(frozen=True)
class KVScaleSlice(ScaleSlice):
    """Scales by which what is stored is divided first."""

    @override
    def check_values(self, name: str, tensor: Any) -> None:
        values: torch.Tensor = tensor[()]
        if not (values.isfinite() & (values > 0)).all():
            raise ValueError(f"scales {name!r} must be finite and positive")

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        super().store(name, values.flatten())
