"""Attention of prompt chunks over pages in Triton: FlashAttention (Dao et al. 2022) with a block table.

Hopper has its own kernel (`hopper_prefill`), which takes about 0.7 times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nanovllm.kernels._triton import is_hopper, jit, pdl_options, tl, wait_for_previous
from nanovllm.kernels.attention.online_softmax import LOG2E_IN_KERNEL, attend_tile, beside_keys, by_head, load_heads
from nanovllm.kernels.attention.options import MAX_HEAD_SIZE, PLAIN, AttentionOptions, padded_size
from nanovllm.kernels.qkv_rope_store import KVPages

QUERY_TILE = 128
"""Tokens per query tile."""
UNALIGNED = ["block_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "tiles_ptr"]
"""Kernel arguments that point into larger tensors, whose alignment depends on the step's sizes."""
_HOPPER_WARPS = 4
"""One warpgroup; on an H200 it takes 0.7 times as long as 8 warps, although a thread spills 88 bytes."""


@dataclass(frozen=True)
class Tiles:
    """Tokens of a program's tiles, pipeline stages, and warps.

    With 4 warps for 128 elements, a thread spills 480 to 960 bytes, and with 99 KiB of shared memory only one program
    fits a multiprocessor.
    """

    queries: int
    keys: int
    num_stages: int
    num_warps: int = 8


_TILES = {128: Tiles(QUERY_TILE, 64, 3), 256: Tiles(64, 32, 2), MAX_HEAD_SIZE: Tiles(32, 16, 2)}
"""By the most elements of a head."""
_FLOAT32_TILES = {128: Tiles(32, 64, 1), 256: Tiles(16, 32, 1), MAX_HEAD_SIZE: Tiles(16, 16, 1)}
"""Without matrix instructions: with 128 queries a thread spills 1700 bytes."""


def _tiles(query: torch.Tensor, size: int) -> Tiles:
    if query.element_size() == 4:
        return next(tiles for most, tiles in _FLOAT32_TILES.items() if size <= most)
    tiles = next(tiles for most, tiles in _TILES.items() if size <= most)
    return replace(tiles, num_warps=_HOPPER_WARPS) if is_hopper(query.device) and size <= 128 else tiles


@dataclass(frozen=True)
class ChunkRows:
    """The query tokens of prompt chunks. All but the tables must be written before the kernel queued last.

    Attributes:
        block_tables: [num_seqs, max_blocks] int32.
        seq_lens: [num_seqs] int32, including the sequence's query tokens.
        cu_seqlens_q: [num_seqs + 1] int32; first query token of each sequence.
        tiles: [2 * num_tiles] int32; the sequence of each tile of QUERY_TILE query tokens (-1: no work), then the
            tile's index within its sequence. Programs start in this order.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    tiles: torch.Tensor


@jit
def _own_tile(tiles_ptr, num_tiles, PARTS: tl.constexpr):
    # Volatile, so that each call reads it again instead of keeping it in registers.
    tile = tl.load(tiles_ptr + num_tiles + tl.program_id(1) // PARTS, volatile=True)
    return tile * PARTS + tl.program_id(1) % PARTS


@jit(do_not_specialize=["table_size", "num_tiles"], unaligned=UNALIGNED)
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, block_tables_ptr, seq_lens_ptr, cu_seqlens_q_ptr, tiles_ptr,
    sinks_ptr, cap_scale, scale, window, q_stride, table_stride, table_size, num_tiles,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
    k_scale_ptr=None, v_scale_ptr=None, NATIVE: tl.constexpr = False,
):  # fmt: skip
    head = tl.program_id(0)
    scale = by_head(scale, k_scale_ptr, head // GROUP) if cap_scale is None else scale
    cap_scale = None if cap_scale is None else by_head(cap_scale, k_scale_ptr, head // GROUP)
    seq = tl.load(tiles_ptr + tl.program_id(1) // PARTS)
    tile = _own_tile(tiles_ptr, num_tiles, PARTS)
    known_seq = tl.maximum(seq, 0)
    q_start = tl.load(cu_seqlens_q_ptr + known_seq)
    q_len = tl.load(cu_seqlens_q_ptr + known_seq + 1) - q_start
    seq_len = tl.load(seq_lens_ptr + known_seq)
    wait_for_previous(PDL)
    # Parts of a sequence's last tile may have no rows.
    if seq >= 0 and tile * BLOCK_M < q_len:
        q_index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        first_position, key_dims, dims = seq_len - q_len, tl.arange(0, KEY_PADDED), tl.arange(0, VALUE_PADDED)
        q_rows = (q_start + q_index).to(tl.int64)
        q_ptrs = q_ptr + q_rows[:, None] * q_stride + head * KEY_DIM + key_dims[None, :]
        query = beside_keys(
            load_heads(q_ptrs, (q_index < q_len)[:, None], key_dims[None, :], KEY_DIM, KEY_PADDED), k_ptr
        )
        kv_head = head // GROUP
        pages = (
            k_ptr + kv_head * KEY_DIM, v_ptr + kv_head * VALUE_DIM, block_tables_ptr + seq.to(tl.int64) * table_stride,
            table_size, KV_HEADS * KEY_DIM, KV_HEADS * VALUE_DIM,
        )  # fmt: skip
        acc = tl.zeros([BLOCK_M, VALUE_PADDED], dtype=tl.float32)
        row_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        if sinks_ptr is not None:
            row_max = tl.full([BLOCK_M], 0.0, tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2E_IN_KERNEL
            row_sum += 1
        end = tl.minimum(seq_len, first_position + (tile + 1) * BLOCK_M)
        # All queries of the tile see the keys before its first query, so these need no mask.
        unmasked_end = (first_position + tile * BLOCK_M) // BLOCK_N * BLOCK_N
        unmasked_start = 0
        if window is not None:
            # Keys in the window of the tile's last query are in the windows of all its queries.
            first_key = tl.maximum(0, first_position + tile * BLOCK_M + 1 - window) // BLOCK_N * BLOCK_N
            unmasked_start = tl.cdiv(tl.maximum(0, first_position + (tile + 1) * BLOCK_M - window), BLOCK_N) * BLOCK_N
            unmasked_start = tl.minimum(unmasked_start, unmasked_end)
            for start in range(first_key, unmasked_start, BLOCK_N):
                positions = start + tl.arange(0, BLOCK_N)
                distance = (first_position + q_index)[:, None] - positions[None, :]
                # Before the window other sequences' keys may lie.
                acc, row_max, row_sum = attend_tile(
                    query, pages, start, (positions < end) & (positions > first_position + tile * BLOCK_M - window),
                    (distance >= 0) & (distance < window), scale, cap_scale, (acc, row_max, row_sum),
                    BLOCK_SIZE, KEY_DIM, VALUE_DIM, BLOCK_N, NATIVE,
                )  # fmt: skip
        for start in range(unmasked_start, unmasked_end, BLOCK_N):
            acc, row_max, row_sum = attend_tile(
                query, pages, start, None, None, scale, cap_scale, (acc, row_max, row_sum),
                BLOCK_SIZE, KEY_DIM, VALUE_DIM, BLOCK_N, NATIVE,
            )  # fmt: skip
        for start in range(unmasked_end, end, BLOCK_N):
            positions = start + tl.arange(0, BLOCK_N)
            sees = positions[None, :] <= (first_position + q_index)[:, None]
            is_own = positions < end
            if window is not None:
                sees = sees & (positions[None, :] > (first_position + q_index)[:, None] - window)
                is_own = is_own & (positions > first_position + tile * BLOCK_M - window)
            acc, row_max, row_sum = attend_tile(
                query, pages, start, is_own, sees, scale, cap_scale, (acc, row_max, row_sum),
                BLOCK_SIZE, KEY_DIM, VALUE_DIM, BLOCK_N, NATIVE,
            )  # fmt: skip
        out = by_head(acc / row_sum[:, None], v_scale_ptr, kv_head)
        # Computed again instead of kept, because the products above need all registers.
        q_index = _own_tile(tiles_ptr, num_tiles, PARTS) * BLOCK_M + tl.arange(0, BLOCK_M)
        q_rows = (q_start + q_index).to(tl.int64)
        out_mask = (q_index < q_len)[:, None]
        if VALUE_DIM != VALUE_PADDED:
            out_mask = out_mask & (dims < VALUE_DIM)[None, :]
        out_ptrs = out_ptr + q_rows[:, None] * (KV_HEADS * GROUP * VALUE_DIM) + head * VALUE_DIM + dims[None, :]
        tl.store(out_ptrs, out, mask=out_mask)


def prefill_attention(
    query: torch.Tensor, pages: KVPages, out: torch.Tensor, chunks: ChunkRows, scale: float,
    options: AttentionOptions = PLAIN,
) -> None:  # fmt: skip
    """Compute causal attention of the last tokens of each sequence over its whole context, into `out`.

    `query`: [num_tokens, num_heads, key_dim], rows contiguous; `scale`: factor of the scores.
    """
    _, num_heads, key_dim = query.shape
    _, block_size, num_kv_heads, value_dim = pages.v_cache.shape
    tables = chunks.block_tables
    key_padded, value_padded = padded_size(key_dim), padded_size(value_dim)
    k_cache, v_cache = pages.stored
    num_tiles = len(chunks.tiles) // 2
    shape = _tiles(query, max(key_padded, value_padded))
    parts = QUERY_TILE // shape.queries
    cap_scale, scale = options.score_scales(scale)
    _prefill_kernel[(num_heads, num_tiles * parts)](
        query, k_cache, v_cache, out, tables, chunks.seq_lens, chunks.cu_seqlens_q, chunks.tiles,
        options.sinks, cap_scale, scale, options.window,
        query.stride(0), tables.stride(0), tables.shape[1], num_tiles,
        KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, KEY_DIM=key_dim, KEY_PADDED=key_padded,
        VALUE_DIM=value_dim, VALUE_PADDED=value_padded, BLOCK_SIZE=block_size,
        PARTS=parts, BLOCK_M=shape.queries, BLOCK_N=shape.keys, num_warps=shape.num_warps, num_stages=shape.num_stages,
        **pdl_options(query.device), **pages.scaling,
    )  # fmt: skip
