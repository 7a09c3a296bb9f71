"""Backends against dense attention, on a cache where whatever is not a sequence's own is NaN."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.attention.backend import AttentionBackend, AttentionLayer, AttentionSetup
from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.attention.metadata import StepMetadata
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.attention.triton import DecodeVariant, TritonBackend
from nanovllm.kernels.attention.options import PLAIN, AttentionOptions
from nanovllm.kernels.qkv_rope_store import KVPages
from tests.test_kernels import (
    DEVICE,
    DTYPES,
    check_attention,
    chunk_rows,
    dense_attention,
    new_slots,
    paged,
    randn,
    with_shared_prefixes,
)


def step_of(
    tables: list[torch.Tensor], seq_lens: torch.Tensor, lens: list[int], query_lens: list[int], variant: Any = None,
    *, per_row: int = 1,
) -> StepMetadata:  # fmt: skip
    """Decode rows of `per_row` queries, then chunks of `query_lens`; tables: of each group of layers."""
    chunks, num_decodes = chunk_rows(tables[0], seq_lens, query_lens), len(lens) - len(query_lens)
    positions = seq_lens[:num_decodes, None] - per_row + torch.arange(per_row, dtype=torch.int32, device=DEVICE)
    return StepMetadata(
        num_decodes=num_decodes, slot_mappings=[new_slots(table, lens, 16)[:0] for table in tables],
        block_tables=tables, seq_lens=seq_lens, cu_seqlens_q=chunks.cu_seqlens_q, query_tiles=chunks.tiles,
        sample_tiles=chunks.tiles, seq_lens_host=lens, query_lens_host=query_lens, variant=variant,
        row_positions=positions.flatten() if per_row > 1 else None,
    )  # fmt: skip


def with_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        properties = SimpleNamespace(multi_processor_count=8)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


LAYERS = (PLAIN, AttentionOptions(softcap=0.7), AttentionOptions(window=20), AttentionOptions(window=40, softcap=0.7))
"""Those without a window first."""


@pytest.mark.parametrize("kind", ["sdpa", "triton"])
def test_layers_of_one_model_differ(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that share a prefix, which only layers without a window attend to together; then a chunk."""
    lens, cache, tables, seq_lens, _ = with_shared_prefixes(monkeypatch, 16, 2, 16, torch.float32, 8)
    num_decodes, num_queries = len(lens) - 1, 9
    query_lens = [*[1] * num_decodes, num_queries]
    backend: AttentionBackend = SdpaBackend(16)
    variant = None
    if kind == "triton":
        with_multiprocessors(monkeypatch)
        device = torch.device(DEVICE)
        specs = [Paged(2, 16, 16, one.window, torch.float32) for one in LAYERS]
        backend = TritonBackend(
            AttentionSetup(device, torch.float32, 16, 4, specs, num_slots=num_decodes, shares_prefixes=True)
        )
        slots = np.arange(num_decodes, dtype=np.int32)
        variant, array = backend.plan_host(slots, seq_lens.cpu().numpy()[:-1] - 1, tables.cpu().numpy()[:-1])
        backend.plan_buffer.copy_(torch.from_numpy(array))
        assert isinstance(variant, DecodeVariant) and variant.uses_cascade
    # Each kind of layers has blocks of its own: the same tokens, in another order where there is a window.
    order = torch.randperm(cache.shape[1], generator=torch.Generator().manual_seed(0)).to(DEVICE)
    other_cache, other_tables = torch.empty_like(cache), order[tables.long()].int()
    other_cache[:, order] = cache
    groups = [[options for options in LAYERS if (options.window is None) == is_full] for is_full in (True, False)]
    metadata = step_of([tables, other_tables], seq_lens, lens, [num_queries], variant)
    backend.plan(metadata)
    query = randn(sum(query_lens), 4, 16)
    for number, (group, pages) in enumerate(zip(groups, (cache, other_cache), strict=True)):
        tables_of_group = metadata.block_tables[number]
        rows = list(zip(query.split(query_lens), tables_of_group, lens, strict=True))
        exact = [torch.cat([dense_attention(q, pages, table, n, one) for q, table, n in rows]) for one in group]
        if group[0].window is not None:
            _forget_all_but(pages, rows, 40)
        for options, expected in zip(group, exact, strict=True):
            layer = AttentionLayer(KVPages(pages[0], pages[1]), 16**-0.5, options, number)
            out = backend.run(query, layer, metadata)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["sdpa", "triton"])
@pytest.mark.parametrize("per_row", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES if DEVICE == "cuda" else DTYPES[-1:])
def test_heads_of_layers_differ(kind: str, per_row: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows, the longest one split, then a chunk: in layers of one model, with and without a window."""
    lens, num_queries, num_heads = [3, 40, 700 if DEVICE == "cuda" else 130, 50], 9, 4
    query_lens = [*[per_row] * 3, num_queries]
    # With 192 and 128 elements (DeepSeek) a padded key and value are no power of two together.
    layers = [(2, 24, 24, None), (1, 80, 48, 20), (1, 80, 48, None), (1, 192, 128, None), (1, 512, 512, 60)]
    specs = [Paged(*layer, dtype) for layer in layers]
    backend: AttentionBackend = SdpaBackend(16)
    if kind == "triton":
        with_multiprocessors(monkeypatch)
        backend = TritonBackend(
            AttentionSetup(torch.device(DEVICE), dtype, 16, num_heads, specs, num_slots=3, shares_prefixes=True)
        )
    for spec in specs:
        backend.check(spec, PLAIN)
    cache, tables, seq_lens = paged(lens, 16, 2, 512, dtype)
    slots = np.arange(3, dtype=np.int32)
    variant, _ = backend.plan_host(slots, seq_lens.cpu().numpy()[:3] - 1, tables.cpu().numpy()[:3])
    metadata = step_of([tables], seq_lens, lens, [num_queries], variant, per_row=per_row)
    backend.plan(metadata)
    for spec in specs:
        keys, values = cache[0, :, :, : spec.num_kv_heads], cache[1, :, :, : spec.num_kv_heads]
        pages = keys[..., : spec.key_size].contiguous(), values[..., : spec.value_size].contiguous()
        query, options = randn(sum(query_lens), num_heads, spec.key_size, dtype=dtype), AttentionOptions(spec.window)
        out = backend.run(query, AttentionLayer(KVPages(*pages), spec.key_size**-0.5, options), metadata)
        assert isinstance(out, torch.Tensor)
        check_attention(out, query, pages, tables, query_lens, lens, options)


def _forget_all_but(cache: torch.Tensor, rows: list[tuple[torch.Tensor, torch.Tensor, int]], window: int) -> None:
    """Overwrite what is before the windows of all rows of queries, block tables and lengths, as others' keys may."""
    is_seen = torch.zeros(cache.shape[1:3], dtype=torch.bool, device=DEVICE)
    for query, table, length in rows:
        positions = torch.arange(max(0, length - len(query) + 1 - window), length, device=DEVICE)
        is_seen[table[positions // 16].long(), positions % 16] = True
    cache[:, ~is_seen] = float("nan")
