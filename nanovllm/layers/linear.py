"""Linear layers split over the ranks (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053).

How a weight is stored, and which kernel multiplies by it, is known here alone. A layer computes nothing by itself: it
returns its product as an object, and what takes that may have one kernel for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from nanovllm.distributed.shard import Shard
from nanovllm.kernels.linear.norm_linear import linear_into, norm_linear
from nanovllm.kernels.linear.skinny_linear import MAX_SKINNY_ROWS
from nanovllm.kernels.qkv_rope_store import NormWeights, project_rope_store, should_use_fused_qkv
from nanovllm.layers.layernorm import DeferredBranch, Normed
from nanovllm.layers.weights import LoadableLayer, WeightSlice, WeightTarget

KERNEL_ROWS = (1, 2, MAX_SKINNY_ROWS + 1, 33, 65, 129, 193)
"""Numbers of rows at which the choice of kernels or of their tiles changes."""


@dataclass(frozen=True)
class Projection:
    """A column-parallel layer's product, not computed yet."""

    layer: MergedColumnParallelLinear
    x: Normed

    def compute(self) -> torch.Tensor:
        """Return the product, [num_tokens, outputs of this rank]."""
        return self.layer.project(self.x)

    def silu_and_mul(self) -> torch.Tensor:
        """Return SiLU of the first half of the outputs times the second (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""
        return self.layer.project(self.x, gated=True)

    def rope_store(self, head_dim: int, norm_weights: NormWeights | None, *args: Any) -> torch.Tensor | None:
        """Project, norm heads, rotate and store in one kernel; None if it is not supported or not faster.

        args: of `qkv_rope_store`, from eps on. Returns the query, [num_tokens, num_heads, head_dim].
        """
        weight, bias = self.layer.weight, self.layer.bias
        if norm_weights is None or not should_use_fused_qkv(self.x.branch, weight, bias, head_dim):
            return None
        return project_rope_store(self.x.compute(), weight, norm_weights, *args)


class MergedColumnParallelLinear(LoadableLayer):
    """Several projections of one input as one product; weight [outputs of this rank, in_features].

    Args:
        in_features: size of the input.
        outputs: outputs of each projection, by the name of its part of the weight, in order.
        bias: whether the projections have biases.
    """

    def __init__(self, in_features: int, outputs: dict[str | None, Shard], bias: bool = False) -> None:
        super().__init__()
        out_features = sum(shard.size for shard in outputs.values())
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.outputs = outputs

    def weight_slices(self, name: str, param: nn.Parameter) -> dict[WeightTarget, WeightSlice]:
        """Return this rank's rows of each projection."""
        regions = param.data.split([shard.size for shard in self.outputs.values()])
        parts = zip(self.outputs.items(), regions, strict=True)
        return {WeightTarget(name, part): WeightSlice.along(0, shard, region) for (part, shard), region in parts}

    def forward(self, x: Normed) -> Projection:
        """Return the projections of x, not computed yet."""
        return Projection(self, x)

    def project(self, x: Normed, gated: bool = False) -> torch.Tensor:
        """Compute a `Projection`; `gated`: followed by `silu_and_mul`."""
        norm = x.norm
        if norm.communicator.size > 1:
            return self.multiply(x.compute(), gated)
        # One kernel for small batches.
        norm_args, residual = (norm.weight, norm.eps), x.stream.residual
        out, total = norm_linear(x.branch, self.weight, self.bias, norm_args, residual, gated)
        x.stream.settle(total)
        return out

    def multiply(self, x: torch.Tensor, gated: bool = False) -> torch.Tensor:
        """Return the projections of x, [num_rows, in_features]; `gated`: followed by `silu_and_mul`."""
        return norm_linear(x, self.weight, self.bias, gated=gated)[0]


class QKVParallelLinear(MergedColumnParallelLinear):
    """The projections to queries, keys and values of this rank's heads."""

    def __init__(self, in_features: int, head_dim: int, heads: Shard, kv_heads: Shard, bias: bool) -> None:
        q, kv = heads.times(head_dim), kv_heads.times(head_dim)
        super().__init__(in_features, {"q": q, "k": kv, "v": kv}, bias)


class RowParallelLinear(LoadableLayer):
    """The last projection of a branch; weight [out_features, inputs of this rank].

    Its product is one rank's part of a sum, which is left to the norm that follows.
    """

    def __init__(self, inputs: Shard, out_features: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.weight = nn.Parameter(torch.empty(out_features, inputs.size), requires_grad=False)

    def weight_slices(self, name: str, param: nn.Parameter) -> dict[WeightTarget, WeightSlice]:
        """Return the columns of this rank's inputs."""
        return {WeightTarget(name): WeightSlice.along(1, self.inputs, param.data)}

    def forward(self, x: torch.Tensor, rows: torch.Tensor | None = None) -> DeferredBranch:
        """Return the product, not computed yet, for the residual stream.

        Args:
            x: [num_rows, inputs of this rank], contiguous.
            rows: [num_rows]; the rows of the stream that x has, if not all. The stream loses the others.
        """
        return partial(self._add_to, x, rows)

    def _add_to(
        self, x: torch.Tensor, rows: torch.Tensor | None, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if rows is not None:
            residual = residual[rows]
        if self.inputs.is_whole:
            return linear_into(x, self.weight, residual)
        return norm_linear(x, self.weight)[0], residual
