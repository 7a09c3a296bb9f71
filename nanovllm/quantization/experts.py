"""The weights of a mixture's experts, stacked."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.quantization import QuantizationConfig
from nanovllm.kernels.moe.fused_experts import ExpertsMatrices
from nanovllm.parallel.shard import Shard
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
        """What kernels take."""


class DenseExpertsWeight(ExpertsWeight):
    """Values in the dtype of the activations.

    Args:
        experts, shard: see the base class.

    Attributes:
        values: [experts of this rank, outputs of this rank, inputs of this rank].
    """

    def __init__(self, experts: Shard, shard: MatrixShard) -> None:
        super().__init__()
        self.experts = experts
        self.shard = shard
        self.values = nn.Parameter(torch.empty(experts.size, *shard.size), requires_grad=False)

    @property
    @override
    def matrices(self) -> torch.Tensor:
        return self.values

    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        """Return this rank's part of each projection of each expert: nothing of other ranks' experts."""
        layer, _, _ = name.rpartition(".")
        inputs, experts = self.shard.inputs, self.experts
        sizes = [shard.size for shard in self.shard.outputs.values()]
        slices = {}
        for number in range(experts.total):
            is_here = experts.start <= number < experts.stop
            regions = self.values.data[number - experts.start if is_here else 0].split(sizes)
            for (part, outputs), region in zip(self.shard.outputs.items(), regions, strict=True):
                held = outputs if is_here else Shard(outputs.total, outputs.total, outputs.total)
                slices[WeightTarget(f"{layer}.weight", part, number)] = WeightSlice.of((held, inputs), region)
        return slices


class Fp8ExpertsWeight(Fp8Values, ExpertsWeight):
    """Values in e4m3.

    Args:
        experts, shard: see the base class.
        config: see `Fp8Values`.
    """

    def __init__(self, experts: Shard, shard: MatrixShard, config: QuantizationConfig) -> None:
        super().__init__(shard, config, (experts.size,))
        self.experts = experts

    @property
    @override
    def matrices(self) -> ExpertsMatrices:
        return self.matrix

    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        """Return this rank's part of each projection of each expert: nothing of other ranks' experts."""
        layer, experts = name.rpartition(".")[0], self.experts
        slices: dict[WeightTarget, WeightSlice] = {}
        for number in range(experts.total):
            is_here, start = experts.start <= number < experts.stop, 0
            matrix = self.matrix.expert(number - experts.start if is_here else 0)
            for part, outputs in self.shard.outputs.items():
                held = outputs if is_here else Shard(0, 0, outputs.total)
                slices |= self.part_slices(layer, part, number, held, matrix.outputs(start, start + held.size))
                start += held.size
        return slices
