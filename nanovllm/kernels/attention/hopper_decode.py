"""Decode attention over pages for Hopper: one program computes one split of a context for one KV head.

With a single split per context nothing has to be merged. The new token may be given as QKV projection output: programs
then apply QK norm and RoPE to the heads they need, and one of them stores key and value. Before `gdc_wait` a program
starts the TMA copies of its first tiles of keys and values, which earlier steps have written. Each of its four warps
attends to its own keys of every tile with its own softmax; warps synchronise only to reuse a stage, and at the end.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._gluon import descriptor, gdc_launch_dependents, gdc_wait, gl, gluon, kernel
from nanovllm.kernels._triton import device_limits
from nanovllm.kernels.attention.cascade_attention import cascade_attention
from nanovllm.kernels.attention.context_splits import merge_splits
from nanovllm.kernels.attention.decode_attention import DecodePlan
from nanovllm.kernels.attention.head_outputs import HeadOutputs, pointer, scaling
from nanovllm.kernels.attention.online_softmax import LOG2E
from nanovllm.kernels.attention.warp_attention import (
    MAX_GROUP,
    ROWS,
    TILE,
    WARP_KEYS,
    WARPS,
    as_float16,
    attend_to_old,
    begin_copies,
    begin_softmax,
    load_parts,
    merge,
    merge_two,
    round_heads,
    share_query,
    store_heads,
    value_order,
)
from nanovllm.kernels.fast_math import rsqrt, to_float16
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope

_E4M3_REGISTERS = 168
"""Most registers of a thread with a cache in e4m3: three programs then share a multiprocessor, whose stages are half as
large. That is faster than two programs with twice the stages."""


@gluon.constexpr_function
def _halves_layout(half):
    """Return the layout of one half of each of a group's heads, [ROWS, half]."""
    return gl.BlockedLayout([1, 4], [128 // half, half // 4], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def _value_layout(E4M3, MMA):
    """Return the layout of the new token's value, [head_dim].

    With a cache in e4m3 each element is in one thread, which rounds it; otherwise it is where the products need it.
    """
    return gl.BlockedLayout([1], [32], [WARPS], [0]) if E4M3 else gl.SliceLayout(0, gl.SliceLayout(0, MMA))


@gluon.jit
def _norm_and_rotate(first, second, weights, angles, eps, HAS_NORM: gl.constexpr):
    """Apply QK norm and RoPE to heads, given as halves [ROWS, HALF]; rounds like `qkv_rope_store`."""
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
def _load_constants(norms, cos_sin_ptr, position, dims, HALF: gl.constexpr, HAS_NORM: gl.constexpr):
    """Load the halves of both norm weights, and cosines and sines; none depends on the previous kernel."""
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
    """Load the new token's query heads, halves [ROWS, HEAD_DIM / 2], key, halves [1, HEAD_DIM / 2], and value.

    With PROJECTED all are in the QKV row at `row_ptr`; else key and value are read from the cache, at `stored`, where
    they may be bytes of e4m3.
    """
    HALF: gl.constexpr = dims.shape[0]
    key_ptr, value_ptr = stored
    if PROJECTED:
        key_ptr = row_ptr + (GROUP * KV_HEADS + head) * (2 * HALF)
        value_ptr = row_ptr + ((GROUP + 1) * KV_HEADS + head) * (2 * HALF)
    # Padding rows repeat the group's last head.
    heads = head * GROUP + gl.minimum(rows, GROUP - 1)
    query_ptrs = row_ptr + heads[:, None] * (2 * HALF) + dims[None, :]
    query = (gl.load(query_ptrs), gl.load(query_ptrs + HALF))
    key_ptrs = key_ptr + dims[None, :]
    key = (gl.load(key_ptrs), gl.load(key_ptrs + HALF))
    return query, key, gl.load(value_ptr + value_dims)


@gluon.jit
def _load_scale(scale_ptr, head):
    """Load a KV head's scale; 1 if there are none."""
    scale = 1.0
    if scale_ptr is not None:
        scale = gl.load(scale_ptr + head)
    return scale


@gluon.jit
def _to_e4m3(x, scale, clipped_ptr, counts):
    """Return the bytes of e4m3 that mean x if multiplied by the scale; counts what is clipped if `counts`."""
    LAYOUT: gl.constexpr = x.type.layout
    scaled = x.to(gl.float32) / scale
    gl.atomic_add(
        clipped_ptr + gl.zeros(x.shape, gl.int32, LAYOUT), gl.full(x.shape, 1, gl.int64, LAYOUT),
        mask=(gl.abs(scaled) > 448.0) & counts, sem="relaxed",
    )  # fmt: skip
    # The instruction saturates.
    return scaled.to(gl.float8e4nv).to(gl.uint8, bitcast=True)


@gluon.jit
def _from_e4m3(token, MMA: gl.constexpr):
    """Convert a token in e4m3 to float16, unscaled, its value in `value_order`; return any other unchanged."""
    query, key, value = token
    if value.dtype == gl.uint8:
        query = (to_float16(query[0].to(gl.float32)), to_float16(query[1].to(gl.float32)))
        key = (as_float16(key[0]), as_float16(key[1]))
        value = gl.convert_layout(value_order(as_float16(value)), gl.SliceLayout(0, gl.SliceLayout(0, MMA)))
    return query, key, value


@gluon.jit
def _finish_token(
    token, dims, value_dims, constants, eps, kv_slot, stored, scales, clipped_ptr, HAS_NORM: gl.constexpr
):
    """Apply QK norm and RoPE to the new token's heads, and store its key and value unless kv_slot is -1.

    scales: of key and value; clipped_ptr: to the counter of clipped ones, or None if they are stored as they are.
    Returns key and value as they are stored.
    """
    query, key, value = token
    q_weights, k_weights, angles = constants
    key_ptr, value_ptr = stored
    k_scale, v_scale = scales
    query = _norm_and_rotate(query[0], query[1], q_weights, angles, eps, HAS_NORM)
    key = _norm_and_rotate(key[0], key[1], k_weights, angles, eps, HAS_NORM)
    if clipped_ptr is not None:
        first = _to_e4m3(key[0], k_scale, clipped_ptr, kv_slot >= 0)
        second = _to_e4m3(key[1], k_scale, clipped_ptr, kv_slot >= 0)
        key = (first, second)
        value = _to_e4m3(value, v_scale, clipped_ptr, kv_slot >= 0)
    if kv_slot >= 0:
        gl.store(key_ptr + dims[None, :], key[0])
        gl.store(key_ptr + dims[None, :] + dims.shape[0], key[1])
        gl.store(value_ptr + value_dims, value)
    return query, key, value


@gluon.jit
def _store_outputs(attended, out, seq, head, dtype: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Store the outputs of a group's heads, rounded to e4m3 if they have scales."""
    out_ptr, scale_ptr, row_stride, head_stride = out
    if scale_ptr is not None:
        attended, scales = round_heads(attended, dtype)
        heads = gl.arange(0, ROWS // 2, scales.type.layout)
        scale_places = seq * row_stride + (head * GROUP + heads) * head_stride
        gl.store(scale_ptr + scale_places, scales, mask=heads < GROUP)
    store_heads(attended, out_ptr + (seq * KV_HEADS + head) * GROUP * attended.shape[1], GROUP)


@gluon.jit
def _store_partial(attended, lse, partial_ptr, lse_ptr, row, GROUP: gl.constexpr):
    """Store the outputs of a split's group of heads from `row` on, and their log-sum-exp."""
    store_heads(attended, partial_ptr + row * attended.shape[1], GROUP)
    heads = gl.arange(0, ROWS // 2, lse.type.layout)
    gl.store(lse_ptr + row + heads, lse, mask=heads < GROUP)


@kernel(
    do_not_specialize=["table_stride", "prefix_rows_stride", "out_scale_row_stride", "out_scale_head_stride"],
    unaligned=["slot_mapping_ptr", "block_tables_ptr", "prefix_rows_ptr", "out_scale_ptr"],
)
def _hopper_decode_kernel(
    x_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slot_mapping_ptr, splits_ptr, block_tables_ptr, table_stride,
    k_desc, v_desc, k_part_desc, v_part_desc, k_cache_ptr, v_cache_ptr, out_ptr, partial_ptr, lse_ptr,
    prefix_rows_ptr, prefix_rows_stride, prefix_out_ptr, prefix_lse_ptr, eps, scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, BY_PARTS: gl.constexpr, WHOLE: gl.constexpr, PREFIX_STRIDE: gl.constexpr,
    PROJECTED: gl.constexpr, HAS_NORM: gl.constexpr,
    k_scale_ptr=None, v_scale_ptr=None, clipped_ptr=None, NATIVE: gl.constexpr = False,
    out_scale_ptr=None, out_scale_row_stride=0, out_scale_head_stride=0, OUT_NATIVE: gl.constexpr = False,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    HALF: gl.constexpr = HEAD_DIM // 2
    E4M3: gl.constexpr = k_scale_ptr is not None
    head, split = gl.program_id(0), gl.program_id(1)
    split_ptr = splits_ptr + 4 * split
    seq = gl.load(split_ptr).to(gl.int64)
    tiles = (gl.load(split_ptr + 1), gl.load(split_ptr + 2), gl.load(split_ptr + 3))
    first_tile, num_tiles, old_len = tiles
    is_first = first_tile == 0
    if seq < 0:
        return
    kv_slot = gl.load(slot_mapping_ptr + seq)
    table_ptr = block_tables_ptr + seq * table_stride
    if PREFIX_STRIDE > 0:
        table_ptr += gl.load(prefix_rows_ptr + seq) // BLOCK_SIZE
        prefix_place = gl.load(prefix_rows_ptr + prefix_rows_stride + seq)
        prefix_parts = gl.load(prefix_rows_ptr + 2 * prefix_rows_stride + seq)
    copy_from = (k_desc, v_desc, k_part_desc, v_part_desc, table_ptr, head * HEAD_DIM, tiles)
    ring = begin_copies(copy_from, HEAD_DIM, STAGES, BLOCK_SIZE, BY_PARTS)
    dims = gl.arange(0, HALF, gl.SliceLayout(0, _halves_layout(HALF)))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, _halves_layout(HALF)))
    value_dims = gl.arange(0, HEAD_DIM, _value_layout(E4M3, MMA))
    k_scale, v_scale = _load_scale(k_scale_ptr, head), _load_scale(v_scale_ptr, head)
    scale *= k_scale
    if PROJECTED:
        constants = _load_constants((q_norm_ptr, k_norm_ptr), cos_sin_ptr, old_len, dims, HALF, HAS_NORM)
    gdc_wait()
    gdc_launch_dependents()

    row_ptr = x_ptr + seq * ((GROUP + (2 if PROJECTED else 0)) * KV_HEADS * HEAD_DIM)
    place = (gl.maximum(kv_slot, 0).to(gl.int64) * KV_HEADS + head) * HEAD_DIM
    stored = (k_cache_ptr + place, v_cache_ptr + place)
    token = _load_token(row_ptr, head, stored, rows, dims, value_dims, GROUP, KV_HEADS, PROJECTED)
    if PROJECTED:
        kv_slot = gl.where(is_first, kv_slot, -1)
        token = _finish_token(
            token, dims, value_dims, constants, eps, kv_slot, stored, (k_scale, v_scale), clipped_ptr, HAS_NORM
        )
    query, key, value = _from_e4m3(token, MMA)
    softmax = begin_softmax(query, key, value, is_first, scale, MMA)
    shared_query = share_query(query[0], query[1], E4M3)
    if PREFIX_STRIDE > 0:
        first_row, stride = (prefix_place * KV_HEADS + head) * GROUP, PREFIX_STRIDE * KV_HEADS * GROUP
        count = gl.where(is_first, prefix_parts, 0)
        prefix = load_parts(prefix_out_ptr, prefix_lse_ptr, first_row, stride, count, GROUP, HEAD_DIM)
    softmax = attend_to_old(shared_query, scale, softmax, copy_from, ring, STAGES, BLOCK_SIZE, BY_PARTS)
    attended, lse = merge(softmax, E4M3)
    if PREFIX_STRIDE > 0:
        attended, lse = merge_two(attended, lse, prefix[0], prefix[1])
    attended *= v_scale
    if WHOLE or (is_first and num_tiles * TILE >= old_len):
        _store_outputs(
            attended, (out_ptr, out_scale_ptr, out_scale_row_stride, out_scale_head_stride), seq, head,
            x_ptr.dtype.element_ty, KV_HEADS, GROUP,
        )  # fmt: skip
    else:
        _store_partial(attended, lse, partial_ptr, lse_ptr, (split * KV_HEADS + head).to(gl.int64) * GROUP, GROUP)


def supports(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
    """Return whether the kernel supports this dtype and these head and block sizes."""
    return (
        dtype.itemsize == 2
        and num_heads <= MAX_GROUP * num_kv_heads
        and head_dim in {64, 128}
        and block_size % TILE.value == 0
    )


def hopper_decode_attention(
    x: torch.Tensor,
    pages: KVPages,
    out: HeadOutputs,
    block_tables: torch.Tensor,
    slot_mapping: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    *,
    rope: NormRope | None = None,
) -> None:
    """Compute attention of one new token per sequence over its whole context, into `out`, of two-byte elements.

    All inputs but x and the contents of the new tokens' KV slots must be written before the kernel queued last (see
    `pdl_options`).

    Args:
        x: [num_seqs, num_heads, head_dim], the queries, contiguous; with `rope` the QKV projection's output, [num_seqs,
            num_heads + 2 * num_kv_heads, head_dim].
        pages: the layer's keys and values, of equal size.
        out: of num_seqs rows.
        block_tables: [num_seqs, max_blocks] int32.
        slot_mapping: [num_seqs] int32; the new tokens' KV slots, `block * block_size + offset`; -1 is a padding row,
            whose output is finite but undefined.
        plan: from the context lengths, each including the new token, with tiles of TILE tokens.
        scale: factor of the scores.
        rope: of `qkv_rope_store`, which is then computed first; a token's position is the last of its context. Not
            supported with shared prefixes.
    """
    k_cache, v_cache = pages.stored
    _, block_size, num_kv_heads, _ = k_cache.shape
    num_seqs, num_heads, head_dim = x.shape
    num_heads -= 0 if rope is None else 2 * num_kv_heads
    assert x.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    assert plan.tile == TILE.value
    prefix_rows = prefix_out = prefix_lse = None
    if plan.prefix is not None:
        assert rope is None
        cascade_attention(x, pages, block_tables, plan.prefix, scale)
        prefix_rows, prefix_out, prefix_lse = plan.prefix.shared.rows, plan.prefix.partial, plan.prefix.lse
    norm_weights = None if rope is None else rope.norm_weights
    q_norm, k_norm = norm_weights if norm_weights is not None else (None, None)
    eps, cos_sin = (0.0, None) if rope is None else (rope.eps, rope.cos_sin)
    shape = (-1, WARP_KEYS.value, num_kv_heads * head_dim)
    tile, part = [WARPS.value, WARP_KEYS.value, head_dim], [1, WARP_KEYS.value, head_dim]
    k_keys, v_keys = k_cache.view(shape), v_cache.view(shape)
    splits, is_whole = plan.splits.splits, plan.partial is None
    partial, lse = plan.partial or (None, None)
    # With more programs than multiprocessors, some share one, and copying only existing keys saves bandwidth. With
    # fewer, each has room for a fourth stage, and the extra instructions for a partial copy cost more than they save.
    many = num_seqs * num_kv_heads > device_limits(x.device)[0]
    is_e4m3 = pages.scales is not None
    _hopper_decode_kernel[(num_kv_heads, len(splits))](
        x, q_norm, k_norm, cos_sin, slot_mapping, splits, block_tables, block_tables.stride(0),
        descriptor(k_keys, tile), descriptor(v_keys, tile), descriptor(k_keys, part), descriptor(v_keys, part),
        k_cache, v_cache, pointer(out), partial, lse,
        prefix_rows, 0 if prefix_rows is None else prefix_rows.stride(0), prefix_out, prefix_lse, eps, scale * LOG2E,
        KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        STAGES=4 if is_whole and not many and not is_e4m3 else 3,
        BY_PARTS=is_whole and many, WHOLE=is_whole,
        PREFIX_STRIDE=0 if plan.prefix is None else plan.prefix.rows_per_item,
        PROJECTED=rope is not None, HAS_NORM=norm_weights is not None, num_warps=WARPS.value, launch_pdl=True,
        maxnreg=_E4M3_REGISTERS if is_e4m3 else None, **pages.store_scaling, **scaling(out),
    )  # fmt: skip
    if plan.partial is not None:
        merge_splits(out, plan.partial, plan.splits.of_seqs, x.dtype)
