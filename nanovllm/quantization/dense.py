"""A weight in the dtype of the activations."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from nanovllm.kernels.linear.norm_linear import linear_into, norm_linear
from nanovllm.kernels.linear.quantize_rows import Fp8Rows
from nanovllm.kernels.rms_norm import Norm
from nanovllm.quantization.weight import MatrixShard, Weight
from nanovllm.weights.slices import WeightSlice, WeightTarget


class DenseWeight(Weight):
    """Values, one for each output and input.

    Args:
        shard: this rank's part of the matrix.
        has_bias: whether the layer has a bias.

    Attributes:
        values: [outputs of this rank, inputs of this rank].
        bias: [outputs of this rank], or None.
    """

    def __init__(self, shard: MatrixShard, has_bias: bool = False) -> None:
        super().__init__()
        self.shard = shard
        self.values = nn.Parameter(torch.empty(shard.size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(shard.size[0]), requires_grad=False) if has_bias else None

    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        """Return this rank's part of each projection's weight, and of its bias."""
        layer, _, _ = name.rpartition(".")
        outputs, sizes = self.shard.outputs.items(), [shard.size for shard in self.shard.outputs.values()]
        slices = {}
        for (part, shard), region in zip(outputs, self.values.data.split(sizes), strict=True):
            slices[WeightTarget(f"{layer}.weight", part)] = WeightSlice.of((shard, self.shard.inputs), region)
        if self.bias is not None:
            for (part, shard), region in zip(outputs, self.bias.data.split(sizes), strict=True):
                slices[WeightTarget(f"{layer}.bias", part)] = WeightSlice.of((shard,), region)
        return slices

    def embed(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n] -> [n, inputs], the values of these outputs."""
        return functional.embedding(rows, self.values)

    @property
    @override
    def kernel_rows(self) -> Collection[int]:
        return self.policy.dense_rows

    @property
    @override
    def kernel_tokens(self) -> Collection[int]:
        return self.policy.dense_tokens

    @override
    def multiply(
        self,
        x: torch.Tensor | Fp8Rows,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert isinstance(x, torch.Tensor)
        return norm_linear(x, self.values, self.bias, norm, residual, gated, policy=self.policy)

    @override
    def multiply_into(
        self, x: torch.Tensor | Fp8Rows, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.bias is None
        return linear_into(x, self.values, residual, self.policy)
