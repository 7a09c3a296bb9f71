"""Attention as a layer: store the new keys and values, then attend to the pages."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.attention.metadata import get_attention_metadata
from nanovllm.kernels.attention.options import PLAIN, AttentionOptions
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope, qkv_rope_store
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.quantization.kv_scales import KVCacheScales


class QKVProduct(Protocol):
    """A product of one layer for queries, keys and values, not computed yet; see `Projection`."""

    def compute(self) -> torch.Tensor:
        """Return the product, [num_tokens, outputs of this rank]."""

    def rope_store(
        self, rope: NormRope, positions: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the queries of `qkv_rope_store`, if one kernel for both is supported and faster."""


class CachedAttention(nn.Module):
    """What the runner knows of a layer that attends over its share of the cache.

    Args:
        num_kv_heads: of this rank.
        key_size, value_size: elements of a head's key and of its value.
        options: how it differs from plain causal attention.
        scales: of a cache in e4m3, if the checkpoint has them.

    Attributes:
        pages: the layer's cache; bound by the runner, as are the backend and the group.
        group: that of the KV cache to which the layer belongs, whose metadata it attends by.
    """

    pages: KVPages
    backend: AttentionBackend
    group: int

    def __init__(
        self,
        num_kv_heads: int,
        key_size: int,
        value_size: int,
        options: AttentionOptions,
        scales: KVCacheScales | None = None,
    ) -> None:
        super().__init__()
        self.scales = scales
        self.num_kv_heads, self.key_size, self.value_size = num_kv_heads, key_size, value_size
        self.options = options

    def kv_cache_spec(self, dtype: torch.dtype) -> Paged:
        """Return what the layer caches, in the dtype of its keys and values."""
        return Paged(self.num_kv_heads, self.key_size, self.value_size, self.options.window, dtype)

    def bind(self, pages: KVPages, backend: AttentionBackend, group: int = 0) -> None:
        """Give the layer its cache, its backend and its group."""
        self.pages, self.backend, self.group = pages, backend, group

    def unbind(self) -> None:
        """Take from the layer what `bind` gave it."""
        del self.pages, self.backend, self.group


class Attention(CachedAttention):
    """Causal attention of one layer over its share of the cache.

    Args:
        num_kv_heads: of this rank.
        head_dim: elements per head.
        eps: of the norms of heads, if there are any.
        rotary: what positions do to queries and keys; other layers may have the same.
        options: how it differs from plain causal attention.
        scales: see the base class.
    """

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        rotary: RotaryEmbedding,
        options: AttentionOptions = PLAIN,
        scales: KVCacheScales | None = None,
    ) -> None:
        super().__init__(num_kv_heads, head_dim, head_dim, options, scales)
        self.head_dim = head_dim
        self.scale = head_dim**-0.5
        self.eps = eps
        self.rotary = rotary

    def forward(
        self,
        qkv: QKVProduct,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        positions: torch.Tensor,
        rows: torch.Tensor | None = None,
        rounding: Rounding | None = None,
    ) -> torch.Tensor | Fp8Rows:
        """Norm and rotate queries and keys, store keys and values, and attend over all that is stored.

        Args:
            qkv: of all tokens of the step.
            q_norm, k_norm: of the heads; None if the model has none.
            positions: [num_tokens].
            rows: those to sample from, if only they are wanted.
            rounding: how the product that follows takes its rows in e4m3, if it does; not with `rows`.

        Returns:
            [num_tokens or len(rows), num_heads * head_dim]; or with `rounding` maybe these rows in e4m3.
        """
        norm_weights = None if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight)
        rope = NormRope(norm_weights, self.eps, self.rotary.cos_sin)
        metadata, pages = get_attention_metadata(self.group), self.pages
        query = qkv.rope_store(rope, positions, pages, metadata.slot_mapping)
        if query is None:
            # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
            heads = qkv.compute().view(len(positions), -1, self.head_dim)
            if rows is None and self.options.is_plain:
                out = self.backend.forward_projected(heads, rope, pages, metadata, self.scale, rounding)
                if out is not None:
                    return out if isinstance(out, Fp8Rows) else out.flatten(1)
            query = qkv_rope_store(heads, rope, positions, pages, metadata.slot_mapping)
        if rounding is not None and self.backend.can_round(rounding, self.head_dim):
            rounded = rounding.empty_rows(len(query), query.shape[1] * self.head_dim, query.device)
            self.backend.attend(query, pages, rounded, metadata, self.scale, self.options)
            return rounded
        if rows is None:
            return self.backend.forward(query, pages, metadata, self.scale, self.options).flatten(1)
        # Tiles without a sampled row are not computed, and their rows have anything in them.
        return self.backend.forward(query, pages, metadata.for_samples(), self.scale, self.options)[rows].flatten(1)
