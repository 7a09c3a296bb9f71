"""Attention as a layer: store the new keys and values, then attend to the pages."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import get_attention_metadata
from nanovllm.kernels.qkv_rope_store import NormWeights, project_rope_store, qkv_rope_store


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

    def project_and_attend(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        norm_weights: NormWeights,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward` of `x @ weight.T`, where `should_use_fused_qkv`."""
        metadata, cache = get_attention_metadata(), (self.k_cache, self.v_cache)
        query = project_rope_store(x, weight, norm_weights, self.eps, cos_sin, positions, *cache, metadata.slot_mapping)
        return self._attend(query, rows)

    def forward(
        self,
        qkv: torch.Tensor,
        norm_weights: NormWeights | None,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store keys and values, and attend over all that is stored.

        The arguments are those of `qkv_rope_store`, but `rows`, which are those to sample from, if only they are
        wanted. The result is [num_tokens, num_heads, head_dim], or has the `rows` alone.
        """
        metadata, cache = get_attention_metadata(), (self.k_cache, self.v_cache)
        if rows is None:
            out = self.backend.forward_projected(qkv, norm_weights, self.eps, cos_sin, *cache, metadata, self.scale)
            if out is not None:
                return out
        query = qkv_rope_store(qkv, norm_weights, self.eps, cos_sin, positions, *cache, metadata.slot_mapping)
        return self._attend(query, rows)

    def _attend(self, query: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        cache = self.k_cache, self.v_cache
        if rows is None:
            return self.backend.forward(query, *cache, get_attention_metadata(), self.scale)
        return self.backend.forward(query, *cache, get_attention_metadata().for_samples(), self.scale)[rows]
