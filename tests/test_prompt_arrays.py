"""Prompt chunks as arrays."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from nanovllm.attention import AttentionSetup, make_backend
from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.kernels.attention.prefill_attention import QUERY_TILE
from nanovllm.runner.batch import BatchBuilder, PromptLayout, StepShape
from nanovllm.runner.messages import Chunk, KeptState, NewRequest, Rows, ScheduledBatch

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
    layout = PromptLayout(state, block_size=16)
    arrays = layout.arrays(chunks, num_tokens, num_chunks)
    assert [len(array) for array in arrays] == [len(array) for array in layout.arrays([], num_tokens, num_chunks)]
    tiled = rows_of(arrays.tiles, arrays.cu_seqlens_q)
    assert sorted(row for rows in tiled for row in rows) == list(range(sum(LENS)))
    sampled_rows = arrays.sample_indices[: sum(samples)].tolist()
    assert sampled_rows == [n - 1 for n, sampled in zip(np.cumsum(LENS), samples, strict=True) if sampled]
    held = rows_of(arrays.sample_tiles, arrays.cu_seqlens_q)
    assert len(held) == sum(samples) and all(row in rows for row, rows in zip(sampled_rows, held, strict=True))
    assert set(held) <= set(tiled)


def test_padding_alone_and_nothing_at_all() -> None:
    state = np.zeros((3, 1, 2), dtype=np.int32)
    layout = PromptLayout(state, block_size=16)
    arrays = layout.arrays([], 4, 2)
    assert {name: array.tolist() for name, array in arrays._asdict().items()} == {
        "token_ids": [0] * 4, "positions": [0] * 4, "slot_mapping": [-1] * 4,
        "slots": [2, 2], "seq_lens": [1, 1],
        "cu_seqlens_q": [0, 0, 0], "sample_indices": [0, 0], "sample_slots": [2, 2], "tiles": [-1, -1, 0, 0],
        "sample_tiles": [-1, -1, 0, 0], "successors": [], "state_tiles": [], "state_chunks": [], "kept_states": [],
    }  # fmt: skip
    assert all(array.dtype == np.int32 and not len(array) for array in layout.arrays([], 0, 0))


def test_states_are_kept_at_ends_of_tiles() -> None:
    """A chunk of 150 tokens from position 10 that keeps states after 64 and 128 tokens, and a first chunk."""
    kept = [KeptState(64, [5, 6]), KeptState(128, [7, 8])]
    chunks = [
        Chunk(1, 10, array("i", [1] * 150), True, False, kept_states=kept),
        Chunk(0, 0, array("i", [2] * 3), True, True),
    ]
    layout = PromptLayout(np.zeros((3, 1, 4), dtype=np.int32), 64, num_state_blocks=2)
    found = layout.arrays(chunks, 160, 3)
    tiles = found.state_tiles.reshape(-1, 4).tolist()
    # First token, tokens, chunk, and the row of the tables that is written: the chunks' own come first.
    assert tiles[:5] == [[0, 54, 0, 3], [54, 64, 0, 4], [118, 32, 0, 0], [150, 3, 1, 1], [0, 0, 0, -1]]
    assert all(tile == [0, 0, 0, -1] for tile in tiles[5:])
    # First token, position, the row that is read, first tile, and tiles.
    assert found.state_chunks.reshape(-1, 5).tolist() == [[0, 10, 0, 0, 3], [150, 0, -1, 3, 1], [0, 0, -1, 0, 0]]
    assert found.kept_states.tolist() == [5, 6, 7, 8, *[0] * 12]
    assert [len(array) for array in found] == [len(array) for array in layout.arrays([], 160, 3)]


def test_a_short_chunk_may_keep_two_states() -> None:
    # At a block end, and before the prompt's last token, for its other outputs.
    kept = [KeptState(64, [1]), KeptState(65, [2])]
    chunk = Chunk(0, 63, array("i", [1] * 3), True, True, kept_states=kept)
    found = PromptLayout(np.zeros((2, 1, 4), dtype=np.int32), 64, num_state_blocks=1).arrays([chunk], 3, 1)
    assert found.kept_states.tolist() == [1, 2]
    assert found.state_tiles.reshape(-1, 4).tolist()[:3] == [[0, 1, 0, 1], [1, 1, 0, 2], [2, 1, 0, 0]]


def test_padding_has_no_state() -> None:
    specs = [Paged(2, 32, 32, None, torch.float32)]
    backend = make_backend("sdpa", AttentionSetup(torch.device("cpu"), torch.float32, 16, 4, specs, 4))
    builder = BatchBuilder(4, 8, 16, 64, backend, torch.device("cpu"), num_groups=2, num_state_blocks=3)
    request = NewRequest(1, [[5], [6, 7, 8]], 3, 0.0, 0)
    batch = ScheduledBatch(new_requests=[request], rows=Rows.of_one_token(np.array([1], np.int32)))
    step = builder.send(batch, StepShape(3))
    rows = builder.gather(step).metadata.state_rows
    assert rows is not None and rows.tables.tolist() == [[6, 7, 8], [-1] * 3, [-1] * 3]
