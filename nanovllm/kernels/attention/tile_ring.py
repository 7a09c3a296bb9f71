"""Tiles of keys and values on their way from pages to shared memory, and attention to them as they arrive, on Hopper.

What is copied is `copy_from`: descriptors of the caches for whole tiles, and for pieces; where the sequence's table of
blocks begins; the KV head's first column; and `tiles`, the first of them, how many, and how many keys all tiles have.
Tiles take turns in the places of a `ring`: keys, values, and the barriers that say that a place is full.
"""

from __future__ import annotations

from nanovllm.kernels._gluon import barrier, gl, gluon, mbarrier, tma_load
from nanovllm.kernels.attention.warp_attention import PIECE, TILE, WARPS, attend_tile


@gluon.jit
def _copy_tile(number, copy_from, ring, SLOTS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BY_PIECES: gl.constexpr):
    """Start to copy a tile of keys and values into its place; of the last, if BY_PIECES, just the pieces with keys."""
    k_desc, v_desc, k_piece_desc, v_piece_desc, table_ptr, column, tiles = copy_from
    first_tile, _num_tiles, old_len = tiles
    keys, values, full = ring
    slot = number % SLOTS
    key = (first_tile + number) * TILE
    row = gl.load(table_ptr + key // BLOCK_SIZE) * BLOCK_SIZE + key % BLOCK_SIZE
    place = row // PIECE
    pieces = gl.cdiv(old_len - key, PIECE) if BY_PIECES else WARPS
    PIECE_BYTES: gl.constexpr = 4 * PIECE * keys.shape[3]
    if pieces >= WARPS:
        mbarrier.expect(full.index(slot), WARPS * PIECE_BYTES)
        tma_load(k_desc, [place, 0, column], full.index(slot), keys.index(slot))
        tma_load(v_desc, [place, 0, column], full.index(slot), values.index(slot))
    else:
        for some in gl.static_range(1, WARPS):
            mbarrier.expect(full.index(slot), some * PIECE_BYTES, pred=pieces == some)
        for piece in gl.static_range(WARPS - 1):
            at = [place + piece, 0, column]
            tma_load(k_piece_desc, at, full.index(slot), keys.index(slot).slice(piece, 1), pred=piece < pieces)
            tma_load(v_piece_desc, at, full.index(slot), values.index(slot).slice(piece, 1), pred=piece < pieces)


@gluon.jit
def begin_copies(
    copy_from, HEAD_DIM: gl.constexpr, SLOTS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BY_PIECES: gl.constexpr
):
    """Make places for tiles in shared memory, and start to copy the first tiles into them."""
    k_desc, v_desc, _k_piece_desc, _v_piece_desc, _table_ptr, _column, tiles = copy_from
    _first_tile, num_tiles, _old_len = tiles
    keys = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, WARPS, PIECE, HEAD_DIM], k_desc.layout)
    values = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, WARPS, PIECE, HEAD_DIM], v_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    ring = (keys, values, full)
    for number in range(gl.minimum(num_tiles, SLOTS)):
        _copy_tile(number, copy_from, ring, SLOTS, BLOCK_SIZE, BY_PIECES)
    return ring


@gluon.jit
def attend_to_old(
    query, scale, softmax, copy_from, ring, SLOTS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BY_PIECES: gl.constexpr
):
    """Attend to the split's tiles, of which the first are on their way."""
    _k_desc, _v_desc, _k_piece_desc, _v_piece_desc, _table_ptr, _column, tiles = copy_from
    first_tile, num_tiles, old_len = tiles
    keys, values, full = ring
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, softmax[0].type.layout, 2)
    for number in range(num_tiles):
        slot = number % SLOTS
        mbarrier.wait(full.index(slot), number // SLOTS & 1)
        key = keys.index(slot).permute((0, 2, 1)).load(OPERAND)
        value = values.index(slot).load(OPERAND)
        if number + SLOTS < num_tiles:
            barrier()
            _copy_tile(number + SLOTS, copy_from, ring, SLOTS, BLOCK_SIZE, BY_PIECES)
        softmax = attend_tile(query, key, value, first_tile + number, old_len, scale, softmax)
    return softmax
