"""Attention by torch's `scaled_dot_product_attention`: runs on any device, and is what the others are tested against.

The pages of a few sequences at a time are gathered into one padded tensor. Slow where contexts are long, and simple
enough to be believed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from nanovllm.attention.backend import AttentionBackend
from nanovllm.utils.context import Context

# Most gathered tokens of one piece (times KV heads and head size: its memory), and most queries of one.
_MAX_GATHERED_TOKENS = 65536
_MAX_QUERIES = 1024


@dataclass(frozen=True)
class Piece:
    """Sequences `[num_seqs]` of equally many queries that are computed by one call.

    `rows` are the piece's query rows; `kv_slots` [num_seqs * max_len] the cache places of the keys; `mask`
    [num_seqs, 1, num_queries, max_len] is true where a query sees a key.
    """

    rows: slice
    num_seqs: int
    kv_slots: torch.Tensor
    mask: torch.Tensor


class SdpaBackend(AttentionBackend):
    """See the module."""

    # Sizes of the gathered tensors follow the contexts.
    supports_cuda_graph = False

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def plan(self, context: Context) -> list[Piece]:
        """Cut the step into pieces: decode rows of about equal context together, chunks alone."""
        pieces = []
        first = 0
        for seq in range(context.num_decodes):
            max_len = max(context.context_lens_host[first : seq + 2])
            is_last = seq + 1 == context.num_decodes
            if is_last or (seq + 2 - first) * max_len > _MAX_GATHERED_TOKENS:
                pieces.append(self._piece(context, slice(first, seq + 1), row=first, num_queries=1))
                first = seq + 1
        row = context.num_decodes
        for i, query_len in enumerate(context.query_lens_host):
            seq = context.num_decodes + i
            for start in range(0, query_len, _MAX_QUERIES):
                num_queries = min(_MAX_QUERIES, query_len - start)
                pieces.append(
                    self._piece(
                        context,
                        slice(seq, seq + 1),
                        row=row + start,
                        num_queries=num_queries,
                        num_later=query_len - start - num_queries,
                    )
                )
            row += query_len
        return pieces

    def _piece(self, context: Context, seqs: slice, row: int, num_queries: int, num_later: int = 0) -> Piece:
        """The piece of sequences `seqs`, whose first query row is `row`; `num_later` of their tokens come after it."""
        lens = context.context_lens[seqs] - num_later
        max_len = max(context.context_lens_host[seqs]) - num_later
        position = torch.arange(max_len, device=lens.device)
        blocks = context.block_tables[seqs][:, position // self.block_size].long()
        query_position = lens[:, None] - num_queries + torch.arange(num_queries, device=lens.device)
        mask = position <= query_position[:, :, None]
        num_seqs = seqs.stop - seqs.start
        rows = slice(row, row + num_seqs * num_queries)
        kv_slots = blocks * self.block_size + position % self.block_size
        # A masked key still meets a product, and 0 times another sequence's infinity is NaN: it is this one's own.
        kv_slots = torch.where(position < lens[:, None], kv_slots, kv_slots[:, :1])
        return Piece(rows, num_seqs, kv_slots.flatten(), mask.unsqueeze(1))

    def forward(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, context: Context, scale: float
    ) -> torch.Tensor:
        """See the base class."""
        out = torch.empty_like(query)
        for piece in context.plan:
            out[piece.rows] = _attend(query[piece.rows], k_cache, v_cache, piece, scale)
        return out


def _attend(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, piece: Piece, scale: float
) -> torch.Tensor:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = k_cache.shape[2]
    # The heads of a group share their keys, so they are queries of one KV head: [seqs, kv_heads, group, queries, dim].
    q = query.view(piece.num_seqs, -1, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    group, num_queries = q.shape[2:4]
    # index_select copies whole rows; on the CPU it takes a quarter of the time of indexing.
    key, value = (
        cache.flatten(0, 1).index_select(0, piece.kv_slots).unflatten(0, (piece.num_seqs, -1)).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    mask = piece.mask.repeat(1, 1, group, 1)
    out = functional.scaled_dot_product_attention(q.flatten(2, 3), key, value, attn_mask=mask, scale=scale)
    out = out.view(piece.num_seqs, num_kv_heads, group, num_queries, head_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(num_rows, num_heads, head_dim)
