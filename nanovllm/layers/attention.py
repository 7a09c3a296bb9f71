"""Attention as a layer: store the new keys and values, then attend to the pages."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import get_attention_metadata
from nanovllm.kernels.qkv_rope_store import qkv_rope_store
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Projection


class Attention(nn.Module):
    """Causal attention of one layer over its share of the cache.

    Attributes:
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]; bound by the runner, as is the backend.
        cos_sin: the rotary embedding's table, [max_position, head_dim]; set by the model.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    backend: AttentionBackend
    cos_sin: torch.Tensor

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.eps = eps

    def bind(self, k_cache: torch.Tensor, v_cache: torch.Tensor, backend: AttentionBackend) -> None:
        """Give the layer its cache and its backend."""
        self.k_cache, self.v_cache, self.backend = k_cache, v_cache, backend

    def forward(
        self,
        qkv: Projection,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        positions: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, store keys and values, and attend over all that is stored.

        Args:
            qkv: of all tokens of the step.
            q_norm, k_norm: of the heads; None if the model has none.
            positions: [num_tokens].
            rows: those to sample from, if only they are wanted.

        Returns:
            [num_tokens or len(rows), num_heads * head_dim].
        """
        norm_weights = None if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight)
        metadata, cache = get_attention_metadata(), (self.k_cache, self.v_cache)
        rope, stored = (norm_weights, self.eps, self.cos_sin), (positions, *cache, metadata.slot_mapping)
        query = qkv.rope_store(self.head_dim, *rope, *stored)
        if query is None:
            # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
            heads = qkv.compute().view(len(positions), -1, self.head_dim)
            if rows is None:
                out = self.backend.forward_projected(heads, *rope, *cache, metadata, self.scale)
                if out is not None:
                    return out.flatten(1)
            query = qkv_rope_store(heads, *rope, *stored)
        if rows is None:
            return self.backend.forward(query, *cache, metadata, self.scale).flatten(1)
        return self.backend.forward(query, *cache, metadata.for_samples(), self.scale)[rows].flatten(1)
