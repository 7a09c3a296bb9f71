"""Products of a batch's rows, 17 to 256, with small weights on Hopper, where starting and ending is what takes time.

A program has the tensor memory accelerator copy its first tiles of weights before it waits for the kernel ahead, so
that, launched as a programmatic dependent, it has them when the input is there. Where a layer has few outputs, several
programs share a tile's inputs, and leave their parts of the sum to the norm that follows. A layer's products, norms
and gate of Qwen3-0.6B take 24.2 us so at 128 rows on an H200, and 30.9 with cuBLAS, which does not start early; at 64
rows 21.8 and 28.2, at 32 22.1 and 27.3. With 256 rows the products alone take longer than cuBLAS's, but what comes
next starts early too: a step takes 5.40 ms, and 5.65 with cuBLAS.
"""

from __future__ import annotations

from typing import NamedTuple

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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from nanovllm.kernels._triton import device_limits
from nanovllm.kernels.linear.hopper_product import halve

MAX_BATCH_ROWS = 256
"""Up to here the kernel pays: with 384 rows a step of 0.6B with it takes up to 7% longer than with cuBLAS."""
PARTS = 4
"""Programs that share a tile of a layer with few outputs."""
_ROWS = gl.constexpr(64)
"""Rows of a tile of the result."""
_WARPS = gl.constexpr(4)


@gluon.jit
def _load_weights(step, load_from, ring, more):
    """Start to copy a step's weights, if there are `more`; of a gated layer two tiles that lie apart."""
    _x_desc, desc, _row, column, second, first_in = load_from
    _xs, weights, full = ring
    COLUMNS: gl.constexpr = desc.block_shape[0]
    slot = step % weights.shape[0]
    for half in gl.static_range(weights.shape[1] // COLUMNS):
        place = [column + half * second, first_in + step * weights.shape[2]]
        tma_load(desc, place, full.index(slot), weights.index(slot).slice(half * COLUMNS, COLUMNS), pred=more)


@gluon.jit
def _load_inputs(step, load_from, ring, more):
    """Start to copy a step's inputs."""
    desc, _weight_desc, row, _column, _second, first_in = load_from
    xs, _weights, full = ring
    slot = step % xs.shape[0]
    tma_load(desc, [row, first_in + step * xs.shape[2]], full.index(slot), xs.index(slot), pred=more)


@gluon.jit
def _multiply(load_from, ring, STEPS: gl.constexpr, BYTES: gl.constexpr):
    """Multiply a tile, [ROWS, columns] float32; its first steps are on their way."""
    xs, weights, full = ring
    SLOTS: gl.constexpr = xs.shape[0]
    COLUMNS: gl.constexpr = weights.shape[1]
    acc = gl.zeros([_ROWS, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, COLUMNS, 16]))
    for step in range(STEPS):
        slot = step % SLOTS
        mbarrier.wait(full.index(slot), step // SLOTS & 1)
        acc = warpgroup_mma(xs.index(slot), weights.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        # The step before has ended, in all warps, and leaves its place.
        barrier()
        ahead = step - 1 + SLOTS
        more = (step > 0) & (ahead < STEPS)
        mbarrier.expect(full.index(ahead % SLOTS), BYTES, pred=more)
        _load_inputs(ahead, load_from, ring, more)
        _load_weights(ahead, load_from, ring, more)
    acc = warpgroup_mma_wait(0, deps=[acc])
    # What comes next may take the shared memory that other warps' last products read.
    barrier()
    return acc


@gluon.jit
def _store(out, out_ptr, row, column, num_rows, out_features):
    """Store a tile of the result, whose first element is at `row` and `column`."""
    COLUMNS: gl.constexpr = out.shape[1]
    EACH: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // COLUMNS, COLUMNS // EACH], [_WARPS, 1], [1, 0])
    rows = row + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), LAYOUT)
    places = rows.to(gl.int64)[:, None] * out_features + columns[None, :]
    gl.store(out_ptr + places, out, mask=(rows < num_rows)[:, None])


@kernel(do_not_specialize=["num_rows"])
def _batch_linear_kernel(
    x_desc, weight_desc, out_ptr, num_rows, out_features,
    OUTS: gl.constexpr, STEP: gl.constexpr, STEPS: gl.constexpr, SLOTS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = OUTS * (2 if GATED else 1)
    FILLED: gl.constexpr = SLOTS if SLOTS < STEPS else STEPS
    BYTES: gl.constexpr = (_ROWS + COLUMNS) * STEP * 2
    dtype: gl.constexpr = x_desc.dtype
    column, row, part = gl.program_id(0) * OUTS, gl.program_id(1) * _ROWS, gl.program_id(2)
    xs = gl.allocate_shared_memory(dtype, [SLOTS, _ROWS, STEP], x_desc.layout)
    weights = gl.allocate_shared_memory(dtype, [SLOTS, COLUMNS, STEP], weight_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    ring = (xs, weights, full)
    load_from = (x_desc, weight_desc, row, column, out_features, part * (STEPS * STEP))
    for step in gl.static_range(FILLED):
        mbarrier.expect(full.index(step), BYTES)
        _load_weights(step, load_from, ring, True)
    gdc_wait()
    gdc_launch_dependents()
    for step in gl.static_range(FILLED):
        _load_inputs(step, load_from, ring, True)
    acc = _multiply(load_from, ring, STEPS, BYTES)
    if GATED:
        gate, up = halve(acc)
        # Rounded where a product apart would have rounded.
        gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
        acc = gate / (1 + gl.exp(-gate)) * up
    part_ptr = out_ptr + part.to(gl.int64) * num_rows * out_features
    _store(acc, part_ptr, row, column, num_rows, out_features)


class _Tile(NamedTuple):
    """Outputs of a program, inputs of a step, and steps that shared memory holds."""

    outs: int
    step: int
    slots: int


def _tiles(num_rows: int, gated: bool, parts: int) -> list[_Tile]:
    """What to divide the work into, narrow tiles first, which are faster as long as all programs run at once.

    Two programs fit on a multiprocessor, so that the next kernel's find room beside them: attention's, which begin with
    their keys. A plain product of a single tile of rows leaves multiprocessors free, and had better be deep.
    """
    if gated:
        return [_Tile(32, 64, 6), _Tile(64, 64, 4)]
    if parts > 1:
        return [_Tile(32, 128, 4), _Tile(64, 128, 3)]
    return [_Tile(64, 128, 4) if num_rows <= _ROWS.value else _Tile(64, 64, 6)]


def _find_tile(x: torch.Tensor, out_features: int, gated: bool, parts: int) -> _Tile | None:
    """The first tile that divides the work evenly, into programs that all run at once."""
    num_rows, in_features = x.shape
    num_processors, shared_bytes = device_limits(x.device)
    for tile in _tiles(num_rows, gated, parts):
        programs = -(-num_rows // _ROWS.value) * (out_features // tile.outs) * parts
        program_bytes = tile.slots * (_ROWS.value + tile.outs * (2 if gated else 1)) * tile.step * 2
        even = in_features % (parts * tile.step) == 0 and out_features % tile.outs == 0
        if even and programs <= num_processors * (shared_bytes // program_bytes):
            return tile
    return None


def _most_ins(num_rows: int, gated: bool) -> int:
    """Inputs of a program, at most: with more, the weights' bytes take the time, which cuBLAS reads as fast or faster.

    Measured with 17 to 32, 33 to 64, and more rows, of 1024 (Qwen3-0.6B) to 4096 inputs (8B).
    """
    if num_rows <= 32:
        return 2048
    return 4096 if num_rows <= _ROWS.value and not gated else 2560


def should_use(x: torch.Tensor, weight: torch.Tensor, gated: bool = False, parts: int = 1) -> bool:
    """Whether the kernel takes these shapes, and is the fastest: small weights, and all of its programs run at once."""
    num_rows, in_features = x.shape
    out_features = len(weight) // 2 if gated else len(weight)
    small = num_rows <= MAX_BATCH_ROWS and in_features <= parts * _most_ins(num_rows, gated)
    return x.element_size() == 2 and small and _find_tile(x, out_features, gated, parts) is not None


def batch_linear(x: torch.Tensor, weight: torch.Tensor, gated: bool = False, parts: int = 1) -> torch.Tensor:
    """Multiply `x @ weight.T`, and gate, where `pays`.

    Args:
        x: [num_rows, in_features], contiguous.
        weight: [out_features, in_features]; of a gated layer the gate's rows, then the other's, equally many.
        gated: return SiLU(gate) * other, half as wide.
        parts: how many programs share the inputs, not of a gated layer; 1 or PARTS.

    Returns:
        [num_rows, out_features], or if there are parts, [parts, num_rows, out_features] float32, to be summed.
    """
    num_rows, in_features = x.shape
    out_features = len(weight) // 2 if gated else len(weight)
    assert x.is_contiguous() and weight.is_contiguous() and not (gated and parts > 1)
    outs, step, slots = _find_tile(x, out_features, gated, parts) or _tiles(num_rows, gated, parts)[0]
    assert in_features % (parts * step) == 0 and out_features % outs == 0
    shape = (num_rows, out_features) if parts == 1 else (parts, num_rows, out_features)
    out = torch.empty(shape, dtype=x.dtype if parts == 1 else torch.float32, device=x.device)
    _batch_linear_kernel[(out_features // outs, -(-num_rows // _ROWS.value), parts)](
        descriptor(x, [_ROWS.value, step]), descriptor(weight, [outs, step]), out, num_rows, out_features,
        OUTS=outs, STEP=step, STEPS=in_features // parts // step, SLOTS=slots, GATED=gated,
        num_warps=_WARPS.value, launch_pdl=True,
    )  # fmt: skip
    return out
