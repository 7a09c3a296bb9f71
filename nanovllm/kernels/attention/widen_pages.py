"""Pages of e4m3 as pages of 16 bits, which live as long as the layer, for `hopper_prefill`, which reads no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.e4m3 import from_e4m3
from nanovllm.kernels.qkv_rope_store import KVPages

BLOCK_SIZE = 128
"""Tokens of a block of the pages that are made: a tile of keys of `hopper_prefill`."""
_TOKENS = 16
"""Tokens of a program."""


@dataclass(frozen=True)
class WideTables:
    """Tables of the contexts of some sequences in pages of their own, one after the other.

    `block_tables`: [num_seqs, max_blocks] int32, of blocks of BLOCK_SIZE tokens; `num_blocks`: of all sequences.
    """

    block_tables: torch.Tensor
    num_blocks: int


def plan_wide_tables(seq_lens: torch.Tensor, seq_lens_host: Sequence[int]) -> WideTables:
    """Return tables for contexts of these lengths, [num_seqs] int32, which are known on the host, too."""
    counts = [-(-length // BLOCK_SIZE) for length in seq_lens_host]
    ends = ((seq_lens + BLOCK_SIZE - 1) // BLOCK_SIZE).cumsum(0, dtype=torch.int32)
    firsts = torch.nn.functional.pad(ends[:-1], (1, 0))
    numbers = torch.arange(max(counts), dtype=torch.int32, device=seq_lens.device)
    return WideTables(firsts.unsqueeze(1) + numbers, sum(counts))


@jit
def _widen(stored_ptr, wide_ptr, scale_ptr, slot, wide_slot, num_tokens, HEADS: tl.constexpr, SIZE: tl.constexpr,
           COLUMNS: tl.constexpr, TOKENS: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    tokens, columns = tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    mask = (tokens < num_tokens)[:, None] & (columns < HEADS * SIZE)[None, :]
    offsets = tokens[:, None] * (HEADS * SIZE) + columns[None, :]
    stored = tl.load(stored_ptr + slot * (HEADS * SIZE) + offsets, mask=mask, other=0)
    scales = tl.load(scale_ptr + columns // SIZE, mask=columns < HEADS * SIZE, other=1.0)
    wide = from_e4m3(stored, tl.float16, NATIVE).to(tl.float32) * scales[None, :]
    tl.store(wide_ptr + wide_slot * (HEADS * SIZE) + offsets, wide.to(wide_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["table_stride", "wide_stride"], unaligned=["block_tables_ptr", "seq_lens_ptr"])
def _widen_pages_kernel(
    k_ptr, v_ptr, wide_k_ptr, wide_v_ptr, block_tables_ptr, seq_lens_ptr, wide_tables_ptr, table_stride, wide_stride,
    HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEY_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr, STORED_BLOCK: tl.constexpr, WIDE_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr, k_scale_ptr, v_scale_ptr, NATIVE: tl.constexpr,
):  # fmt: skip
    seq, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * TOKENS
    num_tokens = tl.load(seq_lens_ptr + seq) - first
    wait_for_previous(PDL)
    if num_tokens > 0:
        block = tl.load(block_tables_ptr + seq * table_stride + first // STORED_BLOCK).to(tl.int64)
        wide_block = tl.load(wide_tables_ptr + seq * wide_stride + first // WIDE_BLOCK).to(tl.int64)
        slot = block * STORED_BLOCK + first % STORED_BLOCK
        wide_slot = wide_block * WIDE_BLOCK + first % WIDE_BLOCK
        _widen(k_ptr, wide_k_ptr, k_scale_ptr, slot, wide_slot, num_tokens, HEADS, KEY_SIZE, KEY_COLUMNS, TOKENS,
               NATIVE)  # fmt: skip
        _widen(v_ptr, wide_v_ptr, v_scale_ptr, slot, wide_slot, num_tokens, HEADS, VALUE_SIZE, VALUE_COLUMNS, TOKENS,
               NATIVE)  # fmt: skip


def widen_pages(
    pages: KVPages, block_tables: torch.Tensor, seq_lens: torch.Tensor, wide: WideTables, dtype: torch.dtype
) -> KVPages:
    """Return pages of 16 or 32 bits with the contexts of some sequences: e4m3 times its KV head's scale, rounded once.

    `block_tables`, [num_seqs, max_blocks] int32, `seq_lens`, [num_seqs] int32, and the new tables must be written
    before the kernel queued last (see `pdl_options`). Values after a context's last token are undefined.
    """
    _, block_size, num_kv_heads, key_size = pages.k_cache.shape
    value_size = pages.v_cache.shape[3]
    keys, values = (
        torch.empty(wide.num_blocks, BLOCK_SIZE, num_kv_heads, size, dtype=dtype, device=seq_lens.device)
        for size in (key_size, value_size)
    )
    k_cache, v_cache = pages.stored
    num_seqs, max_blocks = wide.block_tables.shape
    _widen_pages_kernel[(max_blocks * BLOCK_SIZE // _TOKENS, num_seqs)](
        k_cache, v_cache, keys, values, block_tables, seq_lens, wide.block_tables,
        block_tables.stride(0), wide.block_tables.stride(0),
        HEADS=num_kv_heads, KEY_SIZE=key_size, VALUE_SIZE=value_size,
        KEY_COLUMNS=triton.next_power_of_2(num_kv_heads * key_size),
        VALUE_COLUMNS=triton.next_power_of_2(num_kv_heads * value_size),
        STORED_BLOCK=block_size, WIDE_BLOCK=BLOCK_SIZE, TOKENS=_TOKENS, num_warps=8, **pdl_options(seq_lens.device),
        **pages.scaling,
    )  # fmt: skip
    return KVPages(keys, values)
