"""RMS norms over all heads of queries, and of keys, at once (OLMo 2, arXiv:2501.00656): each rank has some heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import Shard
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.attention import QKVProduct
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.quantization.loading import WeightSlice, WeightTarget


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
        qkv = self.qkv.compute()
        q_size, k_size = (norm.shard.size for norm in self.norms)
        query, key, value = qkv.split([q_size, k_size, qkv.shape[1] - q_size - k_size], dim=1)
        return torch.cat((*self._normalize((query, key)), value), dim=1)

    def rope_store(
        self, rope: NormRope, positions: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor
    ) -> torch.Tensor | None:
        """See `QKVProduct`; there is no kernel for all."""
        return None

    def _normalize(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.communicator.size == 1:
            return [rms_norm(x, norm.weight, norm.eps)[0] for x, norm in zip(parts, self.norms, strict=True)]
        wide = [x.float() for x in parts]
        squares = self.communicator.all_reduce_rows(torch.stack([x.square().sum(1) for x in wide], dim=1))
        return [
            (x * torch.rsqrt(square / norm.shard.total + norm.eps) * norm.weight.float()).to(norm.weight.dtype)
            for x, norm, square in zip(wide, self.norms, squares.split(1, dim=1), strict=True)
        ]
