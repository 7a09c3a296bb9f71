"""The main loop of products of many rows on Hopper, `x @ weight.T`; output tiles stay in registers for an epilogue.

The kernels are persistent, with one program per multiprocessor that loops over output tiles. One warp (`load_tiles`)
copies tiles of input and weights into the stages by TMA. Two warpgroups (`multiply_tile`) each multiply half of a
tile's rows. They are not synchronised, so one's epilogue overlaps with the other's product. Results equal cuBLAS's to
the bit.
"""

from __future__ import annotations

from nanovllm.kernels._gluon import (
    gl,
    gluon,
    make_barriers,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(128)
"""Rows per output tile; each warpgroup takes half."""
COLUMNS = gl.constexpr(128)
"""Half of a tile's columns; each half's weight rows are contiguous."""
INS = gl.constexpr(64)
"""Inputs per step."""
_STAGES = gl.constexpr(4)
"""Pipeline stages; one step each."""
_BAND = gl.constexpr(16)
"""Tiles are ordered by bands of this many rows of tiles, column by column, so that both operands stay in L2."""


@gluon.jit
def make_ring(x_desc, weight_desc):
    """Allocate the stages and their barriers: full and empty."""
    xs = gl.allocate_shared_memory(x_desc.dtype, [_STAGES, ROWS, INS], x_desc.layout)
    weights = gl.allocate_shared_memory(x_desc.dtype, [_STAGES, 2 * COLUMNS, INS], weight_desc.layout)
    full, empty = make_barriers(_STAGES, 2)
    return xs, weights, full, empty


@gluon.jit
def find_tile(tile, row_tiles, column_tiles):
    """Return the row and the column, in tiles, of tile number `tile`."""
    band = tile // (_BAND * column_tiles)
    height = gl.minimum(row_tiles - band * _BAND, _BAND)
    within = tile - band * _BAND * column_tiles
    return band * _BAND + within % height, within // height


@gluon.jit
def load_tiles(x_desc, weight_desc, row_tiles, column_tiles, steps, stride, second, ring):
    """Run the copying warp: load input and weights of all tiles into the stages.

    Column tile n consists of COLUMNS weight rows starting at `n * stride`, and as many at `n * stride + second`.
    """
    BYTES: gl.constexpr = (ROWS + 2 * COLUMNS) * INS * 2
    xs, weights, full, empty = ring
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        above, left = find_tile(tile, row_tiles, column_tiles)
        for step in range(steps):
            stage = turn % _STAGES
            mbarrier.wait(empty.index(stage), turn // _STAGES & 1 ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, BYTES)
            tma_load(x_desc, [above * ROWS, step * INS], ready, xs.index(stage))
            for half in gl.static_range(2):
                place = [left * stride + half * second, step * INS]
                tma_load(weight_desc, place, ready, weights.index(stage).slice(half * COLUMNS, COLUMNS))
            turn += 1


@gluon.jit
def multiply_tile(GROUP: gl.constexpr, turn, steps, ring):
    """Return a warpgroup's half of the next tile, [ROWS / 2, 2 * COLUMNS] float32; earlier tiles took `turn` steps."""
    HALF: gl.constexpr = ROWS // 2
    xs, weights, full, empty = ring
    acc = gl.zeros([HALF, 2 * COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16]))
    for step in range(steps):
        stage = (turn + step) % _STAGES
        mbarrier.wait(full.index(stage), (turn + step) // _STAGES & 1)
        x = xs.index(stage).slice(GROUP * HALF, HALF)
        acc = warpgroup_mma(x, weights.index(stage).permute((1, 0)), acc, is_async=True)
        # Waits for the previous step, whose stage is then free.
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((turn + step - 1) % _STAGES), pred=step > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((turn + steps - 1) % _STAGES))
    return acc


@gluon.jit
def halve(x):
    """Split [n, 2 * m] into its left and right columns, [n, m] each, without moving data between threads."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
