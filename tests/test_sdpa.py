"""The sdpa backend against dense attention, on a cache where whatever is not a sequence's own is NaN."""

from __future__ import annotations

import pytest
import torch

from nanovllm.attention import sdpa
from nanovllm.attention.metadata import AttentionMetadata
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.kernels.qkv_rope_store import KVPages
from tests.test_kernels import DEVICE, DTYPES, check_error, dense_attention, paged, randn


# 20 queries of 30 take three pieces, the last of which is not full; 8 take one, and 9 one more of a single query.
@pytest.mark.parametrize(("max_queries", "most_pieces"), [(8, 1 + 1 + 2 + 3), (1024, 1 + 1 + 1 + 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows_and_chunks(
    dtype: torch.dtype, max_queries: int, most_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "_MAX_QUERIES", max_queries)
    torch.manual_seed(0)
    # Decode rows of contexts that are padded to one length, then chunks: (queries, metadata).
    pairs = [(1, 1), (1, 33), (1, 17), (8, 8), (9, 40), (20, 30)]
    query_lens, lens = [q for q, _ in pairs], [n for _, n in pairs]
    cache, tables, seq_lens = paged(lens, 16, 2, 32, dtype)
    query = randn(sum(query_lens), 6, 32, dtype=dtype)
    nothing = torch.empty(0, dtype=torch.int32, device=DEVICE)
    metadata = AttentionMetadata(
        num_decodes=3, slot_mapping=nothing, block_tables=tables, seq_lens=seq_lens, cu_seqlens_q=nothing,
        query_tiles=nothing, sample_tiles=nothing, seq_lens_host=lens, query_lens_host=query_lens[3:],
    )  # fmt: skip
    backend = SdpaBackend(16)
    metadata.plan = backend.plan(metadata)
    assert len(metadata.plan) == most_pieces
    out = backend.forward(query, KVPages(cache[0], cache[1]), metadata, 32**-0.5)
    pieces = query.split(query_lens)
    exact = torch.cat([dense_attention(q.float(), cache, tables[i], lens[i]) for i, q in enumerate(pieces)])
    same = torch.cat([dense_attention(q, cache, tables[i], lens[i]) for i, q in enumerate(pieces)])
    check_error(out, same, exact)
