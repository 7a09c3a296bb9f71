"""Attention by torch's `scaled_dot_product_attention`: runs on any device, and is what the others are tested against.

The pages of a few sequences at a time are gathered into one padded tensor. Slow where contexts are long, and simple
enough to be believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import AttentionMetadata

# Most gathered tokens of one segment (times KV heads and head size: its memory), and most queries of one.
_MAX_GATHERED_TOKENS = 65536
_MAX_QUERIES = 1024
# Contexts that differ by less than this are padded rather than kept apart.
_SHORT = 32


@dataclass(frozen=True)
class Segment:
    """Sequences `[num_seqs]` of equally many queries that are computed by one call.

    `rows` [num_seqs * num_queries] are the query rows; `kv_slots` [num_seqs * max_len] the KV slots of the keys;
    `mask` [num_seqs, 1, num_queries, max_len] is true where a query sees a key.
    """

    rows: torch.Tensor
    num_seqs: int
    kv_slots: torch.Tensor
    mask: torch.Tensor


class SdpaBackend(AttentionBackend):
    """See the module."""

    # Sizes of the gathered tensors follow the contexts.
    supports_cuda_graph = False

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def plan(self, metadata: AttentionMetadata) -> list[Segment]:
        """Cut the step into segments: decode rows of about equal context together, chunks alone."""
        lens = metadata.seq_lens_host
        segments = []
        seqs: list[int] = []
        for seq in sorted(range(metadata.num_decodes), key=lens.__getitem__):
            padded = (len(seqs) + 1) * lens[seq]
            if seqs and (lens[seq] > 1.5 * lens[seqs[0]] + _SHORT or padded > _MAX_GATHERED_TOKENS):
                segments.append(self._segment(metadata, seqs, seqs, lens[seqs[-1]]))
                seqs = []
            seqs.append(seq)
        if seqs:
            segments.append(self._segment(metadata, seqs, seqs, lens[seqs[-1]]))
        row = metadata.num_decodes
        for seq, query_len in enumerate(metadata.query_lens_host, start=metadata.num_decodes):
            for start in range(0, query_len, _MAX_QUERIES):
                end = min(start + _MAX_QUERIES, query_len)
                segments.append(
                    self._segment(metadata, [seq], range(row + start, row + end), lens[seq] - query_len + end)
                )
            row += query_len
        return segments

    def _segment(self, metadata: AttentionMetadata, seqs: list[int], rows: Sequence[int], max_len: int) -> Segment:
        """The segment of sequences `seqs`, with equally many query rows each, over contexts of at most `max_len`."""
        device = metadata.seq_lens.device
        seq_index, row_index = (torch.tensor(list(index), device=device) for index in (seqs, rows))
        num_queries = len(rows) // len(seqs)
        lens = metadata.seq_lens[seq_index].clamp(max=max_len)
        position = torch.arange(max_len, device=device)
        blocks = metadata.block_tables[seq_index][:, position // self.block_size].long()
        query_position = lens[:, None] - num_queries + torch.arange(num_queries, device=device)
        mask = position <= query_position[:, :, None]
        kv_slots = blocks * self.block_size + position % self.block_size
        # A masked key still meets a product, and 0 times another sequence's infinity is NaN: it is this one's own.
        kv_slots = torch.where(position < lens[:, None], kv_slots, kv_slots[:, :1])
        return Segment(row_index, len(seqs), kv_slots.flatten(), mask.unsqueeze(1))

    def forward(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """See the base class."""
        out = torch.empty_like(query)
        for segment in metadata.plan:
            out[segment.rows] = _attend(query.index_select(0, segment.rows), k_cache, v_cache, segment, scale)
        return out


def _attend(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, segment: Segment, scale: float
) -> torch.Tensor:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = k_cache.shape[2]
    # The heads of a group share their keys, so they are queries of one KV head: [seqs, kv_heads, group, queries, dim].
    q = query.view(segment.num_seqs, -1, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    group, num_queries = q.shape[2:4]
    # index_select copies whole rows; on the CPU it takes a quarter of the time of indexing.
    key, value = (
        cache.flatten(0, 1).index_select(0, segment.kv_slots).unflatten(0, (segment.num_seqs, -1)).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    mask = segment.mask.repeat(1, 1, group, 1)
    out = functional.scaled_dot_product_attention(q.flatten(2, 3), key, value, attn_mask=mask, scale=scale)
    out = out.view(segment.num_seqs, num_kv_heads, group, num_queries, head_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(num_rows, num_heads, head_dim)
