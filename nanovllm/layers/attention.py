"""Attention as a layer: store the new keys and values, then attend to the pages."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.kernels.qkv_rope_store import NormWeights, project_rope_store, qkv_rope_store
from nanovllm.utils.context import get_context


class Attention(nn.Module):
    """Causal attention of one layer over its share of the cache, which the runner binds to it."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    backend: AttentionBackend

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.scale = head_dim**-0.5
        self.eps = eps

    def bind(self, k_cache: torch.Tensor, v_cache: torch.Tensor, backend: AttentionBackend) -> None:
        """Give the layer its cache, [num_blocks, block_size, num_kv_heads, head_dim] each, and its backend."""
        self.k_cache, self.v_cache, self.backend = k_cache, v_cache, backend

    def store(
        self, qkv: torch.Tensor, norm_weights: NormWeights | None, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        """Store keys and values, and return the queries; the arguments are those of `qkv_rope_store`."""
        slots = get_context().kv_slots
        return qkv_rope_store(qkv, norm_weights, self.eps, cos_sin, positions, self.k_cache, self.v_cache, slots)

    def project_and_store(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        norm_weights: NormWeights,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> torch.Tensor:
        """`store` of `x @ weight.T`, where `fused_projection_pays`."""
        slots = get_context().kv_slots
        cache = self.k_cache, self.v_cache
        return project_rope_store(x, weight, norm_weights, self.eps, cos_sin, positions, *cache, slots)

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """Attend over what is stored; query and result are [num_tokens, num_heads, head_dim]."""
        return self.backend.forward(query, self.k_cache, self.v_cache, get_context(), self.scale)
