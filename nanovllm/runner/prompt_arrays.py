"""Lays out the prompt chunks of a step as arrays of a given size, so that a captured graph can read them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from nanovllm.kernels.attention.prefill_attention import QUERY_TILE
from nanovllm.runner.messages import Chunk


class PromptArrays(NamedTuple):
    """Arrays of int32 (numpy on the host, torch on the device) for T prompt tokens in C chunks, padding included.

    G is the number of groups of the KV cache.

    Attributes:
        token_ids, positions: [T].
        slot_mapping: [G * T], group after group, `block * block_size + offset`; -1 stores nothing, as for padding.
        slots, seq_lens: [C]; a chunk's slot, and the tokens up to its end. Padding has the padding slot, and 1.
        cu_seqlens_q: [C + 1]; where each chunk starts among the tokens.
        sample_indices, sample_slots: [C]; the last tokens of the chunks that end a prompt (padding: 0, its slot).
        tiles: [2 * num_tiles]; the chunk of each tile of queries (-1 for padding), then its number within the chunk.
        sample_tiles: [2 * C]; likewise for the tiles that contain one of sample_indices.
    """

    token_ids: Any
    positions: Any
    slot_mapping: Any
    slots: Any
    seq_lens: Any
    cu_seqlens_q: Any
    sample_indices: Any
    sample_slots: Any
    tiles: Any
    sample_tiles: Any

    @staticmethod
    def num_tiles(num_tokens: int, num_chunks: int) -> int:
        """Return the most tiles that `num_tokens` tokens in `num_chunks` chunks can take."""
        return num_tokens // QUERY_TILE + num_chunks

    @classmethod
    def total_size(cls, num_tokens: int, num_chunks: int, num_groups: int) -> int:
        """Return the number of elements of all arrays together."""
        return (2 + num_groups) * num_tokens + 7 * num_chunks + 1 + 2 * cls.num_tiles(num_tokens, num_chunks)


_NO_PROMPTS = PromptArrays._make([np.empty(0, dtype=np.int32)] * len(PromptArrays._fields))
"""Empty arrays, so that nothing has to be sent."""


def make_prompt_arrays(
    chunks: list[Chunk],
    num_tokens: int,
    num_chunks: int,
    block_tables: np.ndarray,
    padding_slot: int,
    block_size: int,
) -> PromptArrays:
    """Lay out chunks in arrays for `num_tokens` tokens and `num_chunks` chunks, padding included.

    Args:
        chunks: of the step.
        num_tokens, num_chunks: sizes to pad to; zero chunks, padding included, give empty arrays.
        block_tables: [num_slots + 1, G, max_blocks]; of all slots, on the host.
        padding_slot: the slot of padding.
        block_size: tokens per block.
    """
    if not num_chunks:
        return _NO_PROMPTS
    lens = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
    cu_seqlens_q = np.concatenate(([0], lens.cumsum())).astype(np.int32)
    token_ids = np.concatenate([np.asarray(chunk.token_ids) for chunk in chunks] or [slots])
    positions = np.arange(cu_seqlens_q[-1], dtype=np.int32) + np.repeat(starts - cu_seqlens_q[:-1], lens)
    slot_mapping = np.full((block_tables.shape[1], num_tokens), -1, dtype=np.int32)
    blocks = block_tables[np.repeat(slots, lens), :, positions // block_size].T
    slot_mapping[:, : len(positions)] = blocks * block_size + positions % block_size
    for chunk, (first, end) in zip(chunks, pairwise(cu_seqlens_q), strict=True):
        if not chunk.store:
            slot_mapping[:, first:end] = -1
    samples = np.array([chunk.samples for chunk in chunks], dtype=bool)
    return PromptArrays(
        token_ids=_pad(token_ids, num_tokens, 0),
        positions=_pad(positions, num_tokens, 0),
        slot_mapping=slot_mapping.reshape(-1),
        slots=_pad(slots, num_chunks, padding_slot),
        seq_lens=_pad(starts + lens, num_chunks, 1),
        cu_seqlens_q=_pad(cu_seqlens_q, num_chunks + 1, int(cu_seqlens_q[-1])),
        sample_indices=_pad(cu_seqlens_q[1:][samples] - 1, num_chunks, 0),
        sample_slots=_pad(slots[samples], num_chunks, padding_slot),
        tiles=_tiles(lens, starts, PromptArrays.num_tiles(num_tokens, num_chunks)),
        sample_tiles=np.concatenate(
            (_pad(np.flatnonzero(samples), num_chunks, -1), _pad((lens[samples] - 1) // QUERY_TILE, num_chunks, 0))
        ),
    )


def _tiles(lens: np.ndarray, starts: np.ndarray, size: int) -> np.ndarray:
    """Return every chunk's tiles of queries, longest contexts first, since they take the longest."""
    counts = -(-lens // QUERY_TILE)
    chunk = np.repeat(np.arange(len(lens), dtype=np.int32), counts)
    number = np.arange(len(chunk), dtype=np.int32) - np.repeat(counts.cumsum() - counts, counts)
    order = np.argsort(-(starts[chunk] + number * QUERY_TILE), kind="stable")
    return np.concatenate((_pad(chunk[order], size, -1), _pad(number[order], size, 0)))


def _pad(array: np.ndarray, size: int, value: int) -> np.ndarray:
    out = np.full(size, value, dtype=np.int32)
    out[: len(array)] = array
    return out
