"""Prompt chunks as arrays."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from nanovllm.kernels.attention.prefill_attention import QUERY_TILE
from nanovllm.runner.batch import PromptArrays, make_prompt_arrays
from nanovllm.runner.messages import Chunk

LENS = [1, QUERY_TILE - 1, QUERY_TILE, QUERY_TILE + 1, 3 * QUERY_TILE, 2 * QUERY_TILE + 5]


def rows_of(tiles: np.ndarray, cu_seqlens_q: np.ndarray) -> list[range]:
    """The rows of each tile that there is."""
    seqs, numbers = np.split(tiles, 2)
    assert (numbers[seqs < 0] == 0).all()
    found = []
    for seq, number in zip(seqs, numbers, strict=True):
        if seq >= 0:
            start = cu_seqlens_q[seq] + number * QUERY_TILE
            found.append(range(start, min(start + QUERY_TILE, cu_seqlens_q[seq + 1])))
    return found


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("samples", [[True] * 6, [False] * 6, [True, False, True, True, False, True]])
def test_tiles_and_sample_tiles(padding: int, samples: list[bool]) -> None:
    chunks = [
        Chunk(slot, 7 * slot, array("i", [slot] * n), True, sampled)
        for slot, (n, sampled) in enumerate(zip(LENS, samples, strict=True))
    ]
    num_tokens, num_chunks = sum(LENS) + 50 * padding, len(chunks) + padding
    state = np.zeros((len(chunks) + 1, 1, 64), dtype=np.int32)
    arrays = make_prompt_arrays(chunks, num_tokens, num_chunks, state, len(chunks), 16)
    assert sum(map(len, arrays)) == PromptArrays.total_size(num_tokens, num_chunks, 1)
    tiled = rows_of(arrays.tiles, arrays.cu_seqlens_q)
    assert sorted(row for rows in tiled for row in rows) == list(range(sum(LENS)))
    sampled_rows = arrays.sample_indices[: sum(samples)].tolist()
    assert sampled_rows == [n - 1 for n, sampled in zip(np.cumsum(LENS), samples, strict=True) if sampled]
    held = rows_of(arrays.sample_tiles, arrays.cu_seqlens_q)
    assert len(held) == sum(samples) and all(row in rows for row, rows in zip(sampled_rows, held, strict=True))
    assert set(held) <= set(tiled)


@pytest.mark.parametrize("padded", [False, True])
def test_every_field_by_hand(padded: bool) -> None:
    """Three chunks in blocks of 16: a middle part, a token that is stored already, and a prompt of two tiles."""
    table = [[0] * 12, [9, 4, 7, *[0] * 9], [0] * 12, [3, 8, *[0] * 10], [*range(20, 32)], [0] * 12]
    state = np.array(table, dtype=np.int32)[:, None]
    long = list(range(500, 500 + QUERY_TILE + 2))
    chunks = [
        Chunk(3, 14, array("i", [71, 72, 73, 74]), store=True, samples=False),
        Chunk(1, 47, array("i", [81]), store=False, samples=True),
        Chunk(4, 0, array("i", long), store=True, samples=True),
    ]
    total = 5 + len(long)

    def pad(value: int, count: int = 1) -> list[int]:
        return [value] * (count if padded else 0)

    want = {
        "token_ids": [71, 72, 73, 74, 81, *long, *pad(0, 2)],
        "positions": [14, 15, 16, 17, 47, *range(len(long)), *pad(0, 2)],
        "slot_mapping": [3 * 16 + 14, 3 * 16 + 15, 8 * 16, 8 * 16 + 1, -1, *range(320, 320 + len(long)), *pad(-1, 2)],
        "slots": [3, 1, 4, *pad(5)],
        "seq_lens": [18, 48, len(long), *pad(1)],
        "cu_seqlens_q": [0, 4, 5, total, *pad(total)],
        "sample_indices": [4, total - 1, 0, *pad(0)],
        "sample_slots": [1, 4, 5, *pad(5)],
        # As many tiles as such sizes can ever take; those whose first query has the longest context come first.
        "tiles": [2, 1, 0, 2, *pad(-1), 1, 0, 0, 0, *pad(0)],
        "sample_tiles": [1, 2, -1, *pad(-1), 0, 1, 0, *pad(0)],
    }
    arrays = make_prompt_arrays(chunks, total + 2 * padded, 3 + padded, state, 5, 16)
    assert {name: array.tolist() for name, array in arrays._asdict().items()} == want
    assert all(array.dtype == np.int32 for array in arrays)


def test_padding_alone_and_nothing_at_all() -> None:
    state = np.zeros((3, 1, 2), dtype=np.int32)
    arrays = make_prompt_arrays([], 4, 2, state, 2, 16)
    assert {name: array.tolist() for name, array in arrays._asdict().items()} == {
        "token_ids": [0] * 4, "positions": [0] * 4, "slot_mapping": [-1] * 4, "slots": [2, 2], "seq_lens": [1, 1],
        "cu_seqlens_q": [0, 0, 0], "sample_indices": [0, 0], "sample_slots": [2, 2], "tiles": [-1, -1, 0, 0],
        "sample_tiles": [-1, -1, 0, 0],
    }  # fmt: skip
    assert all(array.dtype == np.int32 and not len(array) for array in make_prompt_arrays([], 0, 0, state, 2, 16))
