"""Attention by this library's own Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

FEW_SEQS = 64
"""Up to this many sequences, `decode_attention` uses smaller tiles and fewer programs: 64 contexts of 800 tokens take
2.60 ms a step instead of 2.74 (0.6B, H200)."""
_FEW_TILE, _FEW_PROGRAMS = 64, 3
_MANY_TILE, _MANY_PROGRAMS = 128, 9
_FLOAT32_TILE = 32
_HOPPER_PROGRAMS = 2
"""Tokens per tile, and programs per multiprocessor over which contexts are split."""
_PROGRAMS_FOR_BANDWIDTH = 80
"""Programs of `hopper_decode` that saturate an H200's read bandwidth."""
_FREE_TOKENS = 190
"""Tokens that one program reads in the time that merging splits takes."""
_CASCADE_PROGRAMS = 2
"""Programs per multiprocessor for cascade attention."""


def should_use_single_split(num_kv_heads: int, seq_lens: np.ndarray) -> bool:
    """Return whether `hopper_decode` is faster with a single split for each context; seq_lens: [num_seqs].

    One program then reads a whole context for one KV head. That is faster unless the longest context takes longer
    than reading all contexts at full bandwidth and merging their splits. Figures: kernels/README.md.
    """
    # A single short context would gain 1% until it has grown, which is not worth a second CUDA graph.
    if len(seq_lens) == 1:
        return False
    evenly = int(seq_lens.sum()) * num_kv_heads // _PROGRAMS_FOR_BANDWIDTH
    return int(seq_lens.max(initial=0)) <= evenly + _FREE_TOKENS


class TritonBackend(AttentionBackend):
    """Attention by this library's Triton and Gluon kernels.

    Args:
        device: a CUDA device.
        dtype: of the queries and the KV cache.
        block_size: tokens per cache block.
        num_heads, num_kv_heads: query heads and KV heads.
        head_dim: elements per head.
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
        self._prefill: Callable[..., None] = prefill_attention
        if is_hopper(device):
            from nanovllm.kernels.attention import hopper_decode, hopper_prefill  # noqa: PLC0415

            if hopper_prefill.supports(dtype, head_dim, block_size):
                self._prefill = partial(hopper_prefill.hopper_prefill_attention, num_programs=self.num_processors)
            if hopper_decode.supports(dtype, num_heads, num_kv_heads, head_dim, block_size):
                self._hopper_decode, self.supports_single_split = hopper_decode, True

    def should_use_single_split(self, num_kv_heads: int, seq_lens: np.ndarray) -> bool:
        """See the base class."""
        return self.supports_single_split and should_use_single_split(num_kv_heads, seq_lens)

    def plan(self, metadata: AttentionMetadata) -> Any:
        """Divide the decode rows' contexts among programs."""
        n = metadata.num_decodes
        if not n:
            return None
        tile, programs = (_FEW_TILE, _FEW_PROGRAMS) if n <= FEW_SEQS else (_MANY_TILE, _MANY_PROGRAMS)
        if self._hopper_decode is not None:
            tile, programs = self._hopper_decode.TILE.value, _HOPPER_PROGRAMS
        elif self.dtype == torch.float32:
            tile = _FLOAT32_TILE
        shares = 1 if metadata.single_split else self._shares(n, programs)
        return plan_decode(metadata.seq_lens[:n], *self.heads, tile, shares, metadata.cascade)

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
            decode_attention(*decodes, metadata.plan, scale)
        if len(metadata.query_tiles):
            cu_seqlens_q, tiles = metadata.cu_seqlens_q, metadata.query_tiles
            self._prefill(query[n:], k_cache, v_cache, out[n:], tables[n:], lens[n:], cu_seqlens_q, tiles, scale)
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
        """See the base class; supported by `hopper_decode`, for decode rows only, without cascade attention."""
        if self._hopper_decode is None or metadata.cascade is not None or len(metadata.query_tiles):
            return None
        out = qkv.new_empty(len(qkv), self.heads[0], qkv.shape[2])
        self._hopper_decode.hopper_decode_attention(
            qkv, k_cache, v_cache, out, metadata.block_tables, metadata.slot_mapping, metadata.plan, scale,
            (norm_weights, eps, cos_sin),
        )  # fmt: skip
        return out

    def _shares(self, num_seqs: int, programs: int) -> int:
        """Return the `shares` argument of `split_contexts` for `programs` programs per multiprocessor."""
        _, num_kv_heads, _ = self.heads
        at_once = max(1, programs * self.num_processors // num_kv_heads)
        # Rounding can give each sequence one extra split; few sequences' splits must all be resident at once.
        return at_once - num_seqs if 2 * num_seqs <= at_once else at_once
