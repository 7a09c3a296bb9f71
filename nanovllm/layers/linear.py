"""Linear layers that know how to load themselves from a checkpoint's tensors."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.norm_linear import norm_linear
from nanovllm.layers.layernorm import RMSNorm


class Linear(nn.Module):
    """`x @ weight.T + bias`; weight [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def weight_region(self, param: nn.Parameter, shard: str | None) -> torch.Tensor:
        """The part of a parameter that one tensor of the checkpoint fills: all of it."""
        assert shard is None
        return param.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, out_features]."""
        return norm_linear(x, self.weight, self.bias)[0]


class MergedLinear(Linear):
    """Several projections of one normalised input as one product; their weights are stacked by output.

    Args:
        in_features: size of the input.
        shards: output size of each projection, by the name that the model's mapping gives it, in order.
        bias: whether the projections have biases.
        gated: whether the first of two projections, through SiLU, multiplies the second (SwiGLU, Shazeer 2020).
    """

    def __init__(self, in_features: int, shards: dict[str, int], bias: bool = False, gated: bool = False) -> None:
        super().__init__(in_features, sum(shards.values()), bias)
        self.shards = shards
        self.gated = gated

    def weight_region(self, param: nn.Parameter, shard: str | None) -> torch.Tensor:
        """The rows of one projection."""
        assert shard is not None
        start = 0
        for name, size in self.shards.items():
            if name == shard:
                return param.data[start : start + size]
            start += size
        raise AssertionError(f"no projection {shard!r} among {list(self.shards)}")

    def project(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: RMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project the normalised `x + residual`, [num_tokens, in_features]; returns that and `x + residual`."""
        return norm_linear(x, self.weight, self.bias, (norm.weight, norm.eps), residual, self.gated)
