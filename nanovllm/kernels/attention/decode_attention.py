"""Decode attention over pages in Triton, with equal work per program whatever the context lengths.

The tiles of all sequences and KV heads form one list of units, which is divided evenly among the programs
(Stream-K, Osama et al. 2023; for attention: Lean Attention, Sanovar et al. 2024). One long context keeps the whole
device busy, and uneven contexts leave no tail. The division is computed on the device, so a CUDA graph stays valid as
contexts grow. Outputs of several programs are merged by their log-sum-exp (Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import gdc_launch_dependents, gdc_wait, jit, pdl_options, tl, triton
from nanovllm.kernels.attention.cascade_attention import CascadeGroups, CascadePlan, cascade_attention, plan_cascade
from nanovllm.kernels.attention.online_softmax import LOG2E, attend_tile, merge_states
from nanovllm.kernels.fast_math import exp2, log2

_MERGED_AT_ONCE = 16


@dataclass
class DecodePlan:
    """The division of work and its buffers, shared by all layers of a step.

    Attributes:
        tile: tokens per tile.
        tile_ends: [num_seqs] int32; inclusive cumulative sum of the sequences' numbers of tiles.
        partial: [2 * num_programs, group, head_dim] float32; outputs to be merged, two entries per program.
        lse: [2 * num_programs, group] float32; their base-2 log-sum-exp.
        prefix: plan of the cascade attention over shared prefixes; None without.
    """

    tile: int
    tile_ends: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor
    prefix: CascadePlan | None


@jit
def _merge_cascade(
    partial_ptr, lse_ptr, place, stride, num_splits, head, group, dims, acc, row_max, row_sum,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Merge the `num_splits` outputs of a shared prefix, `stride` rows apart, into the running softmax."""
    mask = group < GROUP
    for split in range(num_splits):
        rows = ((place + split * stride) * KV_HEADS + head) * GROUP + group
        lse = tl.load(lse_ptr + rows, mask=mask, other=0.0)
        part = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask[:, None], other=0.0)
        new_max = tl.maximum(row_max, lse)
        weight, correction = exp2(lse - new_max), exp2(row_max - new_max)
        acc = acc * correction[:, None] + part * weight[:, None]
        row_sum = row_sum * correction + weight
        row_max = new_max
    return acc, row_max, row_sum


@jit
def _first_unit(program, num_units, num_programs):
    """Return the first unit of a program; the first programs may have one unit more than the others."""
    share = num_units // num_programs
    return program * share + tl.minimum(program, num_units - share * num_programs)


@jit
def _program_of(unit, num_units, num_programs):
    """Return the program that a unit belongs to."""
    share = num_units // num_programs
    more = num_units - share * num_programs
    is_larger = unit < more * (share + 1)
    return tl.where(is_larger, unit, unit - more) // tl.where(is_larger, share + 1, share)


@jit(do_not_specialize=["num_seqs", "table_size", "prefix_rows_stride"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, block_tables_ptr, seq_lens_ptr,
    tile_ends_ptr, prefix_rows_ptr, prefix_partial_ptr, prefix_lse_ptr, scale,
    q_stride, table_stride, table_size, num_seqs, prefix_rows_stride, prefix_place_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SEQS_PADDED: tl.constexpr, HAS_PREFIX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    seqs = tl.arange(0, SEQS_PADDED)
    unit_ends = tl.load(tile_ends_ptr + seqs, mask=seqs < num_seqs, other=2**30 // KV_HEADS) * KV_HEADS
    num_units = tl.load(tile_ends_ptr + num_seqs - 1) * KV_HEADS
    first_unit = _first_unit(program, num_units, tl.num_programs(0))
    unit = first_unit
    end = _first_unit(program + 1, num_units, tl.num_programs(0))
    seq = tl.sum((unit_ends <= unit).to(tl.int32), axis=0)
    group = tl.arange(0, GROUP_PADDED)
    dims = tl.arange(0, HEAD_DIM)
    group_mask = (group < GROUP)[:, None]
    while unit < end:
        # Units are ordered by sequence, head and tile. Take all tiles left of this head, or of this program.
        tiles_before = tl.load(tile_ends_ptr + seq - 1, mask=seq > 0, other=0)
        num_tiles = tl.load(tile_ends_ptr + seq) - tiles_before
        in_seq = unit - tiles_before * KV_HEADS
        head = in_seq // num_tiles
        first_tile = in_seq % num_tiles
        count = tl.minimum(num_tiles - first_tile, end - unit)
        seq_len = tl.load(seq_lens_ptr + seq)
        first_key = 0
        if HAS_PREFIX:
            first_key = tl.load(prefix_rows_ptr + seq)
            place = tl.load(prefix_rows_ptr + prefix_rows_stride + seq)
            num_splits = tl.load(prefix_rows_ptr + 2 * prefix_rows_stride + seq)
        # Inside the loop: at least one program has work, so the kernel cannot end before the previous one.
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        heads = head * GROUP + group
        query = tl.load(
            q_ptr + seq.to(tl.int64) * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=group_mask, other=0.0
        )
        table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
        acc = tl.zeros([GROUP_PADDED, HEAD_DIM], dtype=tl.float32)
        row_max = tl.full([GROUP_PADDED], -float("inf"), dtype=tl.float32)
        row_sum = tl.zeros([GROUP_PADDED], dtype=tl.float32)
        if HAS_PREFIX and first_tile == 0:
            acc, row_max, row_sum = _merge_cascade(
                prefix_partial_ptr, prefix_lse_ptr, place, prefix_place_stride, num_splits,
                head, group, dims, acc, row_max, row_sum, KV_HEADS, GROUP, HEAD_DIM,
            )  # fmt: skip
        for tile in range(first_tile, first_tile + count):
            start = first_key + tile * TILE
            seen = start + tl.arange(0, TILE) < seq_len
            acc, row_max, row_sum = attend_tile(
                query, k_ptr + head * HEAD_DIM, v_ptr + head * HEAD_DIM, table_ptr, table_size, start,
                seen, seen[None, :], scale, KV_HEADS * HEAD_DIM, acc, row_max, row_sum, BLOCK_SIZE, HEAD_DIM, TILE,
            )  # fmt: skip
        out = acc / row_sum[:, None]
        out_row_ptr = out_ptr + (seq.to(tl.int64) * KV_HEADS + head) * (GROUP * HEAD_DIM)
        if count == num_tiles:
            out_ptrs = out_row_ptr + group[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=group_mask)
        else:
            place = 2 * program + (unit > first_unit).to(tl.int32)
            tl.store(partial_ptr + (place * GROUP + group)[:, None] * HEAD_DIM + dims[None, :], out, mask=group_mask)
            tl.store(lse_ptr + place * GROUP + group, row_max + log2(row_sum), mask=group < GROUP)
        unit += count
        seq += (in_seq + count == num_tiles * KV_HEADS).to(tl.int32)


@jit(do_not_specialize=["num_seqs", "num_programs"])
def _merge_kernel(
    out_ptr, partial_ptr, lse_ptr, tile_ends_ptr, num_seqs, num_programs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    seq, query_head = tl.program_id(0), tl.program_id(1)
    tiles_before = tl.load(tile_ends_ptr + seq - 1, mask=seq > 0, other=0)
    num_tiles = tl.load(tile_ends_ptr + seq) - tiles_before
    num_units = tl.load(tile_ends_ptr + num_seqs - 1) * KV_HEADS
    first_unit = tiles_before * KV_HEADS + (query_head // GROUP) * num_tiles
    first = _program_of(first_unit, num_units, num_programs)
    last = _program_of(first_unit + num_tiles - 1, num_units, num_programs)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if first != last:
        dims = tl.arange(0, HEAD_DIM)
        acc = tl.zeros([HEAD_DIM], dtype=tl.float32)
        top = -float("inf")
        total = 0.0
        for start in range(first, last + 1, SPLITS):
            programs = start + tl.arange(0, SPLITS)
            mask = programs <= last
            # A program's second entry is used if it began with another head; only the first program here can have.
            in_second = (programs == first) & (first_unit > _first_unit(first, num_units, num_programs))
            places = 2 * programs + in_second.to(tl.int32)
            rows = places * GROUP + query_head % GROUP
            lse = tl.load(lse_ptr + rows, mask=mask, other=-float("inf"))
            partial = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask[:, None], other=0.0)
            acc, top, total = merge_states(lse, partial, acc, top, total)
        row = seq.to(tl.int64) * (KV_HEADS * GROUP) + query_head
        tl.store(out_ptr + row * HEAD_DIM + dims, (acc / total).to(out_ptr.dtype.element_ty))


@jit(do_not_specialize=["num_seqs"])
def _plan_kernel(
    seq_lens_ptr, prefix_lens_ptr, tile_ends_ptr, num_seqs,
    TILE: tl.constexpr, SEQS: tl.constexpr, HAS_PREFIX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    seqs = tl.arange(0, SEQS)
    mask = seqs < num_seqs
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_keys = tl.load(seq_lens_ptr + seqs, mask=mask, other=0)
    if HAS_PREFIX:
        num_keys -= tl.load(prefix_lens_ptr + seqs, mask=mask, other=0)
    tl.store(tile_ends_ptr + seqs, tl.cumsum(tl.cdiv(num_keys, TILE), axis=0), mask=mask)


def _padded(num_seqs: int) -> int:
    """Return a power of two >= num_seqs, at least 512, so that all but the largest batches share compiled kernels."""
    return max(512, triton.next_power_of_2(num_seqs))


def plan_decode(
    seq_lens: torch.Tensor,
    num_programs: int,
    tile: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    shared: CascadeGroups | None = None,
) -> DecodePlan:
    """Plan the attention of one step for all its layers.

    Args:
        seq_lens: [num_seqs] int32, at least 1 each.
        num_programs: number of programs.
        tile: tokens per tile.
        num_heads, num_kv_heads: query heads and KV heads.
        head_dim: elements per head.
        shared: shared prefixes for cascade attention; every sequence has at least one token after its prefix.
    """
    group = num_heads // num_kv_heads
    device = seq_lens.device
    tile_ends = torch.empty_like(seq_lens)
    _plan_kernel[(1,)](
        seq_lens, None if shared is None else shared.rows, tile_ends, len(seq_lens), TILE=tile,
        SEQS=_padded(len(seq_lens)), HAS_PREFIX=shared is not None, **pdl_options(device),
    )  # fmt: skip
    partial = torch.empty(2 * num_programs, group, head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(2 * num_programs, group, dtype=torch.float32, device=device)
    prefix = None if shared is None else plan_cascade(shared, num_heads, group, head_dim)
    return DecodePlan(tile, tile_ends, partial, lse, prefix)


def decode_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DecodePlan,
    scale: float,
) -> None:
    """Compute attention of one new token per sequence over its whole context, into `out`.

    Args:
        query, out: [num_seqs, num_heads, head_dim]; query's rows and all of out contiguous.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        block_tables: [num_seqs, max_blocks] int32.
        seq_lens: [num_seqs] int32, at least 1, including the new token.
        plan: from these seq_lens; both written before the kernel queued last (see `pdl_options`).
        scale: factor of the scores.
    """
    num_seqs, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    prefix = plan.prefix
    rows = partial = lse = None
    if prefix is not None:
        cascade_attention(query, k_cache, v_cache, block_tables, prefix, scale)
        rows, partial, lse = prefix.shared.rows, prefix.partial, prefix.lse
    num_programs = len(plan.partial) // 2
    options = pdl_options(query.device)
    _decode_kernel[(num_programs,)](
        query, k_cache, v_cache, out, plan.partial, plan.lse, block_tables, seq_lens,
        plan.tile_ends, rows, partial, lse, scale * LOG2E,
        query.stride(0), block_tables.stride(0), block_tables.shape[1], num_seqs,
        0 if rows is None else rows.stride(0), 0 if prefix is None else prefix.rows_per_item,
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE=plan.tile, SEQS_PADDED=_padded(num_seqs),
        HAS_PREFIX=prefix is not None, num_warps=4, num_stages=2, **options,
    )  # fmt: skip
    _merge_kernel[(num_seqs, num_heads)](
        out, plan.partial, plan.lse, plan.tile_ends, num_seqs, num_programs,
        KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, SPLITS=_MERGED_AT_ONCE, num_warps=1, **options,
    )  # fmt: skip
