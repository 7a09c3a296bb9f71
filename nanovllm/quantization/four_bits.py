"""Weights of four-bit values with scales for groups of inputs, and how published formats have them.

Whatever a checkpoint has is packed as `FourBitMatrix` says while it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.quantization import FourBits, QuantizationConfig
from nanovllm.kernels import ops
from nanovllm.kernels.four_bits import RUN, FourBitMatrix, pack, quantize_four_bits, wide_scales
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.weight import MatrixShard, Rows, Stream, Weight
from nanovllm.weights.slices import LoadableModule, WeightSlice, WeightTarget

if TYPE_CHECKING:
    from nanovllm.kernels.rms_norm import Norm

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs by their places in a word, from the lowest bits on."""
_ORDER = tuple(range(8))
_INTS = (torch.int32,)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Convert: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class FourBitValues(LoadableModule):
    """Values in four bits, with their scales; see `FourBitMatrix`.

    Args:
        shard: this rank's part of the matrix; groups must not be cut between inputs.
        config: what has one scale, and what the checkpoint has of it.
        stack: sizes of the dimensions before the matrix's own: of experts their number.

    Attributes:
        values, scales, zeros, factors: of `FourBitMatrix`.
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None
    factors: torch.Tensor | None

    def __init__(self, shard: MatrixShard, config: QuantizationConfig, stack: tuple[int, ...] = ()) -> None:
        super().__init__()
        assert config.four_bits is not None
        self.shard, self.four_bits, self.has_input_scale = shard, config.four_bits, config.has_input_scale
        num_outs, num_ins = shard.size
        if shard.inputs.start % config.input_unit:
            raise ValueError(f"inputs {shard.inputs.start} ... of a rank begin within a group of {config.input_unit}")
        groups = *stack, num_outs, -(-num_ins // (self.four_bits.group or num_ins or 1))
        packed = torch.empty(*stack, num_outs, -(-num_ins // RUN) * RUN // 2, dtype=torch.uint8)
        self.values = nn.Parameter(packed, requires_grad=False)
        is_integer, has_factors = self.four_bits.format == "int4", self.four_bits.format == "nvfp4"
        self.register_buffer("scales", torch.empty(groups, dtype=None if is_integer else torch.uint8))
        zeros = torch.empty(groups, dtype=torch.uint8) if self.four_bits.has_zeros else None
        self.register_buffer("zeros", zeros)
        self.register_buffer("factors", torch.empty(*stack, num_outs, dtype=torch.float32) if has_factors else None)

    @property
    def matrix(self) -> FourBitMatrix:
        """All as the kernels take it."""
        four_bits, num_ins = self.four_bits, self.shard.inputs.size
        group = four_bits.group or num_ins
        return FourBitMatrix(self.values, self.scales, self.zeros, self.factors, group, four_bits.format, num_ins)

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        self.values = nn.Parameter(torch.empty_like(self.values, device=device), requires_grad=False)
        for name, buffer in list(self.named_buffers(recurse=False)):
            own = dtype if name == "scales" and self.four_bits.format == "int4" else buffer.dtype
            setattr(self, name, torch.empty_like(buffer, dtype=own, device=device))

    def part_slices(
        self, target: WeightTarget, outputs: Shard, region: FourBitMatrix
    ) -> dict[WeightTarget, WeightSlice]:
        """Return the slices of one projection's tensors.

        Args:
            target: the projection, with the layer's name as `param`.
            outputs: of this rank.
            region: where they go.
        """
        if self.four_bits.stored is None:
            slices: Mapping[str, WeightSlice] = {"weight": RoundingSlice.of(outputs, self.shard.inputs, region)}
        else:
            slices = _FORMATS[self.four_bits.stored](_Projection(self.four_bits, outputs, self.shard.inputs, region))
        if self.has_input_scale:
            # It is not used.
            name = "input_global_scale" if self.four_bits.stored == "nvfp4" else "input_scale"
            slices = {**slices, name: PackedSlice((), (), self.values, stored_as=_FLOATS, shapes=((1,),))}
        return {target._replace(param=f"{target.param}.{name}"): part for name, part in slices.items()}


class FourBitWeight(FourBitValues, Weight):
    """A linear layer's values in four bits, and its bias, [outputs of this rank], if it has one."""

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
            region = self.matrix.outputs(start, start + outputs.size)
            slices |= self.part_slices(WeightTarget(layer, part), outputs, region)
            start += outputs.size
        return slices

    @property
    @override
    def kernel_rows(self) -> Collection[int]:
        return self.policy.four_bit_rows

    @override
    def multiply(
        self, x: Rows, norm: Norm | None = None, residual: torch.Tensor | None = None, gated: bool = False
    ) -> Stream:
        assert isinstance(x, torch.Tensor)
        return ops.norm_linear(x, self.matrix, self.bias, norm, residual, gated, policy=self.policy)

    @override
    def multiply_into(self, x: Rows, residual: torch.Tensor) -> Stream:
        if self.bias is not None:
            return self.multiply(x)[0], residual
        return ops.linear_into(x, self.matrix, residual, self.policy)


@dataclass(frozen=True)
class PackedSlice(WeightSlice):
    """A slice of a tensor that is converted when it is stored.

    Attributes:
        convert: from what is read to what the region has; None if the tensor is not used.
        stored_as: dtypes that the tensor may have.
        shapes: other shapes that it may have.
        check: rejects values, given the tensor's name and a part of it; None if all can be stored.
    """

    has_model_dtype: ClassVar[bool] = False

    convert: Convert | None = None
    stored_as: tuple[torch.dtype, ...] = _INTS
    shapes: tuple[tuple[int, ...], ...] = ()
    check: Callable[[str, torch.Tensor], None] | None = None

    @override
    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        if dtype not in self.stored_as:
            raise ValueError(f"tensor {name!r} is stored as {dtype}; the config asks for one of {self.stored_as}")

    @override
    def check_shape(self, name: str, shape: list[int]) -> None:
        if tuple(shape) not in (self.shape, *self.shapes):
            raise ValueError(f"tensor {name!r} has shape {shape}; the config asks for {list(self.shape)}")

    @override
    def check_values(self, name: str, tensor: Any) -> None:
        if self.check is not None:
            self.check(name, tensor[()])

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        # A GPU checks and converts faster.
        values = values.to(self.region.device)
        self.check_values(name, values)
        if self.convert is not None:
            self.region.copy_(self.convert(values))


def _check_finite(name: str, values: torch.Tensor) -> None:
    if not values.isfinite().all():
        raise ValueError(f"scales {name!r} must be finite")


def _check_e8m0(name: str, values: torch.Tensor) -> None:
    if (values == 255).any():
        raise ValueError(f"scales {name!r} must be numbers")


@dataclass(frozen=True)
class RoundingSlice(WeightSlice):
    """A slice of a tensor of floats that is rounded when it is stored.

    matrix: where it goes.
    """

    has_model_dtype: ClassVar[bool] = False

    matrix: FourBitMatrix

    @classmethod
    def of(cls, outputs: Shard, inputs: Shard, region: FourBitMatrix) -> RoundingSlice:  # type: ignore[override]
        """Return the slice whose outputs and inputs go into a matrix."""
        index, matrix = (outputs.present, inputs.present), region.outputs(0, outputs.num_present)
        return cls((outputs.total, inputs.total), index, matrix.values.data, matrix)

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        """Round groups of inputs; raise if a value is not finite."""
        matrix = self.matrix
        values = self.scaled(values.to(self.region.device))
        made = quantize_four_bits(values, matrix.group, matrix.format, matrix.scales.dtype)
        for scales in (wide_scales(made.scales, matrix.format), made.factors):
            if scales is not None and not scales.isfinite().all():
                raise ValueError(f"{name!r} has values that are not finite, and cannot be quantised")
        self.region.copy_(made.values)
        matrix.scales.copy_(made.scales)
        if matrix.factors is not None and made.factors is not None:
            matrix.factors.copy_(made.factors)


def _words(words: torch.Tensor, dim: int, order: tuple[int, ...] = _ORDER) -> torch.Tensor:
    """Return the bits of values, uint8, eight of them in an int32, along a dimension and in some order."""
    shifts = torch.tensor([4 * order.index(i) for i in range(8)], device=words.device)
    spread = words.movedim(dim, -1).unsqueeze(-1) >> shifts & 15
    return spread.to(torch.uint8).flatten(-2).movedim(-1, dim)


def _pairs(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of values, [outs, ins] uint8; the first of two lies in the low half of a byte."""
    values = values.flatten(1)
    return torch.stack((values & 15, values >> 4), 2).flatten(1)


class _Projection:
    """A projection of this rank, for which formats have slices.

    Attributes:
        outs, ins, groups: the tensors' slices of outputs, inputs and groups.
        out_words, in_words: the tensors' slices of words of eight, and how many there are.
        matrix: where they go.
    """

    def __init__(self, four_bits: FourBits, outputs: Shard, inputs: Shard, region: FourBitMatrix) -> None:
        self.four_bits, self.outputs, self.inputs = four_bits, outputs.total, inputs.total
        self.outs, self.ins, self.matrix = outputs.present, inputs.present, region.outputs(0, outputs.num_present)
        if four_bits.stored in ("gptq", "gptq_v2", "awq", "packed") and self.outs.start % 8:
            raise ValueError(f"outputs {self.outs.start} ... of a rank begin within a word of 8")
        self.group = four_bits.group or inputs.total
        self.num_groups = -(-inputs.total // self.group)
        self.groups = _units(self.ins, self.group)
        self.num_out_words, self.out_words = -(-outputs.total // 8), _units(self.outs, 8)
        self.num_in_words, self.in_words = -(-inputs.total // 8), _units(self.ins, 8)

    def packed(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the bytes of values, [outs, ins], without the padding of words."""
        return pack(codes[: len(self.matrix.values), : self.matrix.in_features])

    def zeros(self, zeros: torch.Tensor) -> torch.Tensor:
        """Return zeros, [outs, groups], without the padding of words."""
        return zeros[: len(self.matrix.values)]


def _units(items: slice, unit: int) -> slice:
    """Return the units that items lie in."""
    return slice(items.start // unit, -(-items.stop // unit) if items.stop > items.start else items.start // unit)


def _gptq(part: _Projection) -> dict[str, WeightSlice]:
    """Words of inputs of an output, [inputs / 8, outputs]; zeros minus 1, but in the format's second version."""
    matrix, offset = part.matrix, int(part.four_bits.stored == "gptq")

    def zeros(words: torch.Tensor) -> torch.Tensor:
        return part.zeros((_words(words, 1).T + offset) & 15)

    def check_zeros(name: str, words: torch.Tensor) -> None:
        if (zeros(words) != 8).any():
            raise ValueError(f"{name!r} has zeros other than 8, though the config says that values are symmetric")

    def check_groups(name: str, groups: torch.Tensor) -> None:
        if not torch.equal(groups.long(), torch.arange(len(groups), device=groups.device) // part.group):
            raise ValueError(f"{name!r} has groups that are not in order: take a checkpoint made with desc_act=false")

    zeros_shape, zeros_index = (part.num_groups, part.num_out_words), (part.groups, part.out_words)
    if matrix.zeros is None:
        own = PackedSlice(zeros_shape, zeros_index, matrix.scales, check=check_zeros, outputs_dim=1)
    else:
        own = PackedSlice(zeros_shape, zeros_index, matrix.zeros, convert=zeros, outputs_dim=1)
    return {
        "qweight": PackedSlice(
            (part.num_in_words, part.outputs), (part.in_words, part.outs), matrix.values,
            convert=lambda words: part.packed(_words(words, 0).T), outputs_dim=1,
        ),
        "qzeros": own,
        "scales": _transposed_scales(part),
        "g_idx": PackedSlice(
            (part.inputs,), (slice(0, part.inputs),), matrix.scales, check=check_groups, outputs_dim=None
        ),
    }  # fmt: skip


def _transposed_scales(part: _Projection) -> WeightSlice:
    return PackedSlice(
        (part.num_groups, part.outputs), (part.groups, part.outs), part.matrix.scales, convert=torch.t,
        stored_as=_FLOATS, check=_check_finite, outputs_dim=1,
    )  # fmt: skip


def _awq(part: _Projection) -> dict[str, WeightSlice]:
    """Words of outputs of an input, [inputs, outputs / 8], in an order of their own."""
    assert part.matrix.zeros is not None
    return {
        "qweight": PackedSlice(
            (part.inputs, part.num_out_words), (part.ins, part.out_words), part.matrix.values,
            convert=lambda words: part.packed(_words(words, 1, _AWQ_ORDER).T), outputs_dim=1,
        ),
        "qzeros": PackedSlice(
            (part.num_groups, part.num_out_words), (part.groups, part.out_words), part.matrix.zeros,
            convert=lambda words: part.zeros(_words(words, 1, _AWQ_ORDER).T), outputs_dim=1,
        ),
        "scales": _transposed_scales(part),
    }  # fmt: skip


def _compressed(part: _Projection) -> dict[str, WeightSlice]:
    """Words of inputs of an output, [outputs, inputs / 8], and of outputs' zeros, [outputs / 8, groups]."""
    slices: dict[str, WeightSlice] = {
        "weight_packed": PackedSlice(
            (part.outputs, part.num_in_words), (part.outs, part.in_words), part.matrix.values,
            convert=lambda words: part.packed(_words(words, 1)),
        ),
        "weight_scale": PackedSlice(
            (part.outputs, part.num_groups), (part.outs, part.groups), part.matrix.scales, convert=torch.Tensor.float,
            stored_as=_FLOATS, check=_check_finite,
        ),
        "weight_shape": PackedSlice(
            (2,), (slice(0, 2),), part.matrix.values, stored_as=(torch.int64, torch.int32), outputs_dim=None
        ),
    }  # fmt: skip
    if part.matrix.zeros is not None:
        slices["weight_zero_point"] = PackedSlice(
            (part.num_out_words, part.num_groups), (part.out_words, part.groups), part.matrix.zeros,
            convert=lambda words: part.zeros(_words(words, 0)),
        )  # fmt: skip
    return slices


def _pairs_of_inputs(part: _Projection) -> WeightSlice:
    """Bytes of two inputs of an output, [outputs, inputs / 2]."""
    return PackedSlice(
        (part.outputs, part.inputs // 2), (part.outs, _units(part.ins, 2)), part.matrix.values,
        convert=lambda pairs: part.packed(_pairs(pairs)), stored_as=(torch.uint8,),
    )  # fmt: skip


def _nvfp4(part: _Projection, values: str, factor: str, convert: Convert) -> dict[str, WeightSlice]:
    """Bytes of inputs, scales in e4m3, and one number that is converted to what multiplies all scales."""
    assert part.matrix.factors is not None
    return {
        values: _pairs_of_inputs(part),
        "weight_scale": PackedSlice(
            (part.outputs, part.num_groups), (part.outs, part.groups), part.matrix.scales,
            convert=lambda scales: scales.view(torch.uint8), stored_as=(torch.float8_e4m3fn,),
        ),
        factor: PackedSlice(
            (), (), part.matrix.factors, convert=convert, stored_as=_FLOATS, shapes=((1,),), check=_check_finite
        ),
    }  # fmt: skip


def _e8m0(part: _Projection) -> WeightSlice:
    return PackedSlice(
        (part.outputs, part.num_groups), (part.outs, part.groups), part.matrix.scales, convert=lambda scales: scales,
        stored_as=(torch.uint8,), check=_check_e8m0,
    )  # fmt: skip


def _mxfp4(part: _Projection) -> dict[str, WeightSlice]:
    """Bytes of inputs, [outputs, groups, 16], and scales in e8m0."""
    shape, index = (part.outputs, part.num_groups), (part.outs, part.groups)
    return {
        "blocks": PackedSlice(
            (*shape, 16), (*index, slice(0, 16)), part.matrix.values,
            convert=lambda pairs: part.packed(_pairs(pairs)), stored_as=(torch.uint8,),
        ),
        "scales": _e8m0(part),
    }  # fmt: skip


_FORMATS: dict[str, Callable[[_Projection], dict[str, WeightSlice]]] = {
    "gptq": _gptq, "gptq_v2": _gptq, "awq": _awq, "packed": _compressed, "mxfp4": _mxfp4,
    "packed_mxfp4": lambda part: {"weight_packed": _pairs_of_inputs(part), "weight_scale": _e8m0(part)},
    "nvfp4": lambda part: _nvfp4(part, "weight_packed", "weight_global_scale", torch.reciprocal),
    "modelopt": lambda part: _nvfp4(part, "weight", "weight_scale_2", torch.Tensor.float),
}  # fmt: skip
