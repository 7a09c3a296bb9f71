"""The weights of a mixture's experts, stacked."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.quantization import QuantizationConfig
from nanovllm.kernels.moe.fused_experts import ExpertsMatrices
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.four_bits import FourBitValues
from nanovllm.quantization.fp8 import Fp8Values
from nanovllm.quantization.weight import MatrixShard
from nanovllm.weights.slices import LoadableModule, WeightSlice, WeightTarget


class ExpertsWeight(LoadableModule, ABC):
    """One matrix for each expert. Its name in the model is `<layer>.weight`.

    Attributes:
        experts: this rank's experts.
        shard: this rank's part of each one's matrix.
    """

    experts: Shard
    shard: MatrixShard

    @property
    @abstractmethod
    def matrices(self) -> ExpertsMatrices:
        """The experts' matrices as the kernels take them."""

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        """Return this rank's part of each projection of each expert: nothing of other ranks' experts."""
        layer, experts = name.rpartition(".")[0], self.experts
        slices: dict[WeightTarget, WeightSlice] = {}
        for number in range(experts.total):
            is_here, start = experts.start <= number < experts.stop, 0
            for part, outputs in self.shard.outputs.items():
                held = outputs if is_here else Shard(0, 0, outputs.total)
                target, place = WeightTarget(layer, part, number), number - experts.start if is_here else 0
                slices |= self.projection_slices(target, held, place, start)
                start += held.size
        return slices

    @abstractmethod
    def projection_slices(
        self, target: WeightTarget, outputs: Shard, place: int, start: int
    ) -> dict[WeightTarget, WeightSlice]:
        """Return the slices of one expert's projection, which begins at output `start` of the matrix at `place`.

        target: with the layer's name as `param`.
        """


class DenseExpertsWeight(ExpertsWeight):
    """Values in the dtype of the activations, [experts of this rank, outputs of this rank, inputs of this rank]."""

    def __init__(self, experts: Shard, shard: MatrixShard) -> None:
        super().__init__()
        self.experts, self.shard = experts, shard
        self.values = nn.Parameter(torch.empty(experts.size, *shard.size), requires_grad=False)

    @property
    @override
    def matrices(self) -> torch.Tensor:
        return self.values

    @override
    def projection_slices(
        self, target: WeightTarget, outputs: Shard, place: int, start: int
    ) -> dict[WeightTarget, WeightSlice]:
        region = self.values.data[place, start : start + outputs.size]
        return {target._replace(param=f"{target.param}.weight"): WeightSlice.of((outputs, self.shard.inputs), region)}


class Fp8ExpertsWeight(Fp8Values, ExpertsWeight):
    """Values in e4m3."""

    def __init__(self, experts: Shard, shard: MatrixShard, config: QuantizationConfig) -> None:
        super().__init__(shard, config, (experts.size,))
        self.experts = experts

    @property
    @override
    def matrices(self) -> ExpertsMatrices:
        return self.matrix

    @override
    def projection_slices(
        self, target: WeightTarget, outputs: Shard, place: int, start: int
    ) -> dict[WeightTarget, WeightSlice]:
        return self.part_slices(target, outputs, self.matrix.expert(place).outputs(start, start + outputs.size))


class FourBitExpertsWeight(FourBitValues, ExpertsWeight):
    """Values in four bits."""

    def __init__(self, experts: Shard, shard: MatrixShard, config: QuantizationConfig) -> None:
        super().__init__(shard, config, (experts.size,))
        self.experts = experts

    @property
    @override
    def matrices(self) -> ExpertsMatrices:
        return self.matrix

    @override
    def projection_slices(
        self, target: WeightTarget, outputs: Shard, place: int, start: int
    ) -> dict[WeightTarget, WeightSlice]:
        return self.part_slices(target, outputs, self.matrix.expert(place).outputs(start, start + outputs.size))


def make_experts_weight(
    quant_config: QuantizationConfig | None, prefix: str, experts: Shard, shard: MatrixShard
) -> ExpertsWeight:
    """Return the weight of one projection of this rank's experts, not yet filled; see `make_weight`."""
    # A checkpoint has the modules of each expert; where one is stored as it is and another is not, scales are missing.
    parent, _, name = prefix.rpartition(".")
    if quant_config is None or quant_config.ignores(f"{parent}.0.{name}", shard.outputs):
        return DenseExpertsWeight(experts, shard)
    if quant_config.four_bits is not None:
        return FourBitExpertsWeight(experts, shard, quant_config)
    return Fp8ExpertsWeight(experts, shard, quant_config)
