"""Decode attention over pages in Triton, for any GPU: one program computes one split of a context for one KV head.

Contexts are divided into splits, so that one long context keeps the whole device busy (split-KV). Their numbers are
computed on the device, such that no split is longer than an even share of all tiles: a CUDA graph stays valid as
contexts grow. Those with the longest splits come first, so that the last programs to run are short. Outputs are merged
by their log-sum-exp (Flash-Decoding, Dao et al. 2023). The plan is Hopper's too (`hopper_decode`).

A row may have several tokens, the newest and drafts: a program reads keys once for them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.attention.cascade_attention import CascadeGroups, CascadePlan, cascade_attention, plan_cascade
from nanovllm.kernels.attention.online_softmax import LOG2E_IN_KERNEL, attend_tile, beside_keys, by_head, load_heads
from nanovllm.kernels.attention.options import PLAIN, AttentionOptions, padded_size
from nanovllm.kernels.fast_math import exp2, log2
from nanovllm.kernels.qkv_rope_store import KVPages

_BLOCK = 16
"""Sequences per program of the splitting kernel."""
_CHUNK = 512
"""Sequences that these are compared with at once: of 2,048 not all would fit into registers."""
_MERGED_AT_ONCE = 16
_MOST_QUERIES, _MOST_FLOAT32_QUERIES = 64, 16
"""Query heads of a program, of 128 elements, in all tokens of a row: its accumulator fits into registers."""


@jit
def _load_old(seq_lens_ptr, prefix_lens_ptr, seqs, num_seqs):
    mask = seqs < num_seqs
    old = tl.load(seq_lens_ptr + seqs, mask=mask, other=1) - 1
    if prefix_lens_ptr is not None:
        old -= tl.load(prefix_lens_ptr + seqs, mask=mask, other=0)
    return old


@jit(do_not_specialize=["num_seqs", "shares", "num_splits"], unaligned=["seq_lens_ptr", "prefix_lens_ptr"])
def _split_contexts_kernel(
    seq_lens_ptr, prefix_lens_ptr, splits_ptr, of_seqs_ptr, num_seqs, shares, num_splits,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    offsets, own = tl.arange(0, CHUNK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_own = own < num_seqs
    wait_for_previous(PDL)
    own_old = _load_old(seq_lens_ptr, prefix_lens_ptr, own, num_seqs)
    own_tiles = tl.cdiv(own_old, TILE)
    num_tiles = 0
    for chunk in range(0, num_seqs, CHUNK):
        seqs = chunk + offsets
        old = _load_old(seq_lens_ptr, prefix_lens_ptr, seqs, num_seqs)
        num_tiles += tl.sum(tl.where(seqs < num_seqs, tl.maximum(tl.cdiv(old, TILE), 1), 0), axis=0)
    longest = tl.cdiv(num_tiles, shares)
    own_counts = tl.where(is_own, tl.cdiv(tl.maximum(own_tiles, 1), longest), 0)
    own_sizes = (own_old // tl.maximum(own_counts, 1))[:, None]
    # A context's first split is the number of splits that are ordered before it.
    first = tl.zeros([BLOCK], dtype=tl.int32)
    num_used = 0
    for chunk in range(0, num_seqs, CHUNK):
        seqs = chunk + offsets
        old = _load_old(seq_lens_ptr, prefix_lens_ptr, seqs, num_seqs)
        counts = tl.cdiv(tl.maximum(tl.cdiv(old, TILE), 1), longest)
        sizes = (old // counts)[None, :]
        counts = tl.where(seqs < num_seqs, counts, 0)
        is_before = (sizes > own_sizes) | ((sizes == own_sizes) & (seqs[None, :] < own[:, None]))
        first += tl.sum(tl.where(is_before, counts[None, :], 0), axis=1)
        num_used += tl.sum(counts, axis=0)
    tl.store(of_seqs_ptr + 2 * own, first, mask=is_own)
    tl.store(of_seqs_ptr + 2 * own + 1, own_counts, mask=is_own)
    for number in range(tl.max(own_counts, axis=0)):
        mask = number < own_counts
        start = number * own_tiles // tl.maximum(own_counts, 1)
        end = (number + 1) * own_tiles // tl.maximum(own_counts, 1)
        split_ptrs = splits_ptr + 4 * (first + number)
        tl.store(split_ptrs, own, mask=mask)
        tl.store(split_ptrs + 1, start, mask=mask)
        tl.store(split_ptrs + 2, end - start, mask=mask)
        tl.store(split_ptrs + 3, own_old, mask=mask)
    for split in range(num_used + tl.program_id(0), num_splits, tl.num_programs(0)):
        tl.store(splits_ptr + 4 * split + tl.arange(0, 4), -1)


def split_contexts(
    seq_lens: torch.Tensor, tile: int, shares: int, prefix_lens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split contexts, ordered by the mean length of their splits, longest first; ties keep their order.

    Returns `splits` and `of_seqs` of `DecodePlan`.

    Args:
        seq_lens: [num_seqs] int32, at least 1 each; a context's last token, the new one, is in no tile.
        tile: tokens per tile.
        shares: a split has at most ceil(tiles of all contexts / shares) tiles; there are num_seqs + shares - 1 splits.
        prefix_lens: [num_seqs or more] int32; leading tokens of each context to leave out, fewer than it has.
    """
    num_seqs = len(seq_lens)
    splits, of_seqs = seq_lens.new_empty(num_seqs + shares - 1, 4), seq_lens.new_empty(num_seqs, 2)
    _split_contexts_kernel[(triton.cdiv(num_seqs, _BLOCK),)](
        seq_lens, prefix_lens, splits, of_seqs, num_seqs, shares, len(splits),
        TILE=tile, CHUNK=_CHUNK, BLOCK=_BLOCK, **pdl_options(seq_lens.device),
    )  # fmt: skip
    return splits, of_seqs


@jit
def merge_states(lse, outputs, acc, top, total):
    """Fold normalised outputs [N, HEAD_DIM] with base-2 log-sum-exp lse [N] (-inf: none) into acc [HEAD_DIM]."""
    new_top = tl.maximum(top, tl.max(lse, axis=0))
    weights = exp2(lse - new_top)
    correction = exp2(top - new_top)
    acc = acc * correction + tl.sum(outputs * weights[:, None], axis=0)
    return acc, new_top, total * correction + tl.sum(weights, axis=0)


@jit(unaligned=["of_seqs_ptr"])
def _merge_splits_kernel(
    out_ptr, partial_ptr, lse_ptr, of_seqs_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(of_seqs_ptr + 2 * seq)
    count = tl.load(of_seqs_ptr + 2 * seq + 1)
    wait_for_previous(PDL)
    if count > 1:
        dims = tl.arange(0, PADDED)
        acc = tl.zeros([PADDED], dtype=tl.float32)
        top = -float("inf")
        total = 0.0
        for start in range(0, count, AT_ONCE):
            number = start + tl.arange(0, AT_ONCE)
            mask = number < count
            rows = (first + number) * HEADS + head
            lse = tl.load(lse_ptr + rows, mask=mask, other=-float("inf"))
            partial_ptrs = partial_ptr + rows[:, None] * HEAD_DIM + dims[None, :]
            partial = load_heads(partial_ptrs, mask[:, None], dims[None, :], HEAD_DIM, PADDED)
            acc, top, total = merge_states(lse, partial, acc, top, total)
        out_ptrs = out_ptr + (seq * HEADS + head) * HEAD_DIM + dims
        tl.store(out_ptrs, acc / total, mask=None if PADDED == HEAD_DIM else dims < HEAD_DIM)


def merge_splits(out: torch.Tensor, partial: tuple[torch.Tensor, torch.Tensor], of_seqs: torch.Tensor) -> None:
    """Merge the outputs of contexts with several splits into `out`; rows of other contexts are left unchanged.

    `partial`: see `DecodePlan`; `of_seqs`: see there, written before the kernel queued last (see `pdl_options`).
    """
    outputs, lse = partial
    _, num_heads, head_dim = outputs.shape
    _merge_splits_kernel[(len(of_seqs), num_heads)](
        out, outputs, lse, of_seqs,
        HEADS=num_heads, HEAD_DIM=head_dim, PADDED=triton.next_power_of_2(head_dim), AT_ONCE=_MERGED_AT_ONCE,
        num_warps=1, **pdl_options(of_seqs.device),
    )  # fmt: skip


@dataclass
class DecodePlan:
    """The splits and buffers, shared by all layers of a step.

    Attributes:
        tile: tokens per tile.
        splits: of contexts without their shared prefixes, [num_splits, 4] int32; sequence (-1: unused), first tile,
            number of tiles, and the tokens in all the context's tiles, which do not have the new one.
        of_seqs: [num_seqs, 2] int32; each sequence's first split and number of splits, which are consecutive.
        partial: outputs of splits to be merged, [num_splits, num_queries * num_heads, head_dim] float32, and their
            base-2 log-sum-exp, without the last dimension; None if every context has a single split.
        positions: [num_seqs * num_queries] int32; of rows of several queries; None if each has one, the last.
        prefix: plan of the cascade attention over shared prefixes; None without.
        first_keys: [num_seqs] int32; of a sliding window, the first key of each context's first tile; None without.
    """

    tile: int
    splits: torch.Tensor
    of_seqs: torch.Tensor
    partial: tuple[torch.Tensor, torch.Tensor] | None
    positions: torch.Tensor | None
    prefix: CascadePlan | None
    first_keys: torch.Tensor | None = None


def plan_decode(
    seq_lens: torch.Tensor, num_heads: int, num_kv_heads: int, value_dim: int, tile: int, shares: int,
    *, shared: CascadeGroups | None = None, window: int | None = None, positions: torch.Tensor | None = None,
) -> DecodePlan:  # fmt: skip
    """Plan the attention of one step for all layers that attend alike.

    Args:
        seq_lens, tile, shares: see `split_contexts`, which splits for each KV head; with 1 share nothing is merged.
        num_heads, num_kv_heads, value_dim: query heads, KV heads, and the elements of a value.
        shared: shared prefixes for cascade attention; every sequence has at least one token after its prefix.
        window: see `AttentionOptions`; not with shared prefixes.
        positions: of the queries of each sequence, see `DecodePlan`; only without shared prefixes.
    """
    assert shared is None or (window is None and positions is None)
    num_queries, first_keys = 1 if positions is None else len(positions) // len(seq_lens), None
    if window is not None:
        first_keys = (seq_lens - (window + num_queries - 1)).clamp(min=0) // tile * tile
    splits, of_seqs = split_contexts(seq_lens, tile, shares, first_keys if shared is None else shared.rows[0])
    prefix = None if shared is None else plan_cascade(shared, num_heads, num_heads // num_kv_heads, value_dim)
    partial = None
    if shares > 1:
        outputs = seq_lens.new_empty(len(splits), num_queries * num_heads, value_dim, dtype=torch.float32)
        partial = outputs, torch.empty_like(outputs[:, :, 0])
    return DecodePlan(tile, splits, of_seqs, partial, positions, prefix, first_keys)


@jit
def _fold_rows(partial_ptr, lse_ptr, rows, mask, dims, acc, row_max, row_sum, VALUE_DIM: tl.constexpr):
    """Fold one output of a shared prefix for each query head, at `rows`, into the softmax (acc, row_max, row_sum)."""
    lse = tl.load(lse_ptr + rows, mask=mask, other=0.0)
    output_ptrs = partial_ptr + rows[:, None] * VALUE_DIM + dims[None, :]
    output = load_heads(output_ptrs, mask[:, None], dims[None, :], VALUE_DIM, acc.shape[1])
    new_max = tl.maximum(row_max, lse)
    weight, correction = exp2(lse - new_max), exp2(row_max - new_max)
    return acc * correction[:, None] + output * weight[:, None], new_max, row_sum * correction + weight


@jit
def _locate_queries(
    seq, head, positions_ptr, GROUP: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Return of a program's queries their token in the row, its position, their head, and a mask; head: of keys."""
    group = tl.arange(0, PADDED)
    if QUERIES == 1:
        number, own, mask, heads = tl.zeros_like(group), group, group < GROUP, head * GROUP + group
    else:
        number = tl.program_id(2) * AT_ONCE + group // GROUP
        mask, heads = (group < AT_ONCE * GROUP) & (number < QUERIES), head * GROUP + group % GROUP
        own = tl.load(positions_ptr + seq * QUERIES + number, mask=mask, other=0)
    return number, own, heads, mask


@jit
def _see(positions, end, last, own, window, QUERIES: tl.constexpr):
    """Return which keys any query sees, and which each one sees; last, own: positions of the last one, and of each."""
    seen = positions < end
    if window is not None:
        seen = seen & (positions > last - window - (QUERIES - 1))
    sees = seen[None, :]
    if QUERIES > 1:
        sees = sees & (positions[None, :] <= own[:, None])
        if window is not None:
            sees = sees & (positions[None, :] > own[:, None] - window)
    return seen, sees


@jit(do_not_specialize=["table_size", "prefix_rows_stride"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, block_tables_ptr, splits_ptr,
    positions_ptr, prefix_rows_ptr, prefix_partial_ptr, prefix_lse_ptr, sinks_ptr, cap_scale, scale, window,
    q_stride, table_stride, table_size, prefix_rows_stride, prefix_place_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, HAS_PREFIX: tl.constexpr, PDL: tl.constexpr,
    k_scale_ptr=None, v_scale_ptr=None, NATIVE: tl.constexpr = False,
    QUERIES: tl.constexpr = 1, AT_ONCE: tl.constexpr = 1,
):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(1)
    scale = by_head(scale, k_scale_ptr, head) if cap_scale is None else scale
    cap_scale = None if cap_scale is None else by_head(cap_scale, k_scale_ptr, head)
    split_ptr = splits_ptr + 4 * split
    seq = tl.load(split_ptr).to(tl.int64)
    if seq >= 0:
        first_tile, num_tiles, old_len = tl.load(split_ptr + 1), tl.load(split_ptr + 2), tl.load(split_ptr + 3)
        first_key = 0
        if HAS_PREFIX or window is not None:
            first_key = tl.load(prefix_rows_ptr + seq)
        if HAS_PREFIX:
            place = tl.load(prefix_rows_ptr + prefix_rows_stride + seq)
            num_parts = tl.load(prefix_rows_ptr + 2 * prefix_rows_stride + seq)
        # The last split adds the last token, which no tile has.
        tiles_end = (first_tile + num_tiles) * TILE
        is_last = tiles_end >= old_len
        end = first_key + tl.where(is_last, old_len + 1, tiles_end)
        # Some program has a split, so the kernel cannot end before the previous one, although others do not wait.
        wait_for_previous(PDL)
        number, own, heads, mask = _locate_queries(seq, head, positions_ptr, GROUP, GROUP_PADDED, QUERIES, AT_ONCE)
        key_dims, dims = tl.arange(0, KEY_PADDED), tl.arange(0, VALUE_PADDED)
        tokens = (seq * QUERIES + number)[:, None]
        query_ptrs = q_ptr + tokens * q_stride + heads[:, None] * KEY_DIM + key_dims[None, :]
        query = beside_keys(load_heads(query_ptrs, mask[:, None], key_dims[None, :], KEY_DIM, KEY_PADDED), k_ptr)
        acc = tl.zeros([GROUP_PADDED, VALUE_PADDED], dtype=tl.float32)
        row_max = tl.full([GROUP_PADDED], -float("inf"), dtype=tl.float32)
        row_sum = tl.zeros([GROUP_PADDED], dtype=tl.float32)
        if sinks_ptr is not None:
            sinks = tl.load(sinks_ptr + heads, mask=mask, other=0.0).to(tl.float32) * LOG2E_IN_KERNEL
            row_max = tl.where(first_tile == 0, sinks, row_max)
            row_sum = tl.where(first_tile == 0, 1.0, row_sum)
        if HAS_PREFIX and first_tile == 0:
            for part in range(num_parts):
                rows = (place + part * prefix_place_stride) * (KV_HEADS * GROUP) + heads
                acc, row_max, row_sum = _fold_rows(
                    prefix_partial_ptr, prefix_lse_ptr, rows, mask, dims, acc, row_max, row_sum, VALUE_DIM
                )
        table_ptr = block_tables_ptr + seq * table_stride
        for start in range(first_key + first_tile * TILE, end, TILE):
            positions = start + tl.arange(0, TILE)
            seen, sees = _see(positions, end, first_key + old_len, own, window, QUERIES)
            acc, row_max, row_sum = attend_tile(
                query, (k_ptr + head * KEY_DIM, v_ptr + head * VALUE_DIM, table_ptr, table_size,
                        KV_HEADS * KEY_DIM, KV_HEADS * VALUE_DIM), start, seen, sees, scale, cap_scale,
                (acc, row_max, row_sum), BLOCK_SIZE, KEY_DIM, VALUE_DIM, TILE, NATIVE,
            )  # fmt: skip
        if QUERIES > 1:
            # A query may see no token of a split.
            row_sum = tl.where(row_sum > 0, row_sum, 1.0)
        out = by_head(acc / row_sum[:, None], v_scale_ptr, head)
        rows = number * (KV_HEADS * GROUP) + heads
        places = rows[:, None] * VALUE_DIM + dims[None, :]
        out_mask = mask[:, None]
        if VALUE_DIM != VALUE_PADDED:
            out_mask = out_mask & (dims < VALUE_DIM)[None, :]
        if WHOLE or (first_tile == 0 and is_last):
            tl.store(out_ptr + seq * (QUERIES * KV_HEADS * GROUP * VALUE_DIM) + places, out, mask=out_mask)
        else:
            row = split.to(tl.int64) * (QUERIES * KV_HEADS * GROUP)
            tl.store(partial_ptr + row * VALUE_DIM + places, out, mask=out_mask)
            tl.store(lse_ptr + row + rows, row_max + log2(row_sum), mask=mask)


def decode_attention(
    query: torch.Tensor, pages: KVPages, out: torch.Tensor, block_tables: torch.Tensor, plan: DecodePlan, scale: float,
    options: AttentionOptions = PLAIN,
) -> None:  # fmt: skip
    """Compute attention of the last tokens of each sequence over its whole context, into `out`.

    query: [num_seqs * num_queries, num_heads, key_dim], rows contiguous, a sequence's in order; block_tables:
    [num_seqs, max_blocks] int32; plan: from the context lengths, each including the new tokens, the window, and the
    positions of queries, written before the kernel queued last (see `pdl_options`); scale: factor of the scores.
    """
    _, num_heads, key_dim = query.shape
    _, block_size, num_kv_heads, value_dim = pages.v_cache.shape
    group, num_queries = num_heads // num_kv_heads, len(query) // len(block_tables)
    key_padded, value_padded = padded_size(key_dim), padded_size(value_dim)
    most = _MOST_FLOAT32_QUERIES if query.element_size() == 4 else _MOST_QUERIES
    at_once = min(num_queries, max(1, most * 128 // max(128, key_padded, value_padded) // group))
    # With four, e4m3 beside 32 bits spills 160 to 308 bytes a thread (Triton 3.9, 8.0).
    num_warps = 8 if query.element_size() == 4 and pages.scales is not None else 4
    prefix, splits = plan.prefix, plan.splits
    partial, lse = plan.partial or (None, None)
    prefix_rows, prefix_partial, prefix_lse = plan.first_keys, None, None
    if prefix is not None:
        cascade_attention(query, pages, block_tables, prefix, scale, options)
        prefix_rows, prefix_partial, prefix_lse = prefix.shared.rows, prefix.partial, prefix.lse
    cap_scale, scale = options.score_scales(scale)
    k_cache, v_cache = pages.stored
    _decode_kernel[(num_kv_heads, len(splits), triton.cdiv(num_queries, at_once))](
        query, k_cache, v_cache, out, partial, lse, block_tables, splits,
        plan.positions, prefix_rows, prefix_partial, prefix_lse,
        options.sinks, cap_scale, scale, options.window,
        query.stride(0), block_tables.stride(0), block_tables.shape[1],
        0 if prefix_rows is None else prefix_rows.stride(0), 0 if prefix is None else prefix.rows_per_item,
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(at_once * group)),
        KEY_DIM=key_dim, KEY_PADDED=key_padded, VALUE_DIM=value_dim, VALUE_PADDED=value_padded,
        BLOCK_SIZE=block_size, TILE=plan.tile, WHOLE=plan.partial is None, HAS_PREFIX=prefix is not None,
        QUERIES=num_queries, AT_ONCE=at_once, num_warps=num_warps, num_stages=2, **pdl_options(query.device),
        **pages.scaling,
    )  # fmt: skip
    if plan.partial is not None:
        merge_splits(out, plan.partial, plan.of_seqs)
