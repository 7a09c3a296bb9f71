"""Weights of four-bit values with scales for groups of inputs, and how published formats have them.

Whatever a checkpoint has is packed as `FourBitMatrix` says while it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

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
_INTS, _BYTES = (torch.int32,), (torch.uint8,)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
            slices = _FORMATS[self.four_bits.stored](_Part(self.four_bits, outputs, self.shard.inputs, region))
        if self.has_input_scale:
            # It is not used.
            name = "input_global_scale" if self.four_bits.stored == "nvfp4" else "input_scale"
            slices = {**slices, name: IgnoredSlice((), (), torch.empty(0), shapes=((), (1,)))}
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
        return self.multiply(x)[0], residual


@dataclass(frozen=True)
class PackedSlice(WeightSlice):
    """A slice of a tensor that is converted when it is stored.

    Attributes:
        convert: from what is read to what the region has.
        stored_as: dtypes that the tensor may have.
        shapes: other shapes that it may have.
    """

    has_model_dtype: ClassVar[bool] = False

    convert: Callable[[torch.Tensor], torch.Tensor] = lambda values: values
    stored_as: tuple[torch.dtype, ...] = _INTS
    shapes: tuple[tuple[int, ...], ...] = ()

    @override
    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        if dtype not in self.stored_as:
            raise ValueError(f"tensor {name!r} is stored as {dtype}; the config asks for one of {self.stored_as}")

    @override
    def check_shape(self, name: str, shape: list[int]) -> None:
        if tuple(shape) not in (self.shape, *self.shapes):
            raise ValueError(f"tensor {name!r} has shape {shape}; the config asks for {list(self.shape)}")

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        self.check_values(name, WholeValues(values))
        self.region.copy_(self.convert(values))


class WholeValues:
    """Values as `check_values` takes them."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.values


@dataclass(frozen=True)
class ScalesSlice(PackedSlice):
    """Scales, or what multiplies or divides all of them, which must be numbers."""

    @override
    def check_values(self, name: str, tensor: Any) -> None:
        if not tensor[()].isfinite().all():
            raise ValueError(f"scales {name!r} must be finite")


@dataclass(frozen=True)
class E8M0Slice(PackedSlice):
    """Scales in e8m0, whose bits 255 are no number."""

    @override
    def check_values(self, name: str, tensor: Any) -> None:
        if (tensor[()] == 255).any():
            raise ValueError(f"scales {name!r} must be numbers")


@dataclass(frozen=True)
class IgnoredSlice(PackedSlice):
    """A tensor that is not used."""

    stored_as: tuple[torch.dtype, ...] = (*_FLOATS, torch.int64, torch.int32)

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        pass


@dataclass(frozen=True)
class SymmetricZerosSlice(PackedSlice):
    """Zeros that must all be 8."""

    @override
    def check_values(self, name: str, tensor: Any) -> None:
        if (self.convert(tensor[()]) != 8).any():
            raise ValueError(f"{name!r} has zeros other than 8, though the config says that values are symmetric")

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        self.check_values(name, WholeValues(values))


@dataclass(frozen=True)
class SortedGroupsSlice(PackedSlice):
    """GPTQ's group of each input, which must be in order (`desc_act` sorts inputs otherwise).

    group: inputs of one.
    """

    group: int = 0

    @override
    def check_values(self, name: str, tensor: Any) -> None:
        groups: torch.Tensor = tensor[()]
        if not torch.equal(groups.long(), torch.arange(len(groups), device=groups.device) // self.group):
            raise ValueError(f"{name!r} has groups that are not in order (desc_act): this is not supported")

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        self.check_values(name, WholeValues(values))


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
    """Return the bits of values, uint8, eight of which lie in an int32 along a dimension in some order."""
    shifts = torch.tensor([4 * order.index(i) for i in range(8)], device=words.device)
    spread = words.movedim(dim, -1).unsqueeze(-1) >> shifts & 15
    return spread.to(torch.uint8).flatten(-2).movedim(-1, dim)


def _pairs(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of values, [outs, ins] uint8, two of which lie in a byte, the first in its low half."""
    values = values.flatten(1)
    return torch.stack((values & 15, values >> 4), 2).flatten(1)


@dataclass(frozen=True)
class _Part:
    """What the slices of a projection are made of: its outputs and inputs of this rank, and where they go."""

    four_bits: FourBits
    outputs: Shard
    inputs: Shard
    region: FourBitMatrix

    def __post_init__(self) -> None:
        if self.four_bits.stored in ("gptq", "gptq_v2", "awq", "packed") and self.outputs.start % 8:
            raise ValueError(f"outputs {self.outputs.start} ... of a rank begin within a word of 8")

    @property
    def group(self) -> int:
        return self.four_bits.group or self.inputs.total

    @property
    def num_groups(self) -> int:
        return -(-self.inputs.total // self.group)

    @property
    def groups(self) -> slice:
        """The groups of this rank's inputs."""
        inputs = self.inputs.present
        return slice(inputs.start // self.group, max(-(-inputs.stop // self.group), inputs.start // self.group))

    @property
    def matrix(self) -> FourBitMatrix:
        """The region without padding."""
        return self.region.outputs(0, self.outputs.num_present)

    def words(self, shard: Shard) -> tuple[int, slice]:
        """Return the number of words of a dimension, and this rank's."""
        present = shard.present
        return -(-shard.total // 8), slice(present.start // 8, -(-present.stop // 8))

    def trimmed(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the bytes of values, [outs, ins], without the padding of words."""
        return pack(codes[: self.outputs.num_present, : self.inputs.size])


def _gptq(part: _Part) -> dict[str, WeightSlice]:
    """Words of inputs of an output, [inputs / 8, outputs]; zeros minus 1, but in the format's second version."""
    (num_ins, ins), (num_outs, outs) = part.words(part.inputs), part.words(part.outputs)
    matrix, offset = part.matrix, int(part.four_bits.stored == "gptq")

    def zeros(values: torch.Tensor) -> torch.Tensor:
        return (_words(values, 1).T[: part.outputs.num_present] + offset) & 15

    values = PackedSlice(
        (num_ins, part.outputs.total), (ins, part.outputs.present), matrix.values,
        convert=lambda words: part.trimmed(_words(words, 0).T),
    )  # fmt: skip
    own: type[PackedSlice] = SymmetricZerosSlice if matrix.zeros is None else PackedSlice
    region = matrix.scales if matrix.zeros is None else matrix.zeros
    return {
        "qweight": values,
        "qzeros": own((part.num_groups, num_outs), (part.groups, outs), region, convert=zeros),
        "scales": _transposed_scales(part),
        "g_idx": SortedGroupsSlice((part.inputs.total,), (slice(0, part.inputs.total),), region, group=part.group),
    }


def _transposed_scales(part: _Part) -> WeightSlice:
    return ScalesSlice(
        (part.num_groups, part.outputs.total), (part.groups, part.outputs.present), part.matrix.scales,
        convert=lambda scales: scales.T, stored_as=_FLOATS,
    )  # fmt: skip


def _awq(part: _Part) -> dict[str, WeightSlice]:
    """Words of outputs of an input, [inputs, outputs / 8], in an order of their own."""
    (num_outs, outs), matrix, num_present = part.words(part.outputs), part.matrix, part.outputs.num_present
    assert matrix.zeros is not None
    return {
        "qweight": PackedSlice(
            (part.inputs.total, num_outs), (part.inputs.present, outs), matrix.values,
            convert=lambda words: part.trimmed(_words(words, 1, _AWQ_ORDER).T),
        ),
        "qzeros": PackedSlice(
            (part.num_groups, num_outs), (part.groups, outs), matrix.zeros,
            convert=lambda words: _words(words, 1, _AWQ_ORDER).T[:num_present],
        ),
        "scales": _transposed_scales(part),
    }  # fmt: skip


def _compressed(part: _Part) -> dict[str, WeightSlice]:
    """Words of inputs of an output, [outputs, inputs / 8], and of outputs' zeros, [outputs / 8, groups]."""
    (num_ins, ins), (num_outs, outs) = part.words(part.inputs), part.words(part.outputs)
    matrix, present = part.matrix, part.outputs.present
    slices: dict[str, WeightSlice] = {
        "weight_packed": PackedSlice(
            (part.outputs.total, num_ins), (present, ins), matrix.values,
            convert=lambda words: part.trimmed(_words(words, 1)),
        ),
        "weight_scale": ScalesSlice(
            (part.outputs.total, part.num_groups), (present, part.groups), matrix.scales, stored_as=_FLOATS
        ),
        "weight_shape": IgnoredSlice((2,), (slice(0, 2),), matrix.values),
    }  # fmt: skip
    if matrix.zeros is not None:
        slices["weight_zero_point"] = PackedSlice(
            (num_outs, part.num_groups), (outs, part.groups), matrix.zeros,
            convert=lambda words: _words(words, 0)[: part.outputs.num_present],
        )  # fmt: skip
    return slices


def _nvfp4(part: _Part, values: str, factor: str, invert: bool) -> dict[str, WeightSlice]:
    """Bytes of inputs, scales in e4m3, and one number that multiplies, or divides, all scales."""
    matrix, outputs, (first, last) = part.matrix, part.outputs, (part.inputs.present.start, part.inputs.present.stop)
    assert matrix.factors is not None

    def factors(number: torch.Tensor) -> torch.Tensor:
        return (1 / number.float() if invert else number.float()).flatten()

    return {
        values: PackedSlice(
            (outputs.total, part.inputs.total // 2), (outputs.present, slice(first // 2, last // 2)), matrix.values,
            convert=lambda pairs: part.trimmed(_pairs(pairs)), stored_as=_BYTES,
        ),
        "weight_scale": PackedSlice(
            (outputs.total, part.num_groups), (outputs.present, part.groups), matrix.scales,
            convert=lambda scales: scales.view(torch.uint8), stored_as=(torch.float8_e4m3fn,),
        ),
        factor: ScalesSlice((), (), matrix.factors, convert=factors, stored_as=_FLOATS, shapes=((1,),)),
    }  # fmt: skip


def _mxfp4(part: _Part) -> dict[str, WeightSlice]:
    """Bytes of inputs, [outputs, groups, 16], and scales in e8m0."""
    matrix, index = part.matrix, (part.outputs.present, part.groups)
    return {
        "blocks": PackedSlice(
            (part.outputs.total, part.num_groups, 16), (*index, slice(0, 16)), matrix.values,
            convert=lambda pairs: part.trimmed(_pairs(pairs)), stored_as=_BYTES,
        ),
        "scales": E8M0Slice((part.outputs.total, part.num_groups), index, matrix.scales, stored_as=_BYTES),
    }  # fmt: skip


_FORMATS: dict[str, Callable[[_Part], dict[str, WeightSlice]]] = {
    "gptq": _gptq, "gptq_v2": _gptq, "awq": _awq, "packed": _compressed, "mxfp4": _mxfp4,
    "nvfp4": lambda part: _nvfp4(part, "weight_packed", "weight_global_scale", invert=True),
    "modelopt": lambda part: _nvfp4(part, "weight", "weight_scale_2", invert=False),
}  # fmt: skip
