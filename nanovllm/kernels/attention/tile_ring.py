"""The pipeline of Hopper's decode kernel: copy tiles of keys and values into stages, and attend to them as they arrive.

`copy_from` describes the source: TMA descriptors of the caches for whole tiles and for a warp's part of a tile, pointer
to the sequence's block table, the KV head's first column, and `tiles` (first tile, number of tiles, keys in all the
context's tiles). `ring` holds the stages: keys, values, and the barriers that signal a full stage.
"""

from __future__ import annotations

from nanovllm.kernels._gluon import barrier, gl, gluon, mbarrier, tma_load
from nanovllm.kernels.attention.warp_attention import TILE, WARP_KEYS, WARPS, attend_tile


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
    PART_BYTES: gl.constexpr = 4 * WARP_KEYS * keys.shape[3]
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
    query, scale, softmax, copy_from, ring, STAGES: gl.constexpr, BLOCK_SIZE: gl.constexpr, BY_PARTS: gl.constexpr
):
    """Fold all tiles of the split into the softmax; `begin_copies` has started the first copies."""
    _k_desc, _v_desc, _k_part_desc, _v_part_desc, _table_ptr, _column, tiles = copy_from
    first_tile, num_tiles, old_len = tiles
    keys, values, full = ring
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, softmax[0].type.layout, 2)
    for number in range(num_tiles):
        stage = number % STAGES
        mbarrier.wait(full.index(stage), number // STAGES & 1)
        key = keys.index(stage).permute((0, 2, 1)).load(OPERAND)
        value = values.index(stage).load(OPERAND)
        if number + STAGES < num_tiles:
            barrier()
            _copy_tile(number + STAGES, copy_from, ring, STAGES, BLOCK_SIZE, BY_PARTS)
        softmax = attend_tile(query, key, value, first_tile + number, old_len, scale, softmax)
    return softmax
