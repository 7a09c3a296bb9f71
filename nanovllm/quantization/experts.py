"""The weights of a mixture's experts, stacked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.quantization import QuantizationConfig
from nanovllm.kernels.moe.fused_experts import ExpertsMatrices
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.four_bits import FourBitValues
from nanovllm.quantization.fp8 import Fp8Values
from nanovllm.quantization.quantized import QuantizedMatrix
from nanovllm.quantization.weight import MatrixShard
from nanovllm.weights.slices import LoadableModule, Slices, WeightSlice, WeightTarget


class ExpertsTensors(LoadableModule, ABC):
    """Tensors of each expert. Their name in the model is `<layer>.weight` or `<layer>.bias`.

    Attributes:
        experts: this rank's experts.
        shard: this rank's part of each one's matrix.
        alternates: whether a checkpoint stacks all, with outputs of projections in turn; see `ExpertsConfig`.
    """

    experts: Shard
    shard: MatrixShard
    alternates: bool = False

    @override
    def weight_slices(self, name: str) -> Slices:
        """Return this rank's part of each projection of each expert: nothing of other ranks' experts."""
        layer, experts = name.rpartition(".")[0], self.experts
        slices: Slices = {}
        for number in range(experts.total):
            is_here, start, made = experts.start <= number < experts.stop, 0, list[Slices]()
            for part, outputs in self.shard.outputs.items():
                held = outputs if is_here else Shard(0, 0, outputs.total)
                target, place = WeightTarget(layer, part, number), number - experts.start if is_here else 0
                made.append(self.projection_slices(target, held, place, start))
                start += held.size
            if self.alternates:
                # The same tensors of each projection, in the same order.
                for tensors in zip(*(part.items() for part in made), strict=True):
                    target = tensors[0][0]._replace(part=None)
                    parts = tuple(part for _, part in tensors)
                    slices[target] = WovenSlice.of_parts(parts, is_transposed=target.param.endswith(".weight"))
            else:
                for part_slices in made:
                    slices |= part_slices
        return slices

    @abstractmethod
    def projection_slices(self, target: WeightTarget, outputs: Shard, place: int, start: int) -> Slices:
        """Return the slices of one expert's projection, which begins at output `start` of the matrix at `place`.

        target: with the layer's name as `param`.
        """


class ExpertsWeight(ExpertsTensors):
    """One matrix for each expert."""

    @property
    @abstractmethod
    def matrix(self) -> ExpertsMatrices:
        """The experts' matrices as the kernels take them."""


class ExpertsBias(ExpertsTensors):
    """One bias for each expert, [experts of this rank, outputs of this rank]; of ranks that divide inputs the first has
    it, and others zeros.
    """

    def __init__(self, experts: Shard, shard: MatrixShard, alternates: bool) -> None:
        super().__init__()
        self.experts, self.shard, self.alternates = experts, shard, alternates
        self.values = nn.Parameter(torch.empty(experts.size, shard.size[0]), requires_grad=False)

    @override
    def projection_slices(self, target: WeightTarget, outputs: Shard, place: int, start: int) -> Slices:
        part = WeightSlice.of((outputs,), self.values.data[place, start : start + outputs.size])
        factor = float(self.shard.inputs.start == 0)
        return {target._replace(param=f"{target.param}.bias"): replace(part, factor=factor)}


@dataclass(frozen=True)
class WovenSlice(WeightSlice):
    """A slice of a tensor that has the outputs of several projections in turn.

    Attributes:
        parts: of the projections.
        is_transposed: whether the tensor is [inputs, outputs].
    """

    is_plain = False

    parts: tuple[WeightSlice, ...]
    is_transposed: bool

    @classmethod
    def of_parts(cls, parts: tuple[WeightSlice, ...], is_transposed: bool) -> WovenSlice:
        """Return the slice of projections of equal shapes."""
        first, count = parts[0], len(parts)
        rows = slice(first.index[0].start * count, first.index[0].stop * count)
        shape, index = (first.shape[0] * count, *first.shape[1:]), (rows, *first.index[1:])
        if is_transposed:
            shape, index = shape[::-1], index[::-1]
        return cls(shape, index, first.region, parts, is_transposed, dtypes=first.dtypes, check=first.check)

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        rows = values.T if self.is_transposed else values
        for number, part in enumerate(self.parts):
            part.store(name, rows[number :: len(self.parts)])


class DenseExpertsWeight(ExpertsWeight):
    """Values in the dtype of the activations, [experts of this rank, outputs of this rank, inputs of this rank]."""

    def __init__(self, experts: Shard, shard: MatrixShard) -> None:
        super().__init__()
        self.experts, self.shard = experts, shard
        self.values = nn.Parameter(torch.empty(experts.size, *shard.size), requires_grad=False)

    @property
    @override
    def matrix(self) -> torch.Tensor:
        return self.values

    @override
    def projection_slices(self, target: WeightTarget, outputs: Shard, place: int, start: int) -> Slices:
        region = self.values.data[place, start : start + outputs.size]
        return {target._replace(param=f"{target.param}.weight"): WeightSlice.of((outputs, self.shard.inputs), region)}


class QuantizedExpertsWeight(QuantizedMatrix, ExpertsWeight):
    """Values and scales."""

    def __init__(self, experts: Shard, shard: MatrixShard, config: QuantizationConfig) -> None:
        super().__init__(shard, config, (experts.size,))
        self.experts = experts

    @override
    def projection_slices(self, target: WeightTarget, outputs: Shard, place: int, start: int) -> Slices:
        return self.part_slices(target, outputs, self.matrix.expert(place).outputs(start, start + outputs.size))


class Fp8ExpertsWeight(QuantizedExpertsWeight, Fp8Values):
    """Values in e4m3."""


class FourBitExpertsWeight(QuantizedExpertsWeight, FourBitValues):
    """Values in four bits."""


def make_experts_weight(
    quant_config: QuantizationConfig | None, prefix: str, experts: Shard, shard: MatrixShard, alternates: bool = False
) -> ExpertsWeight:
    """Return the weight of one projection of this rank's experts, not yet filled; see `make_weight`.

    alternates: see `ExpertsTensors`.
    """
    # A checkpoint has the modules of each expert; where one is stored as it is and another is not, scales are missing.
    parent, _, name = prefix.rpartition(".")
    weight: ExpertsWeight
    if quant_config is None or quant_config.ignores(f"{parent}.0.{name}", shard.outputs):
        weight = DenseExpertsWeight(experts, shard)
    elif quant_config.four_bits is not None:
        weight = FourBitExpertsWeight(experts, shard, quant_config)
    else:
        weight = Fp8ExpertsWeight(experts, shard, quant_config)
    weight.alternates = alternates
    return weight
