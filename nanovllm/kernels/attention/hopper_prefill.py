"""Attention of prompt chunks over pages for Hopper: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).

One program per multiprocessor loops over query tiles. One warp copies tiles into shared memory by TMA; two warpgroups
each attend for half of a tile's queries, and issue the next scores' product and the previous weights' product before
the softmax, which thus overlaps with matrix products of their own and of the other one.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._gluon import (
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    kernel,
    make_barriers,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from nanovllm.kernels._triton import wait_for_previous
from nanovllm.kernels.attention.online_softmax import LOG2E
from nanovllm.kernels.attention.prefill_attention import QUERY_TILE, UNALIGNED, ChunkRows
from nanovllm.kernels.fast_math import exp2
from nanovllm.kernels.qkv_rope_store import KVPages

QUERIES = gl.constexpr(QUERY_TILE)
"""Tokens per query tile; each warpgroup takes half."""
_STAGES = gl.constexpr(2)
"""Stages for key tiles, and for value tiles. Keys and values have separate barriers, because Triton synchronises a
warpgroup before every wait but the first on one array of barriers: 282 us instead of 292."""
_CLEARED = gl.constexpr(16)
"""Granularity, in rows, of clearing values beyond the last key."""


@gluon.jit
def _find_work(item, work, HEADS: gl.constexpr, KEYS: gl.constexpr):
    """Return a query tile of a head: head, sequence, first row, rows left, its position, context length, key tiles."""
    tiles_ptr, num_tiles, cu_seqlens_q_ptr, seq_lens_ptr = work
    seq = gl.load(tiles_ptr + item // HEADS)
    tile = gl.load(tiles_ptr + num_tiles + item // HEADS)
    known_seq = gl.maximum(seq, 0)
    start = gl.load(cu_seqlens_q_ptr + known_seq)
    query_len = gl.load(cu_seqlens_q_ptr + known_seq + 1) - start
    seq_len = gl.load(seq_lens_ptr + known_seq)
    position = seq_len - query_len + tile * QUERIES
    steps = gl.cdiv(gl.minimum(seq_len, position + QUERIES), KEYS)
    steps = gl.where(seq >= 0, steps, 0)
    return item % HEADS, seq, start + tile * QUERIES, query_len - tile * QUERIES, position, seq_len, steps


@gluon.jit
def _stage(turn):
    """Return the stage of a turn, and the parity of the number of times that the stage was used before."""
    return turn % _STAGES, turn // _STAGES & 1


@gluon.jit
def _load(
    load_from, work, shared,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    q_desc, k_desc, v_desc, block_tables_ptr, table_stride = load_from
    queries, queries_full, queries_empty, ring = shared
    keys, keys_full, keys_empty, values, values_full, values_empty = ring
    KEYS: gl.constexpr = keys.shape[1]
    QUERY_BYTES: gl.constexpr = QUERIES * HEAD_DIM * 2
    TILE_BYTES: gl.constexpr = KEYS * HEAD_DIM * 2
    turn = 0
    done = 0
    for item in range(gl.program_id(0), HEADS * work[1], gl.num_programs(0)):
        head, seq, row, _left, _position, _context_len, steps = _find_work(item, work, HEADS, KEYS)
        if steps > 0:
            table_ptr = block_tables_ptr + seq.to(gl.int64) * table_stride
            mbarrier.wait(queries_empty, done & 1 ^ 1)
            mbarrier.expect(queries_full, QUERY_BYTES)
            for part in gl.static_range(2):
                q_place = [row + part * (QUERIES // 2), head * HEAD_DIM]
                tma_load(q_desc, q_place, queries_full, queries.index(part))
            done += 1
            for step in range(steps):
                key = (steps - 1 - step) * KEYS
                key_row = gl.load(table_ptr + key // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE
                place = [key_row, head // GROUP * HEAD_DIM]
                stage, used = _stage(turn)
                mbarrier.wait(keys_empty.index(stage), used ^ 1)
                mbarrier.expect(keys_full.index(stage), TILE_BYTES)
                tma_load(k_desc, place, keys_full.index(stage), keys.index(stage))
                mbarrier.wait(values_empty.index(stage), used ^ 1)
                mbarrier.expect(values_full.index(stage), TILE_BYTES)
                tma_load(v_desc, place, values_full.index(stage), values.index(stage))
                turn += 1


@gluon.constexpr_function
def _row_major(head_dim):
    return gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [4, 1], [1, 0])


@gluon.jit
def _clear_values(values, key, seq_len):
    """Zero values beyond the last key, since NaN times 0 is NaN; both warpgroups write the same, unsynchronised."""
    KEYS: gl.constexpr = values.shape[0]
    LAYOUT: gl.constexpr = _row_major(values.shape[1])
    for row in gl.static_range(0, KEYS, _CLEARED):
        if key + row + _CLEARED > seq_len:
            part = values.slice(row, _CLEARED)
            keys = key + row + gl.arange(0, _CLEARED, gl.SliceLayout(1, LAYOUT))
            part.store(gl.where((keys < seq_len)[:, None], part.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def _weigh(scores, row_max, row_sum, position, key, scale, MMA: gl.constexpr):
    """Fold scores into the online softmax; return their weights, the correction of earlier sums, maximum and sum."""
    KEYS: gl.constexpr = scores.shape[1]
    if key + KEYS > position:
        positions = position + gl.arange(0, QUERIES // 2, gl.SliceLayout(1, MMA))
        keys = key + gl.arange(0, KEYS, gl.SliceLayout(0, MMA))
        scores = gl.where(keys[None, :] <= positions[:, None], scores, -float("inf"))
    new_max = gl.maximum(row_max, gl.max(scores, axis=1) * scale)
    # A row that has seen no key yet has maximum -inf; -inf - -inf would be NaN.
    safe_max = gl.where(new_max == -float("inf"), 0.0, new_max)
    weights = exp2(scores * scale - safe_max[:, None])
    correction = exp2(row_max - safe_max)
    return weights, correction, new_max, row_sum * correction + gl.sum(weights, axis=1)


@gluon.jit
def _attend_tile(
    query, ring, turn, key, position, scale, weights, acc, row_max, row_sum, SCORES: gl.constexpr, ACC: gl.constexpr
):
    """Compute the weights of the keys of `turn`, and accumulate the previous turn's values with `weights`."""
    keys, keys_full, keys_empty, values, values_full, values_empty = ring
    key_stage, key_used = _stage(turn)
    value_stage, value_used = _stage(turn - 1)
    mbarrier.wait(keys_full.index(key_stage), key_used)
    KEYS: gl.constexpr = keys.shape[1]
    zeros = gl.zeros([QUERIES // 2, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(query, keys.index(key_stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(values_full.index(value_stage), value_used)
    acc = warpgroup_mma(weights, values.index(value_stage), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(keys_empty.index(key_stage))
    fresh, correction, row_max, row_sum = _weigh(scores, row_max, row_sum, position, key, scale, SCORES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(values_empty.index(value_stage))
    acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, ACC))[:, None]
    return gl.convert_layout(fresh.to(keys.dtype), weights.type.layout), acc, row_max, row_sum


@gluon.jit
def _attend_first_tile(query, ring, turn, key, position, seq_len, scale, SCORES: gl.constexpr, ACC: gl.constexpr):
    """Compute the weights of the last key tile, which is processed first; return them, row maxima and row sums."""
    keys, keys_full, keys_empty, values, values_full, _values_empty = ring
    ROWS: gl.constexpr = QUERIES // 2
    KEYS: gl.constexpr = keys.shape[1]
    stage, used = _stage(turn)
    if key + KEYS > seq_len:
        mbarrier.wait(values_full.index(stage), used)
        _clear_values(values.index(stage), key, seq_len)
    mbarrier.wait(keys_full.index(stage), used)
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), zeros, use_acc=False)
    mbarrier.arrive(keys_empty.index(stage))
    row_max = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    fresh, _correction, row_max, row_sum = _weigh(scores, row_max, row_sum, position, key, scale, SCORES)
    weights = gl.convert_layout(fresh.to(keys.dtype), gl.DotOperandLayout(0, ACC, 2))
    return weights, row_max, row_sum


@gluon.jit
def _store(acc, row_sum, out_ptr, head, row, left, HEADS: gl.constexpr, ACC: gl.constexpr):
    """Divide by the sums of the weights, and store the first `left` rows of a head, starting at `row`."""
    ROWS: gl.constexpr = acc.shape[0]
    HEAD_DIM: gl.constexpr = acc.shape[1]
    LAYOUT: gl.constexpr = _row_major(HEAD_DIM)
    out = acc * gl.convert_layout(1 / row_sum, gl.SliceLayout(1, ACC))[:, None]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    places = (row + rows).to(gl.int64)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + dims[None, :]
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), LAYOUT)
    gl.store(out_ptr + places, out, mask=(rows < left)[:, None])


@gluon.jit
def _attend(part, out_ptr, scale, work, shared, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):
    queries, queries_full, queries_empty, ring = shared
    keys, _keys_full, _keys_empty, values, values_full, values_empty = ring
    ROWS: gl.constexpr = QUERIES // 2
    KEYS: gl.constexpr = keys.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    turn = 0
    done = 0
    for item in range(gl.program_id(0), HEADS * work[1], gl.num_programs(0)):
        head, _seq, row, left, position, seq_len, steps = _find_work(item, work, HEADS, KEYS)
        if steps > 0:
            position += part * ROWS
            query = queries.index(part)
            mbarrier.wait(queries_full, done & 1)
            weights, row_max, row_sum = _attend_first_tile(
                query, ring, turn, (steps - 1) * KEYS, position, seq_len, scale, SCORES, ACC
            )
            acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, ACC)
            for step in range(steps - 2, -1, -1):
                turn += 1
                weights, acc, row_max, row_sum = _attend_tile(
                    query, ring, turn, step * KEYS, position, scale, weights, acc, row_max, row_sum, SCORES, ACC
                )
            mbarrier.arrive(queries_empty)
            stage, used = _stage(turn)
            mbarrier.wait(values_full.index(stage), used)
            acc = warpgroup_mma(weights, values.index(stage), acc)
            mbarrier.arrive(values_empty.index(stage))
            turn += 1
            done += 1
            _store(acc, row_sum, out_ptr, head, row + part * ROWS, left - part * ROWS, HEADS, ACC)


@kernel(do_not_specialize=["num_tiles", "table_stride"], unaligned=UNALIGNED)
def _hopper_prefill_kernel(
    q_desc, k_desc, v_desc, out_ptr, block_tables_ptr, table_stride, tiles_ptr, num_tiles, cu_seqlens_q_ptr,
    seq_lens_ptr, scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    queries = gl.allocate_shared_memory(q_desc.dtype, [2, QUERIES // 2, HEAD_DIM], q_desc.layout)
    queries_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    queries_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(queries_full, count=1)
    mbarrier.init(queries_empty, count=2)
    keys = gl.allocate_shared_memory(q_desc.dtype, [_STAGES, KEYS, HEAD_DIM], k_desc.layout)
    values = gl.allocate_shared_memory(q_desc.dtype, [_STAGES, KEYS, HEAD_DIM], v_desc.layout)
    keys_full, keys_empty = make_barriers(_STAGES, 2)
    values_full, values_empty = make_barriers(_STAGES, 2)
    ring = (keys, keys_full, keys_empty, values, values_full, values_empty)
    wait_for_previous(True)
    work = (tiles_ptr, num_tiles, cu_seqlens_q_ptr, seq_lens_ptr)
    shared = (queries, queries_full, queries_empty, ring)
    load_from = (q_desc, k_desc, v_desc, block_tables_ptr, table_stride)
    gl.warp_specialize(
        [
            (_attend, (0, out_ptr, scale, work, shared, HEADS, HEAD_DIM)),
            (_attend, (1, out_ptr, scale, work, shared, HEADS, HEAD_DIM)),
            (_load, (load_from, work, shared, HEADS, GROUP, HEAD_DIM, BLOCK_SIZE)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[248, 24],
    )


def _num_keys(head_dim: int) -> int:
    return 64 if head_dim > 128 else 128


def supports(dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
    """Return whether the kernel supports this dtype, head size and block size."""
    return dtype.itemsize == 2 and head_dim in {64, 128, 256} and block_size % _num_keys(head_dim) == 0


def hopper_prefill_attention(
    query: torch.Tensor, pages: KVPages, out: torch.Tensor, chunks: ChunkRows, scale: float, num_programs: int
) -> None:
    """Compute `prefill_attention` for two-byte elements with at most `num_programs` programs."""
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = pages.k_cache.shape
    num_tiles, num_keys = len(chunks.tiles) // 2, _num_keys(head_dim)
    queries = query.as_strided((num_tokens, num_heads * head_dim), (query.stride(0), 1))
    keys, values = (cache.view(-1, num_kv_heads * head_dim) for cache in (pages.k_cache, pages.v_cache))
    _hopper_prefill_kernel[(min(num_programs, num_heads * num_tiles),)](
        descriptor(queries, [QUERIES.value // 2, head_dim]), descriptor(keys, [num_keys, head_dim]),
        descriptor(values, [num_keys, head_dim]), out, chunks.block_tables, chunks.block_tables.stride(0),
        chunks.tiles, num_tiles, chunks.cu_seqlens_q, chunks.seq_lens, scale * LOG2E,
        HEADS=num_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, KEYS=num_keys, BLOCK_SIZE=block_size,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
