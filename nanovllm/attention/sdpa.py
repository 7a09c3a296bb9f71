"""Attention by torch's `scaled_dot_product_attention`, on any device; the reference for testing other backends.

It gathers the pages of a few sequences at a time into one padded tensor, which is slow for long contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from typing_extensions import override

from nanovllm.attention.backend import AttentionBackend, AttentionLayer
from nanovllm.attention.metadata import StepMetadata
from nanovllm.kernels.attention.options import AttentionOptions

if TYPE_CHECKING:
    from nanovllm.kernels.qkv_rope_store import KVPages

_MAX_GATHERED_TOKENS = 65536
"""Maximum padded context tokens of a segment of decode rows; bounds the memory of the gathered keys and values."""
_MAX_QUERIES = 1024
_SHORT = 32
"""Contexts that differ by at most this many tokens share a segment, whatever their ratio."""


@dataclass(frozen=True)
class Segment:
    """Sequences with equal numbers of queries, computed by one call.

    Attributes:
        rows: [num_seqs * num_queries]; query rows.
        num_seqs: sequences of the segment.
        key_slots: [num_seqs * num_keys]; KV slots of the keys that any of the queries sees.
        mask: [num_seqs, 1, num_queries, num_keys]; true where a query sees a key.
    """

    rows: torch.Tensor
    num_seqs: int
    key_slots: torch.Tensor
    mask: torch.Tensor


class SdpaBackend(AttentionBackend):
    """Attention in plain torch."""

    # The sizes of the gathered tensors depend on the context lengths.
    supports_cuda_graph = False

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    @override
    def plan(self, step: StepMetadata) -> None:
        # Segments by the layers' group and window, divided by the first layer of each.
        step.plan = {}

    def _segments(self, step: StepMetadata, group: int, window: int | None) -> list[Segment]:
        """Return the segments of a step: decode rows of similar context length together, each prompt chunk alone."""
        lens, segments = step.seq_lens_host, list[Segment]()
        make = partial(self._segment, step.seq_lens, step.block_tables[group], window)
        per_row = step.num_queries

        def add_decodes(seqs: list[int]) -> None:
            rows = [seq * per_row + number for seq in seqs for number in range(per_row)]
            positions = None if step.row_positions is None else step.row_positions[rows]
            segments.append(make(seqs, rows, lens[seqs[-1]], positions=positions))

        seqs: list[int] = []
        for seq in sorted(range(step.num_decodes), key=lens.__getitem__):
            padded = (len(seqs) + 1) * min(lens[seq], window or lens[seq])
            if seqs and (lens[seq] > 1.5 * lens[seqs[0]] + _SHORT or padded > _MAX_GATHERED_TOKENS):
                add_decodes(seqs)
                seqs = []
            seqs.append(seq)
        if seqs:
            add_decodes(seqs)
        row = step.num_row_tokens
        for seq, query_len in enumerate(step.query_lens_host, start=step.num_decodes):
            for start in range(0, query_len, _MAX_QUERIES):
                end = min(start + _MAX_QUERIES, query_len)
                segments.append(make([seq], range(row + start, row + end), lens[seq] - query_len + end))
            row += query_len
        return segments

    def _segment(
        self, seq_lens: torch.Tensor, block_tables: torch.Tensor, window: int | None, seqs: list[int],
        rows: Sequence[int], max_len: int, *, positions: torch.Tensor | None = None,
    ) -> Segment:  # fmt: skip
        """Return the segment of `seqs`, whose queries are at `positions`, or the last of at most `max_len` keys."""
        device = seq_lens.device
        seq_index, row_index = (torch.tensor(list(index), device=device) for index in (seqs, rows))
        num_queries = len(rows) // len(seqs)
        lens = seq_lens[seq_index].clamp(max=max_len)
        query_position = lens[:, None] - num_queries + torch.arange(num_queries, device=device)
        if positions is not None:
            query_position = positions.view(len(seqs), num_queries)
        num_keys = max_len if window is None else min(max_len, window + num_queries - 1)
        first = torch.zeros_like(lens) if window is None else (query_position[:, 0] + 1 - window).clamp(min=0)
        position = first[:, None] + torch.arange(num_keys, device=device)
        # Masked keys still enter the products, and 0 times another sequence's infinity is NaN: read an own key instead.
        own_position = torch.where(position < lens[:, None], position, first[:, None])
        blocks = block_tables[seq_index].gather(1, own_position // self.block_size).long()
        key_slots = blocks * self.block_size + own_position % self.block_size
        mask = position[:, None] <= query_position[:, :, None]
        if window is not None:
            mask &= position[:, None] > query_position[:, :, None] - window
        return Segment(row_index, len(seqs), key_slots.flatten(), mask.unsqueeze(1))

    @override
    def run(self, query: torch.Tensor, layer: AttentionLayer, step: StepMetadata) -> torch.Tensor:
        segments: dict[tuple[int, int | None], list[Segment]] = step.plan
        key = layer.group, layer.options.window
        if key not in segments:
            segments[key] = self._segments(step, layer.group, layer.options.window)
        out = query.new_empty(*query.shape[:2], layer.pages.v_cache.shape[3])
        for segment in segments[key]:
            out[segment.rows] = _attend(query.index_select(0, segment.rows), layer, segment)
        return out


def _attend(query: torch.Tensor, layer: AttentionLayer, segment: Segment) -> torch.Tensor:
    pages, scale, options = layer.pages, layer.scale, layer.options
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = pages.k_cache.shape[2]
    # Query heads of a group become further queries of their KV head: [seqs, kv_heads, group, queries, dim].
    q = query.view(segment.num_seqs, -1, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    group, num_queries = q.shape[2:4]
    # On the CPU index_select takes a quarter of the time of indexing.
    key, value = (
        rows.unflatten(0, (segment.num_seqs, -1)).transpose(1, 2) for rows in _gather(pages, segment, query.dtype)
    )
    mask = segment.mask.repeat(1, 1, group, 1)
    if options.softcap is None and options.sinks is None:
        out = functional.scaled_dot_product_attention(q.flatten(2, 3), key, value, attn_mask=mask, scale=scale)
    else:
        out = _attend_in_steps(q.flatten(2, 3), key, value, mask, scale=scale, options=options)
    out = out.view(segment.num_seqs, num_kv_heads, group, num_queries, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(num_rows, num_heads, -1)


def _gather(pages: KVPages, segment: Segment, dtype: torch.dtype) -> list[torch.Tensor]:
    rows = [cache.flatten(0, 1).index_select(0, segment.key_slots) for cache in pages.stored]
    if pages.scales is None:
        return rows
    scales = pages.scales.keys, pages.scales.values
    return [
        (one.view(torch.float8_e4m3fn).float() * scale[:, None]).to(dtype)
        for one, scale in zip(rows, scales, strict=True)
    ]


def _attend_in_steps(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor,
    *, scale: float, options: AttentionOptions,
) -> torch.Tensor:  # fmt: skip
    """Attend with softcap and sinks; query: [num_seqs, num_kv_heads, group * num_queries, key_size]."""
    scores = (query @ key.transpose(2, 3)).float() * scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.float().view(key.shape[1], -1, 1)
        # All queries of a head share its sink.
        sinks = sinks.repeat_interleave(query.shape[2] // sinks.shape[1], 1)
        scores = torch.cat((scores, sinks.expand(len(scores), -1, -1, -1)), -1)
    return scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value
