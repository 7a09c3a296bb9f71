"""Attention of single new tokens over pages, for Hopper, where a sequence's whole context is one program's for a head.

Nothing is left to merge, and the token may come as it was projected: the program that attends for a KV head also norms,
rotates and stores what is new. Before it waits for the kernel ahead, it has the tensor memory accelerator copy the
first tiles of keys and values, which are older, into shared memory. Each of its four warps attends to its own keys of
every tile, with a softmax of its own, and all meet only to make room in shared memory, and at the end.

One program reads some 80 GB/s of an H200's 4.5 TB/s, so a sequence much longer than the others is not for this kernel
(`attention.triton` chooses). Steps of Qwen3-0.6B, in ms, with RoPE, attention and merge in kernels of their own and
so: 8 rows of 400 tokens 0.901 and 0.749, 16 of 400 1.03 and 0.84, 64 of 80 to 1440 2.71 and 2.54, 128 4.37 and 4.13.
To copy only 16s of keys that there are at the end of a context saves 1.4 to 2.4% more with 64 rows and over, and costs
1.1% with 8.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._gluon import (
    barrier,
    descriptor,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    kernel,
    mbarrier,
    tma_load,
)
from nanovllm.kernels._triton import device_limits
from nanovllm.kernels.fast_math import rsqrt
from nanovllm.kernels.online_softmax import LOG2E
from nanovllm.kernels.qkv_rope_store import NormWeights
from nanovllm.kernels.warp_attention import MAX_GROUP, PIECE, ROWS, WARPS, attend_tile, begin_softmax, merge, spread

TILE = WARPS.value * PIECE.value
"""Tokens of a tile of keys, which must lie in one block."""


@gluon.constexpr_function
def _halves_layout(half):
    """Threads that hold half of each head of a group."""
    return gl.BlockedLayout([1, 4], [128 // half, half // 4], [WARPS, 1], [1, 0])


@gluon.jit
def _copy_tile(tile, copy_from, ring, SLOTS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BY_PIECES: gl.constexpr):
    """Start to copy a tile of keys and values into its place; of the last, if BY_PIECES, just the pieces with keys."""
    k_desc, v_desc, k_piece_desc, v_piece_desc, table_ptr, column, old_len = copy_from
    keys, values, full = ring
    slot = tile % SLOTS
    key = tile * (WARPS * PIECE)
    row = gl.load(table_ptr + key // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE
    place = row // PIECE
    pieces = gl.cdiv(old_len - key, PIECE) if BY_PIECES else WARPS
    PIECE_BYTES: gl.constexpr = 4 * PIECE * keys.shape[3]
    if pieces >= WARPS:
        mbarrier.expect(full.index(slot), WARPS * PIECE_BYTES)
        tma_load(k_desc, [place, 0, column], full.index(slot), keys.index(slot))
        tma_load(v_desc, [place, 0, column], full.index(slot), values.index(slot))
    else:
        for number in gl.static_range(1, WARPS):
            mbarrier.expect(full.index(slot), number * PIECE_BYTES, pred=pieces == number)
        for piece in gl.static_range(WARPS - 1):
            at = [place + piece, 0, column]
            tma_load(k_piece_desc, at, full.index(slot), keys.index(slot).slice(piece, 1), pred=piece < pieces)
            tma_load(v_piece_desc, at, full.index(slot), values.index(slot).slice(piece, 1), pred=piece < pieces)


@gluon.jit
def _norm_and_rotate(first, second, weights, angles, eps, HAS_NORM: gl.constexpr):
    """Norm and rotate heads, [ROWS, HALF] each half; rounded where a kernel apart would have."""
    dtype: gl.constexpr = first.dtype
    first, second = first.to(gl.float32), second.to(gl.float32)
    cos, sin = angles
    if HAS_NORM:
        size: gl.constexpr = 2 * first.shape[1]
        scale = rsqrt((gl.sum(first * first, axis=1) + gl.sum(second * second, axis=1)) / size + eps)[:, None]
        first *= scale * weights[0].to(gl.float32)
        second *= scale * weights[1].to(gl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@gluon.jit
def _begin_copies(
    copy_from, HEAD_DIM: gl.constexpr, SLOTS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BY_PIECES: gl.constexpr
):
    """Make places for tiles in shared memory, and start to copy the first tiles into them."""
    k_desc, v_desc, _k_piece_desc, _v_piece_desc, _table_ptr, _column, old_len = copy_from
    keys = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, WARPS, PIECE, HEAD_DIM], k_desc.layout)
    values = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, WARPS, PIECE, HEAD_DIM], v_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    ring = (keys, values, full)
    for tile in range(gl.minimum(gl.cdiv(old_len, WARPS * PIECE), SLOTS)):
        _copy_tile(tile, copy_from, ring, SLOTS, BLOCK_SIZE, BY_PIECES)
    return ring


@gluon.jit
def _attend_to_old(
    query, scale, softmax, copy_from, ring, SLOTS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BY_PIECES: gl.constexpr
):
    """Attend to all tiles, of which the first are on their way."""
    _k_desc, _v_desc, _k_piece_desc, _v_piece_desc, _table_ptr, _column, old_len = copy_from
    keys, values, full = ring
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, softmax[0].type.layout, 2)
    num_tiles = gl.cdiv(old_len, WARPS * PIECE)
    for tile in range(num_tiles):
        slot = tile % SLOTS
        mbarrier.wait(full.index(slot), tile // SLOTS & 1)
        key = keys.index(slot).permute((0, 2, 1)).load(OPERAND)
        value = values.index(slot).load(OPERAND)
        if tile + SLOTS < num_tiles:
            barrier()
            _copy_tile(tile + SLOTS, copy_from, ring, SLOTS, BLOCK_SIZE, BY_PIECES)
        softmax = attend_tile(query, key, value, tile, old_len, scale, softmax)
    return softmax


@gluon.jit
def _load_constants(norms, cos_sin_ptr, position, dims, HALF: gl.constexpr, HAS_NORM: gl.constexpr):
    """What norms and rotation need besides the token, which is old: halves of both weights, cosines and sines."""
    q_norm_ptr, k_norm_ptr = norms
    angle_ptrs = cos_sin_ptr + position.to(gl.int64) * (2 * HALF) + dims
    angles = (gl.load(angle_ptrs)[None, :], gl.load(angle_ptrs + HALF)[None, :])
    q_weights = angles
    k_weights = angles
    if HAS_NORM:
        q_weights = (gl.load(q_norm_ptr + dims)[None, :], gl.load(q_norm_ptr + HALF + dims)[None, :])
        k_weights = (gl.load(k_norm_ptr + dims)[None, :], gl.load(k_norm_ptr + HALF + dims)[None, :])
    return q_weights, k_weights, angles


@gluon.jit
def _load_token(
    row_ptr, head, stored, rows, dims, value_dims, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, PROJECTED: gl.constexpr
):
    """Load the new token's query heads, [ROWS, HEAD_DIM / 2] each half, its key likewise, [1, HEAD_DIM / 2], and value.

    A projected token has all of them at `row_ptr`; of another one, key and value are where they are `stored`.
    """
    HALF: gl.constexpr = dims.shape[0]
    key_ptr, value_ptr = stored
    if PROJECTED:
        key_ptr = row_ptr + (GROUP * KV_HEADS + head) * (2 * HALF)
        value_ptr = row_ptr + ((GROUP + 1) * KV_HEADS + head) * (2 * HALF)
    # Rows behind the group's are its last head's.
    heads = head * GROUP + gl.minimum(rows, GROUP - 1)
    query_ptrs = row_ptr + heads[:, None] * (2 * HALF) + dims[None, :]
    query = (gl.load(query_ptrs), gl.load(query_ptrs + HALF))
    key_ptrs = key_ptr + dims[None, :]
    key = (gl.load(key_ptrs), gl.load(key_ptrs + HALF))
    return query, key, gl.load(value_ptr + value_dims)


@gluon.jit
def _finish_token(token, dims, value_dims, constants, eps, kv_slot, stored, HAS_NORM: gl.constexpr):
    """Norm and rotate the new token's heads, and store its key and value."""
    query, key, value = token
    q_weights, k_weights, angles = constants
    key_ptr, value_ptr = stored
    query = _norm_and_rotate(query[0], query[1], q_weights, angles, eps, HAS_NORM)
    key = _norm_and_rotate(key[0], key[1], k_weights, angles, eps, HAS_NORM)
    if kv_slot >= 0:
        gl.store(key_ptr + dims[None, :], key[0])
        gl.store(key_ptr + dims[None, :] + dims.shape[0], key[1])
        gl.store(value_ptr + value_dims, value)
    return query, key, value


@kernel(
    do_not_specialize=["table_stride"],
    unaligned=["kv_slots_ptr", "context_lens_ptr", "block_tables_ptr", "order_ptr"],
)
def _hopper_decode_kernel(
    x_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, kv_slots_ptr, context_lens_ptr, order_ptr, block_tables_ptr,
    table_stride, k_desc, v_desc, k_piece_desc, v_piece_desc, k_cache_ptr, v_cache_ptr, out_ptr, eps, scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    SLOTS: gl.constexpr, BY_PIECES: gl.constexpr, PROJECTED: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    HALF: gl.constexpr = HEAD_DIM // 2
    HALVES: gl.constexpr = _halves_layout(HALF)
    head = gl.program_id(0)
    seq = gl.load(order_ptr + gl.program_id(1)).to(gl.int64)
    old_len = gl.load(context_lens_ptr + seq) - 1
    kv_slot = gl.load(kv_slots_ptr + seq)
    table_ptr = block_tables_ptr + seq * table_stride
    copy_from = (k_desc, v_desc, k_piece_desc, v_piece_desc, table_ptr, head * HEAD_DIM, old_len)
    ring = _begin_copies(copy_from, HEAD_DIM, SLOTS, BLOCK_SIZE, BY_PIECES)
    dims = gl.arange(0, HALF, gl.SliceLayout(0, HALVES))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, HALVES))
    value_dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(0, MMA)))
    if PROJECTED:
        constants = _load_constants((q_norm_ptr, k_norm_ptr), cos_sin_ptr, old_len, dims, HALF, HAS_NORM)
    gdc_wait()
    gdc_launch_dependents()

    row_ptr = x_ptr + seq * ((GROUP + (2 if PROJECTED else 0)) * KV_HEADS * HEAD_DIM)
    place = (gl.maximum(kv_slot, 0).to(gl.int64) * KV_HEADS + head) * HEAD_DIM
    stored = (k_cache_ptr + place, v_cache_ptr + place)
    token = _load_token(row_ptr, head, stored, rows, dims, value_dims, GROUP, KV_HEADS, PROJECTED)
    if PROJECTED:
        token = _finish_token(token, dims, value_dims, constants, eps, kv_slot, stored, HAS_NORM)
    query, key, value = token
    softmax = begin_softmax(query, key, value, scale, MMA)
    operand = spread(query[0], query[1], gl.DotOperandLayout(0, MMA, 2))
    softmax = _attend_to_old(operand, scale, softmax, copy_from, ring, SLOTS, BLOCK_SIZE, BY_PIECES)
    merge(softmax, out_ptr + (seq * KV_HEADS + head) * GROUP * HEAD_DIM, GROUP)


def takes(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Whether elements, heads and blocks are of sizes that the kernel knows."""
    return (
        dtype.itemsize == 2
        and num_heads <= MAX_GROUP * num_kv_heads
        and head_dim in {64, 128}
        and block_size % TILE == 0
    )


def hopper_decode_attention(
    x: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    kv_slots: torch.Tensor,
    order: torch.Tensor,
    scale: float,
    rope: tuple[NormWeights | None, float, torch.Tensor] | None = None,
) -> None:
    """Attention of one new token of each sequence over all its pages, into `out`, for two-byte elements.

    Args:
        x: [num_seqs, num_heads, head_dim], the queries, contiguous; with `rope`, [num_seqs, num_heads + 2 *
            num_kv_heads, head_dim], as they were projected.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous.
        out: [num_seqs, num_heads, head_dim], contiguous.
        block_tables: [num_seqs, max_blocks] int32.
        context_lens: [num_seqs] int32, at least 1, the new token included.
        kv_slots: [num_seqs] int32; where the new tokens' keys and values are, `block * block_size + offset`; a sequence
            with -1 is padding, and comes out as anything finite. All but x and what is in these slots is older than the
            kernel queued last (see `pdl_options`).
        order: [num_seqs] int32; indices of the sequences in the order in which to begin with them (`longest_first`).
        scale: factor of the scores.
        rope: norm_weights, eps and cos_sin of `qkv_rope_store`, to do what that does first, which fills the slots; a
            token's position is its context's last.
    """
    num_seqs, num_heads, head_dim = out.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    assert x.is_contiguous() and out.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    norm_weights, eps, cos_sin = rope if rope is not None else (None, 0.0, None)
    q_norm, k_norm = norm_weights if norm_weights is not None else (None, None)
    shape = (-1, PIECE.value, num_kv_heads * head_dim)
    tile, piece = [WARPS.value, PIECE.value, head_dim], [1, PIECE.value, head_dim]
    caches = k_cache.view(shape), v_cache.view(shape)
    descriptors = [descriptor(cache, size) for size in (tile, piece) for cache in caches]
    # More programs than multiprocessors share them by two, and the bandwidth; fewer each have room to read further
    # ahead, and had better save the steps that it takes to read less.
    many = num_seqs * num_kv_heads > device_limits(out.device)[0]
    _hopper_decode_kernel[(num_kv_heads, num_seqs)](
        x, q_norm, k_norm, cos_sin, kv_slots, context_lens, order, block_tables, block_tables.stride(0),
        *descriptors, k_cache, v_cache, out, eps, scale * LOG2E,
        KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        SLOTS=3 if many else 4, BY_PIECES=many, PROJECTED=rope is not None, HAS_NORM=norm_weights is not None,
        num_warps=WARPS.value, launch_pdl=True,
    )  # fmt: skip
