"""Linear layers of 17 to 256 rows with small weights on Hopper, which are bound by the start and end of kernels.

A program starts the TMA copies of its first weight tiles before `gdc_wait`. For layers with few outputs, several
programs share an output tile and each multiplies some of the inputs (split-K); the next norm sums their parts.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._gluon import (
    barrier,
    descriptor,
    gl,
    gluon,
    halve,
    kernel,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from nanovllm.kernels._triton import wait_for_previous
from nanovllm.kernels.fast_math import round_to
from nanovllm.kernels.policy import FASTEST, SPLITK_ROWS, KernelPolicy, splitk_tiles

_ROWS = gl.constexpr(SPLITK_ROWS)
_WARPS = gl.constexpr(4)


@gluon.jit
def _load_weights(step, load_from, ring, more):
    _x_desc, desc, _row, column, second, first_in = load_from
    _xs, weights, full = ring
    COLUMNS: gl.constexpr = desc.block_shape[0]
    stage = step % weights.shape[0]
    for half in gl.static_range(weights.shape[1] // COLUMNS):
        place = [column + half * second, first_in + step * weights.shape[2]]
        tma_load(desc, place, full.index(stage), weights.index(stage).slice(half * COLUMNS, COLUMNS), pred=more)


@gluon.jit
def _load_inputs(step, load_from, ring, more):
    desc, _weight_desc, row, _column, _second, first_in = load_from
    xs, _weights, full = ring
    stage = step % xs.shape[0]
    tma_load(desc, [row, first_in + step * xs.shape[2]], full.index(stage), xs.index(stage), pred=more)


@gluon.jit
def _multiply(load_from, ring, STEPS: gl.constexpr, BYTES: gl.constexpr):
    """Return an output tile, [ROWS, columns] float32; the copies of the first stages have been started."""
    xs, weights, full = ring
    STAGES: gl.constexpr = xs.shape[0]
    COLUMNS: gl.constexpr = weights.shape[1]
    acc = gl.zeros([_ROWS, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, COLUMNS, 16]))
    for step in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        acc = warpgroup_mma(xs.index(stage), weights.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        # After this all warps have finished the previous step, and its stage can be refilled.
        barrier()
        ahead = step - 1 + STAGES
        more = (step > 0) & (ahead < STEPS)
        mbarrier.expect(full.index(ahead % STAGES), BYTES, pred=more)
        _load_inputs(ahead, load_from, ring, more)
        _load_weights(ahead, load_from, ring, more)
    acc = warpgroup_mma_wait(0, deps=[acc])
    # The epilogue may reuse the shared memory that other warps' last products read.
    barrier()
    return acc


@kernel(do_not_specialize=["num_rows"])
def _splitk_gemm_kernel(
    x_desc, weight_desc, out_ptr, num_rows, out_features,
    OUTS: gl.constexpr, STEP: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = OUTS * (2 if GATED else 1)
    FILLED: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    BYTES: gl.constexpr = (_ROWS + COLUMNS) * STEP * 2
    dtype: gl.constexpr = x_desc.dtype
    column, row, part = gl.program_id(0) * OUTS, gl.program_id(1) * _ROWS, gl.program_id(2)
    xs = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, STEP], x_desc.layout)
    weights = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, STEP], weight_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    ring = (xs, weights, full)
    load_from = (x_desc, weight_desc, row, column, out_features, part * (STEPS * STEP))
    for step in gl.static_range(FILLED):
        mbarrier.expect(full.index(step), BYTES)
        _load_weights(step, load_from, ring, True)
    wait_for_previous(True)
    for step in gl.static_range(FILLED):
        _load_inputs(step, load_from, ring, True)
    acc = _multiply(load_from, ring, STEPS, BYTES)
    if GATED:
        gate, up = halve(acc)
        # Rounds like a separate product.
        gate, up = round_to(gate, dtype), round_to(up, dtype)
        acc = gate / (1 + gl.exp(-gate)) * up
    EACH: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // OUTS, OUTS // EACH], [_WARPS, 1], [1, 0])
    part_ptr = out_ptr + part.to(gl.int64) * num_rows * out_features
    rows = row + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, OUTS, gl.SliceLayout(0, LAYOUT))
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LAYOUT)
    places = rows.to(gl.int64)[:, None] * out_features + columns[None, :]
    gl.store(part_ptr + places, out, mask=(rows < num_rows)[:, None])


def splitk_gemm(
    x: torch.Tensor, weight: torch.Tensor, gated: bool = False, parts: int = 1, policy: KernelPolicy = FASTEST
) -> torch.Tensor:
    """Return the product of `norm_linear`, [num_rows, out_features], where `KernelPolicy.uses_splitk`.

    With `parts` programs per output tile, 1 or SPLITK_PARTS, and 1 if gated, the result is [parts, num_rows,
    out_features] float32, to be summed.
    """
    num_rows, in_features = x.shape
    out_features = len(weight) // 2 if gated else len(weight)
    assert x.is_contiguous() and weight.is_contiguous() and not (gated and parts > 1)
    outs, step, stages = policy.splitk_tile(num_rows, weight, gated, parts) or splitk_tiles(num_rows, gated, parts)[0]
    assert in_features % (parts * step) == 0 and out_features % outs == 0
    shape = (num_rows, out_features) if parts == 1 else (parts, num_rows, out_features)
    out = torch.empty(shape, dtype=x.dtype if parts == 1 else torch.float32, device=x.device)
    _splitk_gemm_kernel[(out_features // outs, -(-num_rows // _ROWS.value), parts)](
        descriptor(x, [_ROWS.value, step]), descriptor(weight, [outs, step]), out, num_rows, out_features,
        OUTS=outs, STEP=step, STEPS=in_features // parts // step, STAGES=stages, GATED=gated,
        num_warps=_WARPS.value, launch_pdl=True,
    )  # fmt: skip
    return out
