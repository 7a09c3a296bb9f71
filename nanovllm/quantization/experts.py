"""The weights of a mixture's experts, stacked."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.distributed.shard import Shard
from nanovllm.quantization.loading import LoadableModule, WeightSlice, WeightTarget
from nanovllm.quantization.weight import MatrixShard


class DenseExpertsWeight(LoadableModule):
    """One matrix for each expert, in the dtype of the activations. Its name in the model is `<layer>.weight`.

    Args:
        experts: this rank's experts.
        shard: this rank's part of each one's matrix.

    Attributes:
        values: [experts of this rank, outputs of this rank, inputs of this rank].
    """

    def __init__(self, experts: Shard, shard: MatrixShard) -> None:
        super().__init__()
        self.experts = experts
        self.shard = shard
        self.values = nn.Parameter(torch.empty(experts.size, *shard.size), requires_grad=False)

    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        """Return this rank's part of each projection of each expert: nothing of those that other ranks have."""
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
