"""Weights of four-bit values with scales for groups of inputs, and how published formats have them.

Whatever a checkpoint has is packed as `FourBitMatrix` says while it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.quantization import FourBits, QuantizationConfig
from nanovllm.kernels.four_bits import RUN, FourBitMatrix, pack, quantize_four_bits, wide_scales
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.quantized import QuantizedWeight
from nanovllm.quantization.weight import MatrixShard, Place
from nanovllm.weights.slices import Convert, WeightSlice

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs by their places in a word, from the lowest bits on."""
_ORDER = tuple(range(8))
_INTS = (torch.int32,)


class FourBitWeight(QuantizedWeight):
    """Values in four bits, with their scales; see `FourBitMatrix`.

    Attributes:
        values, scales, zeros, factors: of `FourBitMatrix`.
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None
    factors: torch.Tensor | None

    def __init__(self, shard: MatrixShard, config: QuantizationConfig, has_bias: bool = False) -> None:
        super().__init__(shard, config, has_bias)
        assert config.four_bits is not None
        self.four_bits, stack, (num_outs, num_ins) = config.four_bits, shard.stack, shard.size
        groups = *stack, num_outs, -(-num_ins // (self.four_bits.group or num_ins or 1))
        packed = torch.empty(*stack, num_outs, -(-num_ins // RUN) * RUN // 2, dtype=torch.uint8)
        self.values = nn.Parameter(packed, requires_grad=False)
        is_integer, has_factors = self.four_bits.format == "int4", self.four_bits.format == "nvfp4"
        self.register_buffer("scales", torch.empty(groups, dtype=None if is_integer else torch.uint8))
        zeros = torch.empty(groups, dtype=torch.uint8) if self.four_bits.has_zeros else None
        self.register_buffer("zeros", zeros)
        self.register_buffer("factors", torch.empty(*stack, num_outs, dtype=torch.float32) if has_factors else None)

    @property
    @override
    def matrix(self) -> FourBitMatrix:
        four_bits, num_ins = self.four_bits, self.shard.inputs.size
        group = four_bits.group or num_ins
        return FourBitMatrix(self.values, self.scales, self.zeros, self.factors, group, four_bits.format, num_ins)

    @property
    @override
    def kernel_sizes(self) -> tuple[Collection[int], Collection[int]]:
        return self.policy.four_bit_rows, self.policy.four_bit_tokens

    @override
    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        super().allocate(dtype, device)
        if self.four_bits.format == "int4":
            self.scales = self.scales.to(dtype)

    @override
    def part_slices(self, outputs: Shard, place: Place) -> dict[str, WeightSlice]:
        stored, region = self.four_bits.stored, self.region(place)
        if stored is not None:
            return _FORMATS[stored](_Projection(self.four_bits, outputs, self.shard.inputs, region))
        matrix, shards = region.outputs(0, outputs.num_present), (outputs, self.shard.inputs)
        shape, index = tuple(shard.total for shard in shards), tuple(shard.present for shard in shards)
        return {"weight": RoundingSlice(shape, index, matrix.values.data, matrix)}


def _check_finite(name: str, values: torch.Tensor) -> None:
    if not values.isfinite().all():
        raise ValueError(f"scales {name!r} must be finite")


def _check_e8m0(name: str, values: torch.Tensor) -> None:
    if (values == 255).any():
        raise ValueError(f"scales {name!r} must be numbers")


@dataclass(frozen=True)
class RoundingSlice(WeightSlice):
    """A slice of a tensor of floats that is rounded when it is stored; matrix: where it goes."""

    is_plain = False

    matrix: FourBitMatrix

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        """Round groups of inputs; raise if a value is not finite."""
        matrix = self.matrix
        made = quantize_four_bits(self.scaled(values), matrix.group, matrix.format, matrix.scales.dtype)
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
        matrix: where they go.
        num_ins: of all ranks.
        group: inputs that have one scale.
    """

    def __init__(self, four_bits: FourBits, outputs: Shard, inputs: Shard, region: FourBitMatrix) -> None:
        if four_bits.stored in ("gptq", "gptq_v2", "awq", "packed") and outputs.present.start % 8:
            raise ValueError(f"outputs {outputs.present.start} ... of a rank begin within a word of 8")
        self.four_bits, self.matrix = four_bits, region.outputs(0, outputs.num_present)
        self.num_ins, self.group = inputs.total, four_bits.group or inputs.total
        # A tensor's dimension by the items that it has, and outputs or inputs of an item.
        units = {
            "outputs": (outputs, 1), "words of outputs": (outputs, 8), "inputs": (inputs, 1),
            "pairs of inputs": (inputs, 2), "words of inputs": (inputs, 8), "groups": (inputs, self.group),
        }  # fmt: skip
        self._dims = {
            name: (-(-shard.total // unit), _units(shard.present, unit)) for name, (shard, unit) in units.items()
        }
        self._dims["bytes of a group"] = 16, slice(0, 16)

    def tensor(self, region: torch.Tensor, *dims: str, **options: Any) -> WeightSlice:
        """Return the slice of a tensor with these dimensions; options: of `WeightSlice`."""
        shape, index = zip(*(self._dims[name] for name in dims), strict=True)
        outputs_dim = next((i for i, name in enumerate(dims) if name.endswith("outputs")), None)
        return WeightSlice(shape, index, region, outputs_dim=outputs_dim, **options)

    def values(self, unpack: Convert, *dims: str, stored_as: torch.dtype = torch.int32) -> WeightSlice:
        """Return the slice of a tensor that `unpack` makes bits of values, [outputs, inputs], maybe with padding."""

        def convert(words: torch.Tensor) -> torch.Tensor:
            return pack(unpack(words)[: len(self.matrix.values), : self.matrix.in_features])

        return self.tensor(self.matrix.values, *dims, convert=convert, dtypes=(stored_as,))

    def zeros(self, unpack: Convert, *dims: str) -> WeightSlice:
        """Return the slice of a tensor that `unpack` makes zeros, [outputs, groups], maybe with padding."""

        def convert(words: torch.Tensor) -> torch.Tensor:
            return unpack(words)[: len(self.matrix.values)]

        def check_eight(name: str, words: torch.Tensor) -> None:
            if (convert(words) != 8).any():
                raise ValueError(f"{name!r} has zeros other than 8, though the config says that values are symmetric")

        if self.matrix.zeros is None:
            return self.tensor(self.matrix.scales, *dims, check=check_eight, dtypes=_INTS, is_used=False)
        return self.tensor(self.matrix.zeros, *dims, convert=convert, dtypes=_INTS)

    def scales(self, convert: Convert, *dims: str) -> WeightSlice:
        """Return the slice of a tensor of floats that are converted to scales, [outputs, groups]."""
        return self.tensor(self.matrix.scales, *dims, convert=convert, check=_check_finite)


def _units(items: slice, unit: int) -> slice:
    """Return the units that items lie in."""
    return slice(items.start // unit, -(-items.stop // unit) if items.stop > items.start else items.start // unit)


def _gptq(part: _Projection) -> dict[str, WeightSlice]:
    """Words of inputs of an output, [inputs / 8, outputs]; zeros minus 1, but in the format's second version."""
    offset = int(part.four_bits.stored == "gptq")

    def check_groups(name: str, groups: torch.Tensor) -> None:
        if not torch.equal(groups.long(), torch.arange(len(groups), device=groups.device) // part.group):
            raise ValueError(f"{name!r} has groups that are not in order: take a checkpoint made with desc_act=false")

    return {
        "qweight": part.values(lambda words: _words(words, 0).T, "words of inputs", "outputs"),
        "qzeros": part.zeros(lambda words: (_words(words, 1).T + offset) & 15, "groups", "words of outputs"),
        "scales": part.scales(torch.t, "groups", "outputs"),
        "g_idx": WeightSlice(
            (part.num_ins,), (slice(0, part.num_ins),), part.matrix.scales, dtypes=_INTS, check=check_groups,
            outputs_dim=None, is_used=False,
        ),
    }  # fmt: skip


def _awq(part: _Projection) -> dict[str, WeightSlice]:
    """Words of outputs of an input, [inputs, outputs / 8], in an order of their own."""

    def unpack(words: torch.Tensor) -> torch.Tensor:
        return _words(words, 1, _AWQ_ORDER).T

    return {
        "qweight": part.values(unpack, "inputs", "words of outputs"),
        "qzeros": part.zeros(unpack, "groups", "words of outputs"),
        "scales": part.scales(torch.t, "groups", "outputs"),
    }


def _compressed(part: _Projection) -> dict[str, WeightSlice]:
    """Words of inputs of an output, [outputs, inputs / 8], and of outputs' zeros, [outputs / 8, groups]."""
    slices = {
        "weight_packed": part.values(lambda words: _words(words, 1), "outputs", "words of inputs"),
        "weight_scale": part.scales(torch.Tensor.float, "outputs", "groups"),
    }
    if part.matrix.zeros is not None:
        slices["weight_zero_point"] = part.zeros(lambda words: _words(words, 0), "words of outputs", "groups")
    return slices


def _nvfp4(part: _Projection, values: str, factor: str, convert: Convert) -> dict[str, WeightSlice]:
    """Bytes of inputs, scales in e4m3, and one number that is converted to what multiplies all scales."""
    matrix = part.matrix
    assert matrix.factors is not None
    return {
        values: part.values(_pairs, "outputs", "pairs of inputs", stored_as=torch.uint8),
        "weight_scale": part.tensor(
            matrix.scales, "outputs", "groups", convert=lambda scales: scales.view(torch.uint8),
            dtypes=(torch.float8_e4m3fn,),
        ),
        factor: WeightSlice((), (), matrix.factors, convert=convert, shapes=((1,),), check=_check_finite),
    }  # fmt: skip


def _mxfp4(part: _Projection, values: str, scales: str, *dims: str) -> dict[str, WeightSlice]:
    """Bytes of inputs, [outputs, ...], and scales in e8m0."""
    return {
        values: part.values(_pairs, "outputs", *dims, stored_as=torch.uint8),
        scales: part.tensor(part.matrix.scales, "outputs", "groups", check=_check_e8m0, dtypes=(torch.uint8,)),
    }


_FORMATS: dict[str, Callable[[_Projection], dict[str, WeightSlice]]] = {
    "gptq": _gptq, "gptq_v2": _gptq, "awq": _awq, "packed": _compressed,
    "mxfp4": lambda part: _mxfp4(part, "blocks", "scales", "groups", "bytes of a group"),
    "packed_mxfp4": lambda part: _mxfp4(part, "weight_packed", "weight_scale", "pairs of inputs"),
    "nvfp4": lambda part: _nvfp4(part, "weight_packed", "weight_global_scale", torch.reciprocal),
    "modelopt": lambda part: _nvfp4(part, "weight", "weight_scale_2", torch.Tensor.float),
}  # fmt: skip
