"""RMS norms of whole projections: all heads of queries at once, and all of keys (OLMo 2, arXiv:2501.00656)."""

from __future__ import annotations

import torch
from typing_extensions import override

from nanovllm.kernels.rms_norm import QKNorms, normalize_qk, sum_squares
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import Shard
from nanovllm.weights.slices import WeightSlice, WeightTarget


class ParallelRMSNorm(RMSNorm):
    """Parameters of an RMS norm over all heads of queries, or of keys: this rank's shard of the weight."""

    def __init__(self, shard: Shard, eps: float) -> None:
        super().__init__(shard.size, eps)
        self.shard = shard

    @override
    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        return {WeightTarget(f"{name}.weight"): WeightSlice.of((self.shard,), self.weight.data)}


def normalize_projections(
    qkv: torch.Tensor, q_norm: ParallelRMSNorm, k_norm: ParallelRMSNorm, communicator: Communicator
) -> None:
    """Normalise all heads of queries at once, and all of keys, in place; qkv: [num_tokens, outputs of this rank].

    The communicator adds up the ranks' squares, both norms' in one all-reduce.
    """
    norms = QKNorms(q_norm.weight, k_norm.weight, q_norm.shard.total, k_norm.shard.total, q_norm.eps)
    squares = None
    if communicator.size > 1:
        squares = communicator.all_reduce_rows(sum_squares(qkv, norms))
    normalize_qk(qkv, norms, squares)
