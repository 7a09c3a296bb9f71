"""Prompt chunks as arrays."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from nanovllm.engine.messages import PromptChunk
from nanovllm.engine.prompt_arrays import PromptArrays, make_prompt_arrays
from nanovllm.kernels.prefill_attention import QUERY_TILE

LENS = [1, QUERY_TILE - 1, QUERY_TILE, QUERY_TILE + 1, 3 * QUERY_TILE, 2 * QUERY_TILE + 5]


def rows_of(tiles: np.ndarray, borders: np.ndarray) -> list[range]:
    """The rows of each tile that there is."""
    seqs, numbers = np.split(tiles, 2)
    assert (numbers[seqs < 0] == 0).all()
    found = []
    for seq, number in zip(seqs, numbers, strict=True):
        if seq >= 0:
            start = borders[seq] + number * QUERY_TILE
            found.append(range(start, min(start + QUERY_TILE, borders[seq + 1])))
    return found


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("samples", [[True] * 6, [False] * 6, [True, False, True, True, False, True]])
def test_tiles_hold_every_row_once_and_sample_tiles_those_to_sample_from(padding: int, samples: list[bool]) -> None:
    chunks = [
        PromptChunk(slot, 7 * slot, array("i", [slot] * n), True, sampled)
        for slot, (n, sampled) in enumerate(zip(LENS, samples, strict=True))
    ]
    num_tokens, num_chunks = sum(LENS) + 50 * padding, len(chunks) + padding
    state = np.zeros((len(chunks) + 1, 64), dtype=np.int32)
    arrays = make_prompt_arrays(chunks, num_tokens, num_chunks, state, len(chunks), 16)
    assert sum(map(len, arrays)) == PromptArrays.total_size(num_tokens, num_chunks)
    tiled = rows_of(arrays.tiles, arrays.borders)
    assert sorted(row for rows in tiled for row in rows) == list(range(sum(LENS)))
    sampled_rows = arrays.sample_rows[: sum(samples)].tolist()
    assert sampled_rows == [n - 1 for n, sampled in zip(np.cumsum(LENS), samples, strict=True) if sampled]
    held = rows_of(arrays.sample_tiles, arrays.borders)
    assert len(held) == sum(samples) and all(row in rows for row, rows in zip(sampled_rows, held, strict=True))
    assert set(held) <= set(tiled)
