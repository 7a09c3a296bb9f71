"""RMS norms over all heads of queries, and of keys, at once (OLMo 2, arXiv:2501.00656): each rank has some heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import Shard
from nanovllm.kernels.qk_norm import QKNorms, normalize_qk, sum_squares
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope
from nanovllm.layers.attention import QKVProduct
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.weights.slices import WeightSlice, WeightTarget


class ParallelRMSNorm(RMSNorm):
    """Parameters of an RMS norm of rows of which each rank has a shard: this rank's shard of the weight."""

    def __init__(self, shard: Shard, eps: float) -> None:
        super().__init__(shard.size, eps)
        self.shard = shard

    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        """See the base class."""
        return {WeightTarget(f"{name}.weight"): WeightSlice.of((self.shard,), self.weight.data)}


@dataclass(frozen=True)
class NormedQKV:
    """A product for queries, keys and values, the first two normalised, not computed yet; see `QKVProduct`.

    Attributes:
        qkv: the product.
        norms: of queries and of keys.
        communicator: adds up the ranks' squares, those of both norms at once.
    """

    qkv: QKVProduct
    norms: tuple[ParallelRMSNorm, ParallelRMSNorm]
    communicator: Communicator

    def compute(self) -> torch.Tensor:
        """See `QKVProduct`."""
        qkv, (q, k) = self.qkv.compute(), self.norms
        norms = QKNorms(q.weight, k.weight, q.shard.total, k.shard.total, q.eps)
        squares = None
        if self.communicator.size > 1:
            squares = self.communicator.all_reduce_rows(sum_squares(qkv, norms))
        normalize_qk(qkv, norms, squares)
        return qkv

    def rope_store(
        self, rope: NormRope, positions: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor
    ) -> torch.Tensor | None:
        """See `QKVProduct`; there is no kernel for all."""
        return None
