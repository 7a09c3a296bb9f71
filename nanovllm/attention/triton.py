"""Attention by this library's own Triton kernels."""

from __future__ import annotations

import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.kernels.paged_attention import decode_attention, prefill_attention
from nanovllm.utils.context import Context

# Programs that keep a large GPU's multiprocessors busy, a few each; and the most pieces that one merge takes well.
_TARGET_PROGRAMS = 1024
_MAX_SPLITS = 32


class TritonBackend(AttentionBackend):
    """See the module."""

    def forward(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: Context, scale: float
    ) -> torch.Tensor:
        """See the base class."""
        n = context.num_decodes
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if n:
            decode_attention(
                query[:n],
                k_cache,
                v_cache,
                out[:n],
                context.block_tables[:n],
                context.context_lens[:n],
                num_splits(n * k_cache.shape[2]),
                scale,
            )
        if context.query_lens_host:
            prefill_attention(
                query[n:],
                k_cache,
                v_cache,
                out[n:],
                context.block_tables[n:],
                context.context_lens[n:],
                context.cu_seqlens_q,
                max(context.query_lens_host),
                scale,
            )
        return out


def num_splits(num_programs: int) -> int:
    """Pieces per context: the power of two that brings `num_programs` (sequences times KV heads) near the target.

    It follows from the batch alone, not from the contexts, so that a captured graph stays valid as these grow.
    """
    splits = 1
    while splits < _MAX_SPLITS and num_programs * splits * 2 <= _TARGET_PROGRAMS:
        splits *= 2
    return splits
