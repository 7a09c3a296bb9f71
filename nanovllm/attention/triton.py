"""Attention by this library's own Triton kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.kernels._triton import is_hopper
from nanovllm.kernels.attention.cascade_attention import rows_per_item
from nanovllm.kernels.attention.decode_attention import decode_attention, plan_decode
from nanovllm.kernels.attention.prefill_attention import prefill_attention
from nanovllm.kernels.qkv_rope_store import NormWeights

# `decode_attention` shares up to this many contexts out more finely, for fewer programs. A step of 0.6B on an H200, in
# ms, so and the other way: 1 context of 400 0.635 and 0.666, 4 0.828 and 0.847, 8 0.918 and 0.924, 16 1.04 and 1.07; 8
# of 250 0.855 and 0.881, of 600 0.944 and 0.967; 64 of 800 2.60 and 2.74, but 160 of 800 4.91 and 4.91. With 6 programs
# a multiprocessor instead of 9, 128 of 840 take 4.27 instead of 4.20.
FEW_SEQS = 64
_FEW_TILE, _FEW_PROGRAMS = 64, 3
_MANY_TILE, _MANY_PROGRAMS = 128, 9
"""Tokens of a tile, and programs a multiprocessor."""
_FLOAT32_TILE = 32
_SPLIT_PROGRAMS = 2
"""Programs a multiprocessor among which `hopper_decode` splits contexts."""
_PROGRAMS_FOR_BANDWIDTH = 80
"""So many programs of it read as fast as an H200 can."""
_FREE_TOKENS = 190
"""So many a program reads while split contexts would be merged."""
_CASCADE_PROGRAMS = 2
"""Programs a multiprocessor that share the work on common prefixes."""


def should_use_single_split(num_kv_heads: int, seq_lens: np.ndarray) -> bool:
    """Whether `hopper_decode` had better leave contexts of these lengths, [num_seqs], whole.

    One program then reads a sequence's part of a KV head, so the longest context must not keep the device waiting. A
    step of Qwen3-0.6B, whole and split, in ms: 2 contexts of 200 0.722 and 0.754, of 400 0.777 and 0.760; 4 of 300
    0.765 and 0.774, of 400 0.786 and 0.779; 8 of 400 0.804 and 0.831, of 1024 0.969 and 0.947, of 4096 1.834 and 1.609.
    A single short one would gain 1%, until it has grown, and is not worth two graphs.
    """
    if len(seq_lens) == 1:
        return False
    evenly = int(seq_lens.sum()) * num_kv_heads // _PROGRAMS_FOR_BANDWIDTH
    return int(seq_lens.max(initial=0)) <= evenly + _FREE_TOKENS


class TritonBackend(AttentionBackend):
    """See the module.

    Args:
        device: a CUDA device.
        dtype: of queries and cache.
        block_size: tokens of a cache block.
        num_heads, num_kv_heads: heads of queries, and of keys.
        head_dim: elements of a head.
    """

    supports_mixed_graph = True

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.dtype = dtype
        self.heads = num_heads, num_kv_heads, head_dim
        self.max_cascade_items = _CASCADE_PROGRAMS * self.num_processors // num_kv_heads
        self.rows_per_cascade_item = rows_per_item(num_heads // num_kv_heads)
        self._hopper_decode: Any = None
        if is_hopper(device):
            from nanovllm.kernels.attention import hopper_decode  # noqa: PLC0415

            if hopper_decode.supports(dtype, num_heads, num_kv_heads, head_dim, block_size):
                self._hopper_decode, self.supports_single_split = hopper_decode, True

    def should_use_single_split(self, num_kv_heads: int, seq_lens: np.ndarray) -> bool:
        """See the base class."""
        return self.supports_single_split and should_use_single_split(num_kv_heads, seq_lens)

    def plan(self, metadata: AttentionMetadata) -> Any:
        """Plan how programs share the decode rows' contexts."""
        if not metadata.num_decodes:
            return None
        lens = metadata.seq_lens[: metadata.num_decodes]
        if self._hopper_decode is not None:
            shares = 1 if metadata.single_split else self._shares(metadata.num_decodes)
            return self._hopper_decode.plan_hopper_decode(lens, *self.heads, shares, metadata.cascade)
        few = metadata.num_decodes <= FEW_SEQS
        tile, programs = (_FEW_TILE, _FEW_PROGRAMS) if few else (_MANY_TILE, _MANY_PROGRAMS)
        tile = _FLOAT32_TILE if self.dtype == torch.float32 else tile
        return plan_decode(lens, self.num_processors * programs, tile, *self.heads, metadata.cascade)

    def forward(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """See the base class."""
        n = metadata.num_decodes
        out = torch.empty_like(query)
        tables, lens = metadata.block_tables, metadata.seq_lens
        decodes = query[:n], k_cache, v_cache, out[:n], tables[:n]
        if n and self._hopper_decode is not None:
            self._hopper_decode.hopper_decode_attention(*decodes, metadata.slot_mapping[:n], metadata.plan, scale)
        elif n:
            decode_attention(*decodes, lens[:n], metadata.plan, scale)
        if len(metadata.query_tiles):
            cu_seqlens_q, tiles = metadata.cu_seqlens_q, metadata.query_tiles
            prefill_attention(query[n:], k_cache, v_cache, out[n:], tables[n:], lens[n:], cu_seqlens_q, tiles, scale)
        return out

    def forward_projected(
        self,
        qkv: torch.Tensor,
        norm_weights: NormWeights | None,
        eps: float,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor | None:
        """See the base class; for decode rows alone, without shared prefixes."""
        if self._hopper_decode is None or metadata.cascade is not None or len(metadata.query_tiles):
            return None
        out = qkv.new_empty(len(qkv), self.heads[0], qkv.shape[2])
        self._hopper_decode.hopper_decode_attention(
            qkv, k_cache, v_cache, out, metadata.block_tables, metadata.slot_mapping, metadata.plan, scale,
            (norm_weights, eps, cos_sin),
        )  # fmt: skip
        return out

    def _shares(self, num_seqs: int) -> int:
        """How finely `hopper_decode` had better split contexts."""
        _, num_kv_heads, _ = self.heads
        at_once = max(1, _SPLIT_PROGRAMS * self.num_processors // num_kv_heads)
        # Each sequence may have a split more than its share of them; a few together must not be more than run at once.
        return at_once - num_seqs if 2 * num_seqs <= at_once else at_once
