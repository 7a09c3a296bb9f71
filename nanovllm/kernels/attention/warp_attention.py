"""Attention of Hopper's decode kernel to the tiles of a split: each warp has its own keys of every tile, and softmax.

Warps therefore synchronise only to reuse a stage, and at the end, when their softmaxes are merged by maxima and sums,
as Flash-Decoding (Dao et al. 2023) merges the states of programs. Tiles are copied into stages ahead:

- `copy_from` describes the source: TMA descriptors of the caches for whole tiles and for a warp's part of a tile,
  pointer to the sequence's block table, the KV head's first column, and `tiles` (first tile, number of tiles, keys in
  all the context's tiles).
- `ring` holds the stages: keys, values, and the barriers that signal a full stage.

Of a cache in e4m3 tiles are bytes, which a thread loads 16 at a time and converts to float16. That takes other orders
of a head's elements: of keys `key_order`, as a product may add them up in any, and of values `value_order`.
"""

from __future__ import annotations

from nanovllm.kernels._gluon import barrier, gl, gluon, mbarrier, mma_v2, tma_load
from nanovllm.kernels.fast_math import exp2, log2

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
    """Return a layout of a tile of keys in bytes, [WARPS, WARP_KEYS, head_dim]: of each key a quarter for a thread.

    That is how `mma_v2` has its second operand, if the elements are in `key_order`.
    """
    registers = [[0, 0, 1 << bit] for bit in range((head_dim // 4).bit_length() - 1)] + [[0, 8, 0]]
    lanes = [[0, 0, head_dim // 4], [0, 0, head_dim // 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0]], [], [WARPS, WARP_KEYS, head_dim])


@gluon.constexpr_function
def _value_bytes_layout(head_dim):
    """Return a layout of a tile of values in bytes, [WARPS, WARP_KEYS, head_dim]: of each an eighth for a thread.

    That is how `mma_v2` has its second operand, if the elements are in `value_order`.
    """
    registers = [[0, 0, 1 << bit] for bit in range((head_dim // 8).bit_length() - 1)] + [[0, 1, 0], [0, 8, 0]]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, head_dim // 8], [0, 0, head_dim // 4], [0, 0, head_dim // 2]]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0], [2, 0, 0]], [], [WARPS, WARP_KEYS, head_dim])


@gluon.jit
def key_order(heads):
    """Bring the elements of heads, [ROWS, HEAD_DIM], into the order in which products with keys of e4m3 add them up.

    A thread of `mma_v2` takes, of each 16, elements 2 i, 2 i + 1, 2 i + 8 and 2 i + 9. Here these are a quarter's next.
    """
    HEAD_DIM: gl.constexpr = heads.shape[1]
    parts = gl.reshape(heads, [ROWS, 4, HEAD_DIM // 16, 2, 2])
    return gl.reshape(gl.permute(parts, (0, 2, 3, 1, 4)), [ROWS, HEAD_DIM])


@gluon.jit
def value_order(value):
    """Bring the elements of a value, [HEAD_DIM], into the order of the columns of products with values of e4m3.

    A thread of `mma_v2` has a column of each 8. Here these are an eighth of the value.
    """
    HEAD_DIM: gl.constexpr = value.shape[0]
    return gl.reshape(gl.permute(gl.reshape(value, [8, HEAD_DIM // 8]), (1, 0)), [HEAD_DIM])


@gluon.jit
def as_float16(bytes):
    """Return bytes of e4m3 as float16, exactly."""
    return bytes.to(gl.float8e4nv, bitcast=True).to(gl.float16)


@gluon.jit
def _as_float16_pairs(even, odd):
    """Convert the values of an even and an odd key from bytes of e4m3 to float16, [..., 2].

    `mma_v2` takes both in one register. The compiler would combine their bytes one at a time.
    """
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
    """Load the heads as an operand that every warp has, [WARPS, ROWS, HEAD_DIM]."""
    HEAD_DIM: gl.constexpr = shared.shape[1]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    one = gl.expand_dims(shared.load(gl.SliceLayout(0, OPERAND)), 0)
    operand, _zeros = gl.broadcast(one, gl.zeros([WARPS, ROWS, HEAD_DIM], shared.dtype, OPERAND))
    return operand


@gluon.jit
def _is_old(tile, old_len, LAYOUT: gl.constexpr):
    """Return which keys of a tile exist, [WARPS, WARP_KEYS]."""
    warps = gl.arange(0, WARPS, gl.SliceLayout(1, LAYOUT))
    keys = gl.arange(0, WARP_KEYS, gl.SliceLayout(0, LAYOUT))
    return tile * TILE + warps[:, None] * WARP_KEYS + keys[None, :] < old_len


@gluon.jit
def _attend_tile(query, key, value, tile, old_len, scale, softmax):
    """Fold the keys of a tile before `old_len` into the warps' softmaxes.

    query: [WARPS, ROWS, HEAD_DIM]; key: [WARPS, HEAD_DIM, WARP_KEYS]; value: [WARPS, WARP_KEYS, HEAD_DIM].
    """
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

    All warps start with its scores as maxima. query: halves [ROWS, HEAD_DIM / 2]; own_key: halves [1, HEAD_DIM / 2];
    own_value: [HEAD_DIM], of e4m3 in `value_order`. Returns outputs [WARPS, ROWS, HEAD_DIM], maxima and sums [WARPS,
    ROWS].
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
def round_heads(out, dtype: gl.constexpr):
    """Return outputs, [heads or rows, HEAD_DIM] float32, rounded to `dtype`, as bytes of e4m3, and their scales."""
    out = out.to(dtype).to(gl.float32)
    largest = gl.max(gl.abs(out), axis=1)
    scales = gl.where(largest > 0, largest / 448.0, 1.0)
    # The instruction saturates.
    return (out / scales[:, None]).to(gl.float8e4nv).to(gl.uint8, bitcast=True), scales


@gluon.jit
def store_heads(out, out_ptr, GROUP: gl.constexpr):
    """Store the outputs of a group's heads at consecutive rows."""
    HEAD_DIM: gl.constexpr = out.shape[1]
    heads = gl.arange(0, out.shape[0], gl.SliceLayout(1, out.type.layout))
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out.type.layout))
    out = out.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + heads[:, None] * HEAD_DIM + dims[None, :], out, mask=(heads < GROUP)[:, None])
