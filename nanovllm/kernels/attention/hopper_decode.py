"""Decode attention over pages for Hopper: one program computes one split of a context for one KV head.

The new token may be given as QKV projection output: programs then apply QK norm and RoPE to the heads they need, and
one of them stores key and value. Before `gdc_wait` a program starts the TMA copies of its first tiles, which earlier
steps have written. Each of its four warps attends to its own keys of every tile with its own softmax; these are merged
at the end. Device functions name two tuples:

- `copy_from`: TMA descriptors of the caches for whole tiles and for a warp's part of a tile, pointer to the block
  table, the KV head's first column, and `tiles` (first tile, number of tiles, keys in all the context's tiles).
- `ring`: the stages of keys and of values, and the barriers that signal a full stage.

Of a cache in e4m3 tiles are bytes, which a thread loads 16 at a time and converts to float16. That takes other orders
of a head's elements: of keys `key_order`, as a product may add them up in any, and of values `value_order`.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._gluon import barrier, descriptor, gl, gluon, kernel, mbarrier, mma_v2, tma_load
from nanovllm.kernels._triton import device_limits, launch_next, wait_for_previous
from nanovllm.kernels.attention.cascade_attention import cascade_attention
from nanovllm.kernels.attention.decode_attention import DecodePlan, merge_splits
from nanovllm.kernels.attention.online_softmax import LOG2E
from nanovllm.kernels.fast_math import exp2, log2, rsqrt, to_float16
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope

WARPS = gl.constexpr(4)
WARP_KEYS = gl.constexpr(16)
"""Keys per warp and tile."""
TILE = gl.constexpr(WARPS.value * WARP_KEYS.value)
"""Keys per tile, which must lie in one block."""
ROWS = gl.constexpr(16)
"""Rows of the matrix instruction; query heads of a group, then padding."""
_SMALLEST = gl.constexpr(2.0**-126)
"""Float32's smallest normal number."""
MAX_GROUP = ROWS.value // 2
"""Maximum query heads per KV head: results of the upper half of the rows are dropped."""


@gluon.constexpr_function
def _key_bytes_layout(head_dim):
    """Return a layout of keys in bytes, [WARPS, WARP_KEYS, head_dim], as `mma_v2` has an operand in `key_order`."""
    registers = [[0, 0, 1 << bit] for bit in range((head_dim // 4).bit_length() - 1)] + [[0, 8, 0]]
    lanes = [[0, 0, head_dim // 4], [0, 0, head_dim // 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0]], [], [WARPS, WARP_KEYS, head_dim])


@gluon.constexpr_function
def _value_bytes_layout(head_dim):
    """Return a layout of values in bytes, [WARPS, WARP_KEYS, head_dim], as `mma_v2` has an operand in `value_order`."""
    registers = [[0, 0, 1 << bit] for bit in range((head_dim // 8).bit_length() - 1)] + [[0, 1, 0], [0, 8, 0]]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, head_dim // 8], [0, 0, head_dim // 4], [0, 0, head_dim // 2]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0]], [], [WARPS, WARP_KEYS, head_dim])


@gluon.jit
def key_order(heads):
    """Bring the elements of heads, [ROWS, HEAD_DIM], into the order in which products with keys of e4m3 add them up."""
    # A thread of `mma_v2` takes, of each 16, elements 2 i, 2 i + 1, 2 i + 8 and 2 i + 9: here a quarter's next four.
    HEAD_DIM: gl.constexpr = heads.shape[1]
    parts = gl.reshape(heads, [ROWS, 4, HEAD_DIM // 16, 2, 2])
    return gl.reshape(gl.permute(parts, (0, 2, 3, 1, 4)), [ROWS, HEAD_DIM])


@gluon.jit
def value_order(value):
    """Bring the elements of a value, [HEAD_DIM], into the order of the columns of products with values of e4m3."""
    # A thread of `mma_v2` has a column of each 8: here these are an eighth of the value.
    HEAD_DIM: gl.constexpr = value.shape[0]
    return gl.reshape(gl.permute(gl.reshape(value, [8, HEAD_DIM // 8]), (1, 0)), [HEAD_DIM])


@gluon.jit
def as_float16(bytes):
    """Return bytes of e4m3 as float16, exactly."""
    return bytes.to(gl.float8e4nv, bitcast=True).to(gl.float16)


@gluon.jit
def _as_float16_pairs(even, odd):
    """Convert values of an even and an odd key to float16, [..., 2]; the compiler would combine bytes one by one."""
    both = gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high;
        .reg .b16 first, second, third, fourth;
        prmt.b32 low, $4, $5, 0x5140;
        prmt.b32 high, $4, $5, 0x7362;
        mov.b32 {first, second}, low;
        mov.b32 {third, fourth}, high;
        cvt.rn.f16x2.e4m3x2 $0, first;
        cvt.rn.f16x2.e4m3x2 $1, second;
        cvt.rn.f16x2.e4m3x2 $2, third;
        cvt.rn.f16x2.e4m3x2 $3, fourth;
        }""",
        "=r,=r,=r,=r,r,r", [even, odd], gl.int32, is_pure=True, pack=4,
    )  # fmt: skip
    low, high = both.to(gl.int16), (both >> 16).to(gl.int16)
    return gl.join(low.to(gl.float16, bitcast=True), high.to(gl.float16, bitcast=True))


@gluon.jit
def _load_keys(keys, OPERAND: gl.constexpr):
    """Load a tile of keys as an operand, [WARPS, HEAD_DIM, WARP_KEYS]; e4m3 in `key_order`."""
    if keys.dtype == gl.uint8:
        HEAD_DIM: gl.constexpr = keys.shape[2]
        bytes = keys.load(_key_bytes_layout(HEAD_DIM))
        parts = gl.reshape(bytes, [WARPS, WARP_KEYS, 4, HEAD_DIM // 16, 2, 2])
        ordered = gl.reshape(gl.permute(parts, (0, 3, 4, 2, 5, 1)), [WARPS, HEAD_DIM, WARP_KEYS])
        key = as_float16(gl.convert_layout(ordered, OPERAND))
    else:
        key = keys.permute((0, 2, 1)).load(OPERAND)
    return key


@gluon.jit
def _load_values(values, OPERAND: gl.constexpr):
    """Load a tile of values as an operand, [WARPS, WARP_KEYS, HEAD_DIM]; e4m3 in `value_order`."""
    if values.dtype == gl.uint8:
        HEAD_DIM: gl.constexpr = values.shape[2]
        bytes = values.load(_value_bytes_layout(HEAD_DIM))
        pairs = gl.permute(gl.reshape(bytes, [WARPS, WARP_KEYS // 2, 2, HEAD_DIM]), (0, 1, 3, 2))
        even, odd = gl.split(pairs)
        parts = gl.reshape(_as_float16_pairs(even, odd), [WARPS, WARP_KEYS // 2, 8, HEAD_DIM // 8, 2])
        ordered = gl.reshape(gl.permute(parts, (0, 1, 4, 3, 2)), [WARPS, WARP_KEYS, HEAD_DIM])
        value = gl.convert_layout(ordered, OPERAND)
    else:
        value = values.load(OPERAND)
    return value


@gluon.jit
def share_query(first, second, E4M3: gl.constexpr):
    """Join halves of heads, [ROWS, HEAD_DIM / 2] each, in shared memory, [ROWS, HEAD_DIM]."""
    HEAD_DIM: gl.constexpr = 2 * first.shape[1]
    heads = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [ROWS, HEAD_DIM])
    if E4M3:
        heads = key_order(heads)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    return gl.allocate_shared_memory(heads.dtype, [ROWS, HEAD_DIM], SHARED, heads)


@gluon.jit
def _load_query(shared, MMA: gl.constexpr):
    HEAD_DIM: gl.constexpr = shared.shape[1]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    one = gl.expand_dims(shared.load(gl.SliceLayout(0, OPERAND)), 0)
    operand, _zeros = gl.broadcast(one, gl.zeros([WARPS, ROWS, HEAD_DIM], shared.dtype, OPERAND))
    return operand


@gluon.jit
def _is_old(tile, old_len, LAYOUT: gl.constexpr):
    warps = gl.arange(0, WARPS, gl.SliceLayout(1, LAYOUT))
    keys = gl.arange(0, WARP_KEYS, gl.SliceLayout(0, LAYOUT))
    return tile * TILE + warps[:, None] * WARP_KEYS + keys[None, :] < old_len


@gluon.jit
def _attend_tile(query, key, value, tile, old_len, scale, softmax):
    """Fold the keys of a tile before `old_len`, operands of a batch of WARPS products, into the warps' softmaxes."""
    acc, row_max, row_sum = softmax
    MMA: gl.constexpr = acc.type.layout
    scores = mma_v2(query, key, gl.zeros([WARPS, ROWS, WARP_KEYS], gl.float32, MMA))
    if (tile + 1) * TILE > old_len:
        known = _is_old(tile, old_len, gl.SliceLayout(1, MMA))
        scores = gl.where(gl.expand_dims(known, 1), scores, -float("inf"))
        # Stale NaN or infinity times a zero weight would be NaN.
        known = _is_old(tile, old_len, gl.SliceLayout(2, value.type.layout))
        value = gl.where(gl.expand_dims(known, 2), value, 0.0)
    new_max = gl.maximum(row_max, gl.max(scores, axis=2) * scale)
    weights = exp2(scores * scale - gl.expand_dims(new_max, 2))
    correction = exp2(row_max - new_max)
    row_sum = row_sum * correction + gl.sum(weights, axis=2)
    weights = gl.convert_layout(weights.to(value.dtype), query.type.layout)
    return mma_v2(weights, value, acc * gl.expand_dims(correction, 2)), new_max, row_sum


@gluon.jit
def _copy_tile(number, copy_from, ring, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr, BY_PARTS: gl.constexpr):
    """Start copying a tile of keys and values into its stage; with BY_PARTS only the parts that contain keys."""
    k_desc, v_desc, k_part_desc, v_part_desc, table_ptr, column, tiles = copy_from
    first_tile, _num_tiles, old_len = tiles
    keys, values, full = ring
    stage = number % STAGES
    key = (first_tile + number) * TILE
    row = gl.load(table_ptr + key // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE
    place = row // WARP_KEYS
    parts = gl.cdiv(old_len - key, WARP_KEYS) if BY_PARTS else WARPS
    PART_BYTES: gl.constexpr = 2 * WARP_KEYS * keys.shape[3] * (keys.dtype.primitive_bitwidth // 8)
    if parts >= WARPS:
        mbarrier.expect(full.index(stage), WARPS * PART_BYTES)
        tma_load(k_desc, [place, 0, column], full.index(stage), keys.index(stage))
        tma_load(v_desc, [place, 0, column], full.index(stage), values.index(stage))
    else:
        for some in gl.static_range(1, WARPS):
            mbarrier.expect(full.index(stage), some * PART_BYTES, pred=parts == some)
        for part in gl.static_range(WARPS - 1):
            at = [place + part, 0, column]
            tma_load(k_part_desc, at, full.index(stage), keys.index(stage).slice(part, 1), pred=part < parts)
            tma_load(v_part_desc, at, full.index(stage), values.index(stage).slice(part, 1), pred=part < parts)


@gluon.jit
def begin_copies(
    copy_from, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr, BY_PARTS: gl.constexpr
):
    """Allocate the stages, and start copying the first tiles into them."""
    k_desc, v_desc, _k_part_desc, _v_part_desc, _table_ptr, _column, tiles = copy_from
    _first_tile, num_tiles, _old_len = tiles
    keys = gl.allocate_shared_memory(k_desc.dtype, [STAGES, WARPS, WARP_KEYS, HEAD_DIM], k_desc.layout)
    values = gl.allocate_shared_memory(k_desc.dtype, [STAGES, WARPS, WARP_KEYS, HEAD_DIM], v_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    ring = (keys, values, full)
    for number in range(gl.minimum(num_tiles, STAGES)):
        _copy_tile(number, copy_from, ring, STAGES, BLOCK_SIZE, BY_PARTS)
    return ring


@gluon.jit
def attend_to_old(
    shared_query, scale, softmax, copy_from, ring,
    STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr, BY_PARTS: gl.constexpr,
):  # fmt: skip
    """Fold all tiles of the split into the softmax; `begin_copies` has started the first copies."""
    _k_desc, _v_desc, _k_part_desc, _v_part_desc, _table_ptr, _column, tiles = copy_from
    first_tile, num_tiles, old_len = tiles
    keys, values, full = ring
    MMA: gl.constexpr = softmax[0].type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    query = _load_query(shared_query, MMA)
    for number in range(num_tiles):
        stage = number % STAGES
        mbarrier.wait(full.index(stage), number // STAGES & 1)
        key = _load_keys(keys.index(stage), OPERAND)
        value = _load_values(values.index(stage), OPERAND)
        if number + STAGES < num_tiles:
            barrier()
            _copy_tile(number + STAGES, copy_from, ring, STAGES, BLOCK_SIZE, BY_PARTS)
        if keys.dtype == gl.uint8:
            # Conversions need its registers.
            query = _load_query(shared_query, MMA)
        softmax = _attend_tile(query, key, value, first_tile + number, old_len, scale, softmax)
    return softmax


@gluon.jit
def begin_softmax(query, own_key, own_value, counts, scale, MMA: gl.constexpr):
    """Initialise the softmaxes with the new token: with weight 1 in the first warp if `counts`, else with weight 0.

    All warps start with its scores as maxima. own_value: [HEAD_DIM], of e4m3 in `value_order`; others: `_load_token`.
    Returns outputs [WARPS, ROWS, HEAD_DIM], maxima and sums [WARPS, ROWS].
    """
    STATS: gl.constexpr = gl.SliceLayout(2, MMA)
    zeros = gl.zeros([WARPS, ROWS], gl.float32, STATS)
    own_scores = gl.sum(query[0].to(gl.float32) * own_key[0].to(gl.float32), axis=1)
    own_scores += gl.sum(query[1].to(gl.float32) * own_key[1].to(gl.float32), axis=1)
    row_max = gl.expand_dims(gl.convert_layout(own_scores * scale, gl.SliceLayout(0, STATS)), 0) + zeros
    is_first = gl.arange(0, WARPS, gl.SliceLayout(1, STATS)) == 0
    row_sum = gl.where(is_first & counts, 1.0, 0.0)[:, None] + zeros
    acc = gl.expand_dims(row_sum, 2) * gl.expand_dims(gl.expand_dims(own_value.to(gl.float32), 0), 0)
    return acc, row_max, row_sum


@gluon.constexpr_function
def _merged_layout(head_dim):
    """Return a layout in which each thread holds the outputs of all warps for some elements."""
    return gl.BlockedLayout([WARPS, 1, 4], [1, 128 // head_dim, head_dim // 4], [1, WARPS, 1], [2, 1, 0])


@gluon.jit
def merge(softmax, E4M3: gl.constexpr):
    """Merge the warps' softmaxes; return float32 outputs [HEADS, HEAD_DIM] and base-2 log-sum-exp [HEADS]."""
    acc, row_max, row_sum = softmax
    HEAD_DIM: gl.constexpr = acc.shape[2]
    HEADS: gl.constexpr = ROWS // 2
    LAYOUT: gl.constexpr = _merged_layout(HEAD_DIM)
    STATS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    halves = gl.permute(gl.reshape(acc, [WARPS, 2, HEADS, HEAD_DIM]), (0, 2, 3, 1))
    used, _unused = gl.split(halves)
    if E4M3:
        # Out of `value_order`.
        eighths = gl.permute(gl.reshape(used, [WARPS, HEADS, HEAD_DIM // 8, 8]), (0, 1, 3, 2))
        used = gl.reshape(eighths, [WARPS, HEADS, HEAD_DIM])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    maxima = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], PLAIN, row_max)
    sums = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], PLAIN, row_sum)
    parts = gl.allocate_shared_memory(gl.float32, used.shape, gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]), used)
    part_max = maxima.slice(0, HEADS, dim=1).load(STATS)
    top = gl.max(part_max, axis=0)
    share = exp2(part_max - gl.expand_dims(top, 0))
    # A new token that does not count is still the maximum, beside which all weights can underflow to 0.
    total = gl.maximum(gl.sum(sums.slice(0, HEADS, dim=1).load(STATS) * share, axis=0), _SMALLEST)
    out = gl.sum(parts.load(LAYOUT) * gl.expand_dims(share / gl.expand_dims(total, 0), 2), axis=0)
    return out, gl.convert_layout(top + log2(total), gl.SliceLayout(1, out.type.layout))


@gluon.jit
def merge_two(out, lse, other, other_lse):
    """Merge two states (output, log-sum-exp) as `merge` returns them; at most one log-sum-exp may be -inf."""
    top = gl.maximum(lse, other_lse)
    weight, other_weight = exp2(lse - top), exp2(other_lse - top)
    total = weight + other_weight
    merged = out * gl.expand_dims(weight / total, 1) + other * gl.expand_dims(other_weight / total, 1)
    return merged, top + log2(total)


@gluon.jit
def load_parts(out_ptr, lse_ptr, first_row, stride, count, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Load and merge `count` outputs of a group's heads, `stride` rows apart; log-sum-exp is -inf if count is 0."""
    LAYOUT: gl.constexpr = _merged_layout(HEAD_DIM)
    OUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    HEADS: gl.constexpr = ROWS // 2
    heads = gl.arange(0, HEADS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    numbers = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    out = gl.zeros([HEADS, HEAD_DIM], gl.float32, OUT)
    lse = gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(1, OUT))
    # Loads all outputs that the layout holds at once, to wait for them together.
    for start in range(0, count, WARPS):
        is_part = (start + numbers < count)[:, None]
        rows = first_row + (start + numbers)[:, None] * stride + heads[None, :]
        is_row = is_part & (heads < GROUP)[None, :]
        part_lse = gl.where(is_part, gl.load(lse_ptr + rows, mask=is_row, other=0.0), -float("inf"))
        part_ptrs = out_ptr + gl.expand_dims(rows.to(gl.int64) * HEAD_DIM, 2)
        part_ptrs += gl.expand_dims(gl.expand_dims(dims, 0), 0)
        parts = gl.load(part_ptrs, mask=gl.expand_dims(is_row, 2), other=0.0)
        top = gl.max(part_lse, axis=0)
        weights = exp2(part_lse - top[None, :])
        total = gl.sum(weights, axis=0)
        merged = gl.sum(parts * gl.expand_dims(weights / total[None, :], 2), axis=0)
        merged_lse = gl.convert_layout(top + log2(total), gl.SliceLayout(1, OUT))
        out, lse = merge_two(out, lse, merged, merged_lse)
    return out, lse


@gluon.jit
def store_heads(out, out_ptr, GROUP: gl.constexpr):
    """Store the outputs of a group's heads at consecutive rows."""
    HEAD_DIM: gl.constexpr = out.shape[1]
    heads = gl.arange(0, out.shape[0], gl.SliceLayout(1, out.type.layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out.type.layout))
    out = out.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + heads[:, None] * HEAD_DIM + dims[None, :], out, mask=(heads < GROUP)[:, None])


_E4M3_REGISTERS = 168
"""Most registers of a thread with a cache in e4m3: three programs then share a multiprocessor, whose stages are half as
large. That is faster than two programs with twice the stages."""


@gluon.constexpr_function
def _halves_layout(half):
    return gl.BlockedLayout([1, 4], [128 // half, half // 4], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def _value_layout(E4M3, MMA):
    """Return the layout of the new token's value, [head_dim]: for e4m3 an element is in one thread, which rounds it."""
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

    With PROJECTED all are in the QKV row at `row_ptr`; else key and value, maybe in e4m3, are in the cache at `stored`.
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
    scale = 1.0
    if scale_ptr is not None:
        scale = gl.load(scale_ptr + head)
    return scale


@gluon.jit
def _to_e4m3(x, scale, clipped_ptr, counts):
    """Return x / scale as bytes of e4m3; counts clipped values if `counts`."""
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
    """Apply QK norm and RoPE to the new token's heads; return and, unless kv_slot is -1, store its key and value."""
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
def _store_partial(attended, lse, partial_ptr, lse_ptr, row, GROUP: gl.constexpr):
    store_heads(attended, partial_ptr + row * attended.shape[1], GROUP)
    heads = gl.arange(0, ROWS // 2, lse.type.layout)
    gl.store(lse_ptr + row + heads, lse, mask=heads < GROUP)


@kernel(
    do_not_specialize=["table_stride", "prefix_rows_stride"],
    unaligned=["slot_mapping_ptr", "block_tables_ptr", "prefix_rows_ptr"],
)
def _hopper_decode_kernel(
    x_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, slot_mapping_ptr, splits_ptr, block_tables_ptr, table_stride,
    k_desc, v_desc, k_part_desc, v_part_desc, k_cache_ptr, v_cache_ptr, out_ptr, partial_ptr, lse_ptr,
    prefix_rows_ptr, prefix_rows_stride, prefix_out_ptr, prefix_lse_ptr, eps, scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, BY_PARTS: gl.constexpr, WHOLE: gl.constexpr, PREFIX_STRIDE: gl.constexpr,
    PROJECTED: gl.constexpr, HAS_NORM: gl.constexpr,
    k_scale_ptr=None, v_scale_ptr=None, clipped_ptr=None, NATIVE: gl.constexpr = False,
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
    wait_for_previous(True, LAUNCHES=False)
    row_ptr = x_ptr + seq * ((GROUP + (2 if PROJECTED else 0)) * KV_HEADS * HEAD_DIM)
    place = (gl.maximum(kv_slot, 0).to(gl.int64) * KV_HEADS + head) * HEAD_DIM
    stored = (k_cache_ptr + place, v_cache_ptr + place)
    token = _load_token(row_ptr, head, stored, rows, dims, value_dims, GROUP, KV_HEADS, PROJECTED)
    launch_next(True)
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
        store_heads(attended, out_ptr + (seq * KV_HEADS + head) * GROUP * HEAD_DIM, GROUP)
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
    x: torch.Tensor, pages: KVPages, out: torch.Tensor, block_tables: torch.Tensor, slot_mapping: torch.Tensor,
    plan: DecodePlan, scale: float,
    *, rope: NormRope | None = None,
) -> None:  # fmt: skip
    """Compute `decode_attention` for two-byte elements and tiles of TILE tokens, with keys and values of equal size.

    All inputs but x and the contents of the new tokens' KV slots must be written before the kernel queued last (see
    `pdl_options`).

    Args:
        x: [num_seqs, num_heads, head_dim], the queries, contiguous.
        pages, out, block_tables, plan, scale: see `decode_attention`.
        slot_mapping: [num_seqs] int32, see `qkv_rope_store`; outputs of padding rows, -1, are finite but undefined.
        rope: computes `qkv_rope_store` of x, [num_seqs, num_heads + 2 * num_kv_heads, head_dim], first; a token's
            position is the last of its context. Not with shared prefixes.
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
    splits, is_whole = plan.splits, plan.partial is None
    partial, lse = plan.partial or (None, None)
    # With more programs than multiprocessors, some share one, and copying only existing keys saves bandwidth. With
    # fewer, each has room for a fourth stage, and the extra instructions for a partial copy cost more than they save.
    many = num_seqs * num_kv_heads > device_limits(x.device)[0]
    is_e4m3 = pages.scales is not None
    _hopper_decode_kernel[(num_kv_heads, len(splits))](
        x, q_norm, k_norm, cos_sin, slot_mapping, splits, block_tables, block_tables.stride(0),
        descriptor(k_keys, tile), descriptor(v_keys, tile), descriptor(k_keys, part), descriptor(v_keys, part),
        k_cache, v_cache, out, partial, lse,
        prefix_rows, 0 if prefix_rows is None else prefix_rows.stride(0), prefix_out, prefix_lse, eps, scale * LOG2E,
        KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        STAGES=4 if is_whole and not many and not is_e4m3 else 3,
        BY_PARTS=is_whole and many, WHOLE=is_whole,
        PREFIX_STRIDE=0 if plan.prefix is None else plan.prefix.rows_per_item,
        PROJECTED=rope is not None, HAS_NORM=norm_weights is not None, num_warps=WARPS.value, launch_pdl=True,
        maxnreg=_E4M3_REGISTERS if is_e4m3 else None, **pages.store_scaling,
    )  # fmt: skip
    if plan.partial is not None:
        merge_splits(out, plan.partial, plan.of_seqs)
