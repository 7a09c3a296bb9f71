"""RMS norms of the residual stream, of heads, and of all heads at once (OLMo 2, arXiv:2501.00656).

A decoder's hidden states are a pair `(x, residual)`, which the next norm adds up. x is the newest branch: of several
ranks each has a part of it, on one it may be the parts of a sum, [parts, num_tokens, hidden_size]. residual is the sum
of the branches before it, None for zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from typing_extensions import override

from nanovllm.kernels import ops
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import Shard
from nanovllm.weights.slices import LoadableModule, Slices, WeightSlice, WeightTarget

if TYPE_CHECKING:
    from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding


class RMSNorm(LoadableModule):
    """Parameters of an RMS norm: weight [size] and epsilon. The attention kernels apply it to heads.

    size: of the weight, or this rank's part. An offset, added to what checkpoints have, keeps the weight in float32.
    """

    def __init__(self, size: int | Shard, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.shard = Shard.whole(size) if isinstance(size, int) else size
        self.weight = nn.Parameter(torch.empty(self.shard.size), requires_grad=False)
        self.eps, self.offset = eps, offset
        self.param_dtype = torch.float32 if offset else None

    @override
    def weight_slices(self, name: str) -> Slices:
        part = WeightSlice.of((self.shard,), self.weight.data)
        return {WeightTarget(f"{name}.weight"): part.in_float32(self.offset) if self.offset else part}


class AllReduceRMSNorm(RMSNorm):
    """Adds up the residual stream, over the ranks too, and normalises it.

    All-reduces of hidden states happen here, where they can be one kernel with what follows them.
    """

    def __init__(self, size: int, eps: float, communicator: Communicator, offset: float = 0.0) -> None:
        super().__init__(size, eps, offset)
        self.communicator = communicator

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, rounding: Rounding | None = None
    ) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
        """Return RMSNorm(sum of the ranks' x + residual), in e4m3 if a rounding is given, and that sum.

        Both are [num_tokens, hidden_size], like the residual; x may be overwritten.
        """
        return self.communicator.all_reduce_rms_norm(x, ops.Norm(self.weight, self.eps), residual, rounding)


def normalize_projections(qkv: torch.Tensor, q_norm: RMSNorm, k_norm: RMSNorm, communicator: Communicator) -> None:
    """Normalise all heads of queries at once, and all of keys, in place; qkv: [num_tokens, outputs of this rank].

    The communicator adds up the ranks' squares, both norms' in one all-reduce.
    """
    norms = ops.QKNorms(q_norm.weight, k_norm.weight, q_norm.shard.total, k_norm.shard.total, q_norm.eps)
    squares = None
    if communicator.size > 1:
        squares = communicator.all_reduce_rows(ops.sum_squares(qkv, norms))
    ops.normalize_qk(qkv, norms, squares)
