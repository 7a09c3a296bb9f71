"""Attention by this library's own Triton kernels."""

from __future__ import annotations

import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.kernels.decode_attention import DecodePlan, decode_attention, plan_decode
from nanovllm.kernels.prefill_attention import prefill_attention
from nanovllm.kernels.prefix_attention import rows_per_item
from nanovllm.utils.context import Context

# Up to this many sequences, decoding cuts contexts finer and takes fewer programs. A step of Qwen3-0.6B on an H200, in
# ms, so and the other way: 1 context of 400 0.635 and 0.666, 4 0.828 and 0.847, 8 0.918 and 0.924, 16 1.04 and 1.07; 8
# of 250 0.855 and 0.881, of 600 0.944 and 0.967; 64 of 800 2.60 and 2.74, but 160 of 800 4.91 and 4.91. With 6 programs
# a multiprocessor instead of 9, 128 of 840 take 4.27 instead of 4.20.
FEW_SEQS = 64
_FEW_TILE, _FEW_PROGRAMS = 64, 3
_MANY_TILE, _MANY_PROGRAMS = 128, 9
"""Tokens of a tile, and programs a multiprocessor."""
_FLOAT32_TILE = 32
_PREFIX_PROGRAMS = 2
"""Programs a multiprocessor that share the work on common prefixes."""


class TritonBackend(AttentionBackend):
    """See the module.

    Args:
        device: a CUDA device.
        dtype: of queries and cache.
        num_heads, num_kv_heads: heads of queries, and of keys.
        head_dim: elements of a head.
    """

    supports_mixed_graph = True

    def __init__(
        self, device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.dtype = dtype
        self.heads = num_heads, num_kv_heads, head_dim
        self.max_prefix_items = _PREFIX_PROGRAMS * self.num_processors // num_kv_heads
        self.rows_per_prefix_item = rows_per_item(num_heads // num_kv_heads)

    def plan(self, context: Context) -> DecodePlan | None:
        """Share out the decode rows' contexts."""
        if not context.num_decodes:
            return None
        few = context.num_decodes <= FEW_SEQS
        tile, programs = (_FEW_TILE, _FEW_PROGRAMS) if few else (_MANY_TILE, _MANY_PROGRAMS)
        tile = _FLOAT32_TILE if self.dtype == torch.float32 else tile
        lens = context.context_lens[: context.num_decodes]
        return plan_decode(lens, self.num_processors * programs, tile, *self.heads, context.shared_prefixes)

    def forward(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: Context, scale: float
    ) -> torch.Tensor:
        """See the base class."""
        n = context.num_decodes
        out = torch.empty_like(query)
        tables, lens = context.block_tables, context.context_lens
        if n:
            decode_attention(query[:n], k_cache, v_cache, out[:n], tables[:n], lens[:n], context.plan, scale)
        if len(context.query_tiles):
            borders, tiles = context.cu_seqlens_q, context.query_tiles
            prefill_attention(query[n:], k_cache, v_cache, out[n:], tables[n:], lens[n:], borders, tiles, scale)
        return out
