"""Linear layers split over the ranks, which know how to load themselves from a checkpoint's tensors."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.distributed.shard import Shard
from nanovllm.kernels.linear.norm_linear import linear_into, norm_linear
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.weight_part import WeightPart


def project_normed(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: AllReduceRMSNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project the normalised `x + residual` by this rank's weights; returns that and `x + residual`.

    x, [num_tokens, in_features], is this rank's part of a sum, or itself in parts (see `linear_into`), and may be
    overwritten. No residual stands for zero.
    """
    if norm.communicator.size == 1:
        # One kernel for small batches.
        return norm_linear(x, weight, bias, (norm.weight, norm.eps), residual, gated)
    normed, total = norm(x, residual)
    return norm_linear(normed, weight, bias, gated=gated)[0], total


class RowParallelLinear(nn.Module):
    """`x @ weight.T` for this rank's elements of x; weight [out_features, inputs of this rank].

    The result is one rank's part of a sum, which is left to the norm that follows.
    """

    def __init__(self, inputs: Shard, out_features: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.weight = nn.Parameter(torch.empty(out_features, inputs.size), requires_grad=False)

    def weight_part(self, param: nn.Parameter, shard: str | None) -> WeightPart:
        """What of a tensor of the checkpoint goes where: the columns of this rank's inputs."""
        assert shard is None
        return WeightPart((param.shape[0], self.inputs.total), (slice(None), self.inputs.present), param.data)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x: [num_tokens, inputs of this rank] -> this rank's part of [num_tokens, out_features], and the residual.

        Of one rank alone, what `linear_into` makes of them. The residual, of the result's size, may be overwritten.
        """
        if self.inputs.is_whole:
            return linear_into(x, self.weight, residual)
        return norm_linear(x, self.weight)[0], residual


class MergedColumnParallelLinear(nn.Module):
    """Several projections of one normalised input as one product; this rank's rows of each, stacked.

    Args:
        in_features: size of the input.
        shards: outputs of each projection, by the name that the model's mapping gives it, in order.
        bias: whether the projections have biases.
        gated: whether the first of two projections, through SiLU, multiplies the second (SwiGLU, Shazeer 2020).
    """

    def __init__(self, in_features: int, shards: dict[str, Shard], bias: bool = False, gated: bool = False) -> None:
        super().__init__()
        out_features = sum(share.size for share in shards.values())
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.shards = shards
        self.gated = gated

    def weight_part(self, param: nn.Parameter, shard: str | None) -> WeightPart:
        """What of a tensor of the checkpoint goes where: this rank's rows of one projection."""
        assert shard is not None
        start = 0
        for name, share in self.shards.items():
            if name == shard:
                shape, index = (share.total, *param.shape[1:]), (share.present, *[slice(None)] * (param.dim() - 1))
                return WeightPart(shape, index, param.data[start : start + share.size])
            start += share.size
        raise AssertionError(f"no projection {shard!r} among {list(self.shards)}")

    def project(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: AllReduceRMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project the normalised `x + residual`, [num_tokens, in_features]; returns that and `x + residual`.

        x and residual are as `project_normed` takes them.
        """
        return project_normed(x, residual, norm, self.weight, self.bias, self.gated)
