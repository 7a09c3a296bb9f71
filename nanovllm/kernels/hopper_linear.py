"""The gated product of many rows for Hopper, SiLU(x @ gate.T) * (x @ up.T), in one kernel.

One program a multiprocessor goes through tiles of the result. One of its warps has the tensor memory accelerator copy
tiles of input and weights into shared memory as far ahead as there is room; two groups of four warps each multiply for
half of the rows, and need not end a tile at the same time, so one's activation and store hide behind the other's
product. The tile of weights is as many rows of the gate as of the other, side by side in one accumulator.

On an H200, 16,384 rows of Qwen3-0.6B take XXX us, and 348 with cuBLAS and a kernel for the activation.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._gluon import (
    descriptor,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    kernel,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(128)
"""Rows of a tile of the result, half of them each group's."""
OUTS = gl.constexpr(128)
"""Columns of a tile of the result, which take twice as many rows of weights."""
_INS = gl.constexpr(64)
"""Inputs of one step of the product."""
_SLOTS = gl.constexpr(4)
"""Steps that shared memory holds."""
_BAND = gl.constexpr(16)
"""Tiles one above the other that are worked on before those beside them, so that both operands stay in the L2 cache."""


@gluon.jit
def _find_tile(tile, row_tiles, out_tiles):
    """First row and first column of a tile, by its number."""
    band = tile // (_BAND * out_tiles)
    height = gl.minimum(row_tiles - band * _BAND, _BAND)
    within = tile - band * _BAND * out_tiles
    return (band * _BAND + within % height) * ROWS, within // height * OUTS


@gluon.jit
def _load(x_desc, weight_desc, row_tiles, out_tiles, steps, shared):
    """Copy what the groups will multiply."""
    BYTES: gl.constexpr = (ROWS + 2 * OUTS) * _INS * 2
    xs, weights, _outs, full, empty = shared
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * out_tiles, gl.num_programs(0)):
        row, out = _find_tile(tile, row_tiles, out_tiles)
        for step in range(steps):
            slot = turn % _SLOTS
            mbarrier.wait(empty.index(slot), turn // _SLOTS & 1 ^ 1)
            ready = full.index(slot)
            mbarrier.expect(ready, BYTES)
            tma_load(x_desc, [row, step * _INS], ready, xs.index(slot))
            for half in gl.static_range(2):
                place = [out + half * out_tiles * OUTS, step * _INS]
                tma_load(weight_desc, place, ready, weights.index(slot).slice(half * OUTS, OUTS))
            turn += 1


@gluon.jit
def _multiply(PART: gl.constexpr, out_desc, row_tiles, out_tiles, steps, shared):
    """Multiply for one half of each tile's rows."""
    HALF: gl.constexpr = ROWS // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * OUTS, 16])
    xs, weights, outs, full, empty = shared
    turn = 0
    for tile in range(gl.program_id(0), row_tiles * out_tiles, gl.num_programs(0)):
        row, out = _find_tile(tile, row_tiles, out_tiles)
        acc = gl.zeros([HALF, 2 * OUTS], gl.float32, ACC)
        for step in range(steps):
            slot = turn % _SLOTS
            mbarrier.wait(full.index(slot), turn // _SLOTS & 1)
            x = xs.index(slot).slice(PART * HALF, HALF)
            acc = warpgroup_mma(x, weights.index(slot).permute((1, 0)), acc, is_async=True)
            # The step before has ended.
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((turn - 1) % _SLOTS), pred=step > 0)
            turn += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((turn - 1) % _SLOTS))
        gate, up = acc.reshape([HALF, 2, OUTS]).permute((0, 2, 1)).split()
        # Rounded where a product apart would have rounded.
        gate, up = gate.to(xs.dtype).to(gl.float32), up.to(xs.dtype).to(gl.float32)
        gated = gate / (1 + gl.exp(-gate)) * up
        tma_store_wait(0)
        outs.index(PART).store(gated.to(xs.dtype))
        fence_async_shared()
        tma_store(out_desc, [row + PART * HALF, out], outs.index(PART))
    tma_store_wait(0)


@kernel(do_not_specialize=["row_tiles"])
def _gated_linear_kernel(x_desc, weight_desc, out_desc, row_tiles, out_tiles, steps):
    xs = gl.allocate_shared_memory(x_desc.dtype, [_SLOTS, ROWS, _INS], x_desc.layout)
    weights = gl.allocate_shared_memory(x_desc.dtype, [_SLOTS, 2 * OUTS, _INS], weight_desc.layout)
    outs = gl.allocate_shared_memory(x_desc.dtype, [2, ROWS // 2, OUTS], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(_SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    gdc_wait()
    gdc_launch_dependents()
    shared = (xs, weights, outs, full, empty)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_multiply, (FIRST, out_desc, row_tiles, out_tiles, steps, shared)),
            (_multiply, (SECOND, out_desc, row_tiles, out_tiles, steps, shared)),
            (_load, (x_desc, weight_desc, row_tiles, out_tiles, steps, shared)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


def pays(x: torch.Tensor, weight: torch.Tensor, num_programs: int) -> bool:
    """Whether `hopper_gated_linear` knows these shapes, and has so many tiles to do that the last round's rest is small.

    us with cuBLAS and a kernel for the activation, and so: Qwen3-0.6B, 1024 rows (192 tiles) 24.7 and 27.7, 1500 rows
    34.8 and 39.7, 2048 rows (384 tiles) 47.6 and 41.3, 16,384 rows 343 and 296; Qwen3-8B, 256 rows (192 tiles) 77 and
    93, 512 rows 143 and 137, 2048 rows 555 and 530, 16,384 rows 4,600 and 4,608.
    """
    (rows, in_features), size = x.shape, len(weight) // 2
    known = x.element_size() == 2 and in_features % _INS.value == 0 and size % OUTS.value == 0
    return known and -(-rows // ROWS.value) * (size // OUTS.value) >= 2.5 * num_programs


def hopper_gated_linear(x: torch.Tensor, weight: torch.Tensor, num_programs: int) -> torch.Tensor:
    """SiLU(gate) * up of a product without a bias, by at most `num_programs` programs, one a multiprocessor.

    Args:
        x: [num_rows, in_features], of two-byte elements; any number of rows, each contiguous.
        weight: [2 * size, in_features]; the gate's rows first; contiguous.
        num_programs: see above.

    Returns:
        [num_rows, size].
    """
    (rows, in_features), size = x.shape, len(weight) // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    row_tiles, out_tiles = -(-rows // ROWS.value), size // OUTS.value
    _gated_linear_kernel[(min(num_programs, row_tiles * out_tiles),)](
        descriptor(x, [ROWS.value, _INS.value]), descriptor(weight, [OUTS.value, _INS.value]),
        descriptor(out, [ROWS.value // 2, OUTS.value]), row_tiles, out_tiles, in_features // _INS.value,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out
