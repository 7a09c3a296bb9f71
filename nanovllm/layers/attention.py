"""Attention as a layer: store the new keys and values, then attend to the pages."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.kernels.store_kv import store_kv
from nanovllm.utils.context import get_context


class Attention(nn.Module):
    """Causal attention of one layer over its share of the cache, which the runner binds to it."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    backend: AttentionBackend

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def bind(self, k_cache: torch.Tensor, v_cache: torch.Tensor, backend: AttentionBackend) -> None:
        """Give the layer its cache, [num_blocks, block_size, num_kv_heads, head_dim] each, and its backend."""
        self.k_cache, self.v_cache, self.backend = k_cache, v_cache, backend

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]."""
        context = get_context()
        store_kv(key, value, self.k_cache, self.v_cache, context.kv_slots)
        return self.backend.forward(query, self.k_cache, self.v_cache, context, self.scale)
