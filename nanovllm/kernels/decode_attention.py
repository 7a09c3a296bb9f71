"""Attention of single new tokens over pages, in Triton, balanced over the device whatever the contexts.

All contexts are cut into tiles, and the tiles of all sequences and KV heads, in one row, into equal pieces, one for
each program (Stream-K, Osama et al. 2023; for attention, Lean Attention, Sanovar et al. 2024). So a batch of one long
context keeps the whole device busy, a batch of uneven ones has no tail, and nothing depends on contexts but numbers on
the device: a captured graph stays valid as they grow. What more than one program has worked on is merged by its
log-sum-exp (Flash-Decoding, Dao et al. 2023).

All keys and values but those of the newest token are older than the kernel ahead. So where a program has a tile or two,
it loads its first before it waits for that kernel, and puts the newest token's in afterwards.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import gdc_launch_dependents, gdc_wait, jit, pdl_options, tl, triton
from nanovllm.kernels.decode_plan import DecodePlan, padded_seqs
from nanovllm.kernels.online_softmax import LOG2E, attend_loaded, attend_tile, tile_rows
from nanovllm.kernels.prefix_attention import prefix_attention

_MERGE_PIECES = 16


@jit
def _fold_prefix(
    partial_ptr, lse_ptr, place, stride, pieces, head, group, dims, acc, row_max, row_sum,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Fold in a shared prefix's outputs: `pieces` of them, `stride` places apart."""
    mask = group < GROUP
    for piece in range(pieces):
        rows = ((place + piece * stride) * KV_HEADS + head) * GROUP + group
        lse = tl.load(lse_ptr + rows, mask=mask, other=0.0)
        part = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask[:, None], other=0.0)
        new_max = tl.maximum(row_max, lse)
        weight, correction = tl.exp2(lse - new_max), tl.exp2(row_max - new_max)
        acc = acc * correction[:, None] + part * weight[:, None]
        row_sum = row_sum * correction + weight
        row_max = new_max
    return acc, row_max, row_sum


@jit
def _locate(tile_ends_ptr, seq, unit, KV_HEADS: tl.constexpr):
    """Where in its sequence a unit is: the sequence's tiles, the head, and the head's tile."""
    tiles_before = tl.load(tile_ends_ptr + seq - 1, mask=seq > 0, other=0)
    num_tiles = tl.load(tile_ends_ptr + seq) - tiles_before
    in_seq = unit - tiles_before * KV_HEADS
    return num_tiles, in_seq // num_tiles, in_seq % num_tiles


@jit
def _put_newest(rows, ptr, newest_row, dims, is_newest):
    """Put the newest token's row in its place, read past the L1 cache, which may hold what was there before."""
    row = tl.load(ptr + newest_row + dims, cache_modifier=".cg")
    return tl.where(is_newest[:, None], row[None, :], rows)


@jit
def _attend_early(
    query_ptrs, group_mask, k_ptr, v_ptr, table_ptr, table_size, start, newest, scale, row_stride, dims,
    acc, row_max, row_sum, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`attend_tile`, with the tile's keys and values loaded before the wait, but for the token at `newest`."""
    places = start + tl.arange(0, TILE)
    rows = tile_rows(table_ptr, table_size, start, row_stride, BLOCK_SIZE, TILE)[:, None] + dims[None, :]
    newest_block = tl.load(table_ptr + newest // BLOCK_SIZE).to(tl.int64)
    newest_row = (newest_block * BLOCK_SIZE + newest % BLOCK_SIZE) * row_stride
    is_old = (places < newest)[:, None]
    key = tl.load(k_ptr + rows, mask=is_old, other=0.0)
    value = tl.load(v_ptr + rows, mask=is_old, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    query = tl.load(query_ptrs, mask=group_mask, other=0.0)
    key = _put_newest(key, k_ptr, newest_row, dims, places == newest)
    value = _put_newest(value, v_ptr, newest_row, dims, places == newest)
    seen = (places <= newest)[None, :]
    return attend_loaded(query, tl.trans(key), value, seen, scale, acc, row_max, row_sum)


@jit
def _store_piece(
    acc, row_max, row_sum, out_ptr, partial_ptr, lse_ptr, out_row, place, is_whole, group, dims,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Store a head's output, or a piece of it in its place for the merge."""
    out = acc / row_sum[:, None]
    mask = group < GROUP
    if is_whole:
        out_ptrs = out_ptr + (out_row + group)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask[:, None])
    else:
        rows = place * GROUP + group
        tl.store(partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], out, mask=mask[:, None])
        tl.store(lse_ptr + rows, row_max + tl.log2(row_sum), mask=mask)


@jit
def _nothing(GROUP_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Output, maximum and sum of the softmax over no keys."""
    acc = tl.zeros([GROUP_PADDED, HEAD_DIM], dtype=tl.float32)
    row_max = tl.full([GROUP_PADDED], -float("inf"), dtype=tl.float32)
    return acc, row_max, tl.zeros([GROUP_PADDED], dtype=tl.float32)


@jit(do_not_specialize=["num_seqs", "table_size", "prefix_rows_stride"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, block_tables_ptr, context_lens_ptr,
    tile_ends_ptr, prefix_rows_ptr, prefix_partial_ptr, prefix_lse_ptr, scale,
    q_stride, table_stride, table_size, num_seqs, prefix_rows_stride, prefix_place_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SEQS_PADDED: tl.constexpr, HAS_PREFIX: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    seqs = tl.arange(0, SEQS_PADDED)
    unit_ends = tl.load(tile_ends_ptr + seqs, mask=seqs < num_seqs, other=2**30 // KV_HEADS) * KV_HEADS
    num_units = tl.load(tile_ends_ptr + num_seqs - 1) * KV_HEADS
    share = tl.cdiv(num_units, tl.num_programs(0))
    first_unit = program * share
    unit = first_unit
    end = tl.minimum(first_unit + share, num_units)
    seq = tl.sum((unit_ends <= unit).to(tl.int32), axis=0)
    group = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, HEAD_DIM)
    group_mask = (group < GROUP)[:, None]
    acc, row_max, row_sum = _nothing(GROUP_PADDED, HEAD_DIM)
    num_done = 0
    # Some program has work, and so the kernel does not end before the one ahead.
    if EARLY and unit < end:
        _, head, tile = _locate(tile_ends_ptr, seq, unit, KV_HEADS)
        query_ptrs = q_ptr + seq.to(tl.int64) * q_stride + (head * GROUP + group)[:, None] * HEAD_DIM + dims[None, :]
        acc, row_max, row_sum = _attend_early(
            query_ptrs, group_mask, k_ptr + head * HEAD_DIM, v_ptr + head * HEAD_DIM,
            block_tables_ptr + seq.to(tl.int64) * table_stride, table_size, tile * TILE,
            tl.load(context_lens_ptr + seq) - 1, scale, KV_HEADS * HEAD_DIM, dims, acc, row_max, row_sum,
            BLOCK_SIZE, TILE, PDL,
        )  # fmt: skip
        num_done = 1
    while unit < end:
        # The head and tile that this unit is; then as many tiles as are left of the head or of the share.
        num_tiles, head, first_tile = _locate(tile_ends_ptr, seq, unit, KV_HEADS)
        count = tl.minimum(num_tiles - first_tile, end - unit)
        context_len = tl.load(context_lens_ptr + seq)
        first_key = 0
        if HAS_PREFIX:
            first_key = tl.load(prefix_rows_ptr + seq)
            place = tl.load(prefix_rows_ptr + prefix_rows_stride + seq)
            pieces = tl.load(prefix_rows_ptr + 2 * prefix_rows_stride + seq)
        if PDL and not EARLY:
            gdc_wait()
            gdc_launch_dependents()
        query_ptrs = q_ptr + seq.to(tl.int64) * q_stride + (head * GROUP + group)[:, None] * HEAD_DIM + dims[None, :]
        query = tl.load(query_ptrs, mask=group_mask, other=0.0)
        table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
        if HAS_PREFIX and first_tile == 0:
            acc, row_max, row_sum = _fold_prefix(
                prefix_partial_ptr, prefix_lse_ptr, place, prefix_place_stride, pieces,
                head, group, dims, acc, row_max, row_sum, KV_HEADS, GROUP, HEAD_DIM,
            )  # fmt: skip
        for tile in range(first_tile + num_done, first_tile + count):
            start = first_key + tile * TILE
            seen = start + tl.arange(0, TILE) < context_len
            acc, row_max, row_sum = attend_tile(
                query, k_ptr + head * HEAD_DIM, v_ptr + head * HEAD_DIM, table_ptr, table_size, start,
                seen, seen[None, :], scale, KV_HEADS * HEAD_DIM, acc, row_max, row_sum, BLOCK_SIZE, HEAD_DIM, TILE,
            )  # fmt: skip
        _store_piece(
            acc, row_max, row_sum, out_ptr, partial_ptr, lse_ptr, (seq.to(tl.int64) * KV_HEADS + head) * GROUP,
            2 * program + (unit > first_unit).to(tl.int32), count == num_tiles, group, dims, GROUP, HEAD_DIM,
        )  # fmt: skip
        unit += count
        seq += ((head == KV_HEADS - 1) & (first_tile + count == num_tiles)).to(tl.int32)
        acc, row_max, row_sum = _nothing(GROUP_PADDED, HEAD_DIM)
        num_done = 0


@jit(do_not_specialize=["num_seqs", "num_programs"])
def _merge_kernel(
    out_ptr, partial_ptr, lse_ptr, tile_ends_ptr, num_seqs, num_programs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    seq, query_head = tl.program_id(0), tl.program_id(1)
    tiles_before = tl.load(tile_ends_ptr + seq - 1, mask=seq > 0, other=0)
    num_tiles = tl.load(tile_ends_ptr + seq) - tiles_before
    share = tl.cdiv(tl.load(tile_ends_ptr + num_seqs - 1) * KV_HEADS, num_programs)
    first_unit = tiles_before * KV_HEADS + (query_head // GROUP) * num_tiles
    first, last = first_unit // share, (first_unit + num_tiles - 1) // share
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if first != last:
        dims = tl.arange(0, HEAD_DIM)
        acc = tl.zeros([HEAD_DIM], dtype=tl.float32)
        top = -float("inf")
        total = 0.0
        for start in range(first, last + 1, PIECES):
            programs = start + tl.arange(0, PIECES)
            mask = programs <= last
            # A program's first piece lies in its first place; only the first program here may have begun with another.
            places = 2 * programs + ((programs == first) & (first_unit > first * share)).to(tl.int32)
            rows = places * GROUP + query_head % GROUP
            lse = tl.load(lse_ptr + rows, mask=mask, other=-float("inf"))
            partial = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask[:, None], other=0.0)
            new_top = tl.maximum(top, tl.max(lse, axis=0))
            weights = tl.exp2(lse - new_top)
            correction = tl.exp2(top - new_top)
            acc = acc * correction + tl.sum(partial * weights[:, None], axis=0)
            total = total * correction + tl.sum(weights, axis=0)
            top = new_top
        row = seq.to(tl.int64) * (KV_HEADS * GROUP) + query_head
        tl.store(out_ptr + row * HEAD_DIM + dims, (acc / total).to(out_ptr.dtype.element_ty))


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    plan: DecodePlan,
    scale: float,
) -> None:
    """Attention of one new token of each sequence over all its pages, into `out`.

    Args:
        query, out: [num_seqs, num_heads, head_dim]; query's rows and all of out contiguous.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous; all but the new tokens' older
            than the kernel queued last.
        block_tables: [num_seqs, max_blocks] int32.
        context_lens: [num_seqs] int32, at least 1, the new token included.
        plan: of these context_lens; both older than the kernel queued last (see `pdl_options`).
        scale: factor of the scores.
    """
    num_seqs, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    prefix = plan.prefix
    rows = partial = lse = None
    if prefix is not None:
        prefix_attention(query, k_cache, v_cache, block_tables, prefix, scale)
        rows, partial, lse = prefix.shared.rows, prefix.partial, prefix.lse
    num_programs = len(plan.partial) // 2
    options = pdl_options(query.device)
    _decode_kernel[(num_programs,)](
        query, k_cache, v_cache, out, plan.partial, plan.lse, block_tables, context_lens,
        plan.tile_ends, rows, partial, lse, scale * LOG2E,
        query.stride(0), block_tables.stride(0), block_tables.shape[1], num_seqs,
        0 if rows is None else rows.stride(0), 0 if prefix is None else prefix.rows_per_item,
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE=plan.tile, SEQS_PADDED=padded_seqs(num_seqs),
        HAS_PREFIX=prefix is not None, EARLY=plan.early, num_warps=4, num_stages=2, **options,
    )  # fmt: skip
    _merge_kernel[(num_seqs, num_heads)](
        out, plan.partial, plan.lse, plan.tile_ends, num_seqs, num_programs,
        KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, PIECES=_MERGE_PIECES, num_warps=1, **options,
    )  # fmt: skip
