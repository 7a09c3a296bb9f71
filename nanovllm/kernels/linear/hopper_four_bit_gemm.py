"""Products of 17 rows and more with four-bit weights on Hopper: a persistent, warp-specialised kernel (`wgmma`).

Weights are operand A, 64 outputs of it for each consumer warpgroup, which dequantises them in registers while the
tensor cores work for another; rows are operand B, in shared memory, where a producer warp (`_load_tiles`) copies them
and packed weights by TMA. In a run of 16 bytes low halves are one operand of 16 inputs and high halves another; of
each, thread i of the four of an output reads bytes 2 i, 2 i + 1, 2 i + 8 and 2 i + 9.

The same kernel multiplies rows that are sorted by expert: a tile has rows of one expert. A linear layer is one expert.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch

from nanovllm.kernels._gluon import (
    descriptor,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    kernel,
    make_barriers,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from nanovllm.kernels._triton import device_limits
from nanovllm.kernels.four_bits import RUN, FourBitMatrix
from nanovllm.kernels.linear.skinny_four_bit_gemm import sum_factor, widen_words
from nanovllm.kernels.moe.activation import Activation, activate, is_gated
from nanovllm.kernels.policy import MAX_HOPPER_FOUR_BIT_ROWS

_RUN = gl.constexpr(RUN)
_GROUP_OUTS = gl.constexpr(64)
"""Weight rows of a warpgroup."""


@gluon.constexpr_function
def _halves(activation):
    return 1 if activation in (None, "relu2") else 2


_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [_GROUP_OUTS.value, 4]
    )
)
"""Layout of the words of a run, [64, 4], as `warpgroup_mma` has outputs and inputs."""


@gluon.constexpr_function
def _packed_layout(halves):
    """Return the layout in which a run, [64, 8] int16, is read; if gated, the second half of its rows is up's."""
    second, warps = (32, 8) if halves == 2 else (8, 16)
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 4], [second, 0]], lanes, [[warps, 0], [2 * warps, 0]], [], [64, 8])


@gluon.jit
def _read_words(packed, HALVES: gl.constexpr):
    own = packed.load(_packed_layout(HALVES))
    if HALVES == 2:
        own = gl.reshape(gl.permute(gl.reshape(own, [2, 4, 8, 8]), (1, 0, 2, 3)), [64, 8])
    low, high = gl.split(gl.permute(gl.reshape(own, [64, 2, 4]), (0, 2, 1)))
    words = (low.to(gl.int32) & 0xFFFF) | (high.to(gl.int32) << 16)
    return gl.convert_layout(words, _WORDS, assert_trivial=True)


@gluon.jit
def _outputs(first_out, out_features, LAYOUT: gl.constexpr, GATED: gl.constexpr):
    """Return the weight rows of a warpgroup, [64]; beyond the end the last one."""
    index = gl.arange(0, _GROUP_OUTS, LAYOUT)
    if GATED:
        # Each thread has a gate's output and its up's.
        outs = gl.minimum(first_out + index // 16 * 8 + index % 8, out_features - 1) + index // 8 % 2 * out_features
    else:
        outs = gl.minimum(first_out + index, out_features - 1)
    return outs


@gluon.jit
def _load_scales(scale_ptrs, zero_ptrs, first, in_features, INS: gl.constexpr, SCALE_INS: gl.constexpr):
    """Load a step's scales, scales of bytes' high halves, and zeros, [64], for each run or group, if that is larger.

    High scales and zeros are the scales where a format has none.
    """
    SPAN: gl.constexpr = min(INS, max(SCALE_INS, _RUN))
    loaded = ()
    for span in gl.static_range(INS // SPAN):
        # Beyond the end, inputs are zeros.
        ins = gl.minimum(first + span * SPAN, in_features - _RUN)
        group = ins // SCALE_INS
        scales = gl.load(scale_ptrs + group)
        high_scales = scales
        zeros = scales
        if SCALE_INS == 16:
            high_scales = gl.load(scale_ptrs + group + 1)
        if zero_ptrs is not None:
            zeros = gl.load(zero_ptrs + group)
        loaded = loaded + ((scales, high_scales, zeros),)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@gluon.jit
def _multiply_tile(
    GROUP: gl.constexpr, first_in, steps, in_features, outs, scale_ptr, zero_ptr, steps_before, buffers,
    HALVES: gl.constexpr, SCALE_INS: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """Return a warpgroup's part of a tile, [64, ROWS] float32; the tiles before it took `steps_before` steps."""
    xs, packed, full, empty = buffers
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    INS: gl.constexpr = xs.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    groups = gl.convert_layout(outs, gl.SliceLayout(1, _WORDS)).to(gl.int64) * gl.cdiv(in_features, SCALE_INS)
    scale_ptrs = scale_ptr + groups
    zero_ptrs = zero_ptr
    if zero_ptr is not None:
        zero_ptrs = zero_ptr + groups
    scales = _load_scales(scale_ptrs, zero_ptrs, first_in, in_features, INS, SCALE_INS)
    acc = gl.zeros([_GROUP_OUTS, ROWS], gl.float32, MMA)
    for step in range(steps):
        stage = (steps_before + step) % STAGES
        mbarrier.wait(full.index(stage), (steps_before + step) // STAGES & 1)
        own = packed.index(stage * (packed.shape[0] // STAGES) + GROUP)
        for run in gl.static_range(INS // _RUN):
            words = _read_words(own.slice(run * 8, 8, 1), HALVES)
            low_scales, high_scales, zeros = scales[run * len(scales) * _RUN // INS]
            loaded = (words, low_scales, high_scales, zeros)
            values = widen_words(loaded, xs.dtype, True, zero_ptr is not None, SCALE_INS, FORMAT)
            ordered = gl.reshape(gl.permute(values, (0, 2, 3, 1, 4)), [_GROUP_OUTS, _RUN])
            weight = gl.convert_layout(ordered, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
            # The next run's weights are widened meanwhile.
            x = xs.index(stage).slice(run * _RUN, _RUN, 1)
            acc = warpgroup_mma(weight, x.permute((1, 0)), acc, is_async=True)
        scales = _load_scales(scale_ptrs, zero_ptrs, first_in + (step + 1) * INS, in_features, INS, SCALE_INS)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage))
    return acc


@gluon.jit
def _rows_of(starts_ptr, expert, num_rows):
    start = 0
    stop = num_rows
    if starts_ptr is not None:
        start = gl.load(starts_ptr + expert)
        stop = gl.load(starts_ptr + expert + 1)
    return start, stop


@gluon.jit
def _load_tiles(x_desc, packed_desc, starts_ptr, sizes, buffers, HALVES: gl.constexpr):
    num_experts, num_rows, _in_features, out_features, steps, parts = sizes
    xs, packed, full, empty = buffers
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    INS: gl.constexpr = xs.shape[2]
    GROUPS: gl.constexpr = packed.shape[0] // xs.shape[0]
    OUTS: gl.constexpr = GROUPS * _GROUP_OUTS // HALVES
    BOX: gl.constexpr = _GROUP_OUTS // HALVES
    columns = gl.cdiv(out_features, OUTS)
    steps_before, first_tile, tile = 0, 0, gl.program_id(0)
    for expert in range(num_experts):
        start, stop = _rows_of(starts_ptr, expert, num_rows)
        row_tiles = gl.cdiv(stop - start, ROWS)
        end_tile = first_tile + row_tiles * columns * parts
        while tile < end_tile:
            index = tile - first_tile
            row, column = start + index % row_tiles * ROWS, index // row_tiles
            first_in = column // columns * steps * INS
            first = expert * out_features * HALVES + column % columns * OUTS
            for step in range(steps):
                stage = steps_before % STAGES
                mbarrier.wait(empty.index(stage), steps_before // STAGES & 1 ^ 1)
                ready = full.index(stage)
                mbarrier.expect(ready, ROWS * 2 * INS + OUTS * HALVES * INS // 2)
                tma_load(x_desc, [row, first_in + step * INS], ready, xs.index(stage))
                for box in gl.static_range(GROUPS * HALVES):
                    own = [first + box // HALVES * BOX + box % HALVES * out_features, (first_in + step * INS) // 4]
                    region = packed.index(stage * GROUPS + box // HALVES).slice(box % HALVES * BOX, BOX)
                    tma_load(packed_desc, own, ready, region)
                steps_before += 1
            tile += gl.num_programs(0)
        first_tile = end_tile


@gluon.jit
def _store_tile(
    acc, part, row, stop, first_out, outs, sizes, pointers, scaling, dtype: gl.constexpr,
    ACTIVATION: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """Store a warpgroup's part of a tile, after factors, bias and activation."""
    _num_experts, num_rows, _in_features, out_features, _steps, _parts = sizes
    _starts_ptr, slots_ptr, weights_ptr, bias_ptr, out_ptr = pointers
    _scale_ptr, _zero_ptr, factor_ptr = scaling
    HALVES: gl.constexpr = _halves(ACTIVATION)
    OWN: gl.constexpr = _GROUP_OUTS // HALVES
    out = acc * sum_factor(dtype, FORMAT)
    if factor_ptr is not None:
        out *= gl.load(factor_ptr + outs)[:, None]
    if bias_ptr is not None:
        out += gl.load(bias_ptr + outs).to(gl.float32)[:, None]
    up = out
    if HALVES == 2:
        parted = gl.permute(gl.reshape(out, [4, 2, 8, acc.shape[1]]), (0, 2, 3, 1))
        out, up = gl.split(gl.reshape(parted, [OWN, acc.shape[1], 2]))
    out = activate(out, up, dtype, ACTIVATION)
    rows = row + gl.arange(0, acc.shape[1], gl.SliceLayout(0, out.type.layout))
    own = first_out + gl.arange(0, OWN, gl.SliceLayout(1, out.type.layout))
    is_row = rows < stop
    if slots_ptr is not None:
        rows = gl.load(slots_ptr + rows, mask=is_row, other=0)
        out *= gl.load(weights_ptr + rows, mask=is_row, other=0.0)[None, :]
    places = (rows.to(gl.int64) + part * num_rows) * out_features
    mask = (own < out_features)[:, None] & is_row[None, :]
    gl.store(out_ptr + places[None, :] + own[:, None], out.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _multiply_tiles(
    GROUP: gl.constexpr, pointers, scaling, sizes, buffers,
    ACTIVATION: gl.constexpr, SCALE_INS: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """Run one warpgroup: multiply and store 64 weight rows of each tile."""
    num_experts, num_rows, in_features, out_features, steps, parts = sizes
    starts_ptr, _slots_ptr, _weights_ptr, _bias_ptr, _out_ptr = pointers
    scale_ptr, zero_ptr, _factor_ptr = scaling
    xs, packed, _full, _empty = buffers
    dtype: gl.constexpr = xs.dtype
    ROWS: gl.constexpr = xs.shape[1]
    INS: gl.constexpr = xs.shape[2]
    HALVES: gl.constexpr = _halves(ACTIVATION)
    GROUPS: gl.constexpr = packed.shape[0] // xs.shape[0]
    OUTS: gl.constexpr = GROUPS * _GROUP_OUTS // HALVES
    OUT: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
    columns = gl.cdiv(out_features, OUTS)
    steps_before, first_tile, tile = 0, 0, gl.program_id(0)
    for expert in range(num_experts):
        start, stop = _rows_of(starts_ptr, expert, num_rows)
        row_tiles = gl.cdiv(stop - start, ROWS)
        end_tile = first_tile + row_tiles * columns * parts
        while tile < end_tile:
            index = tile - first_tile
            row, column = start + index % row_tiles * ROWS, index // row_tiles
            part, first_out = column // columns, column % columns * OUTS + GROUP * (_GROUP_OUTS // HALVES)
            outs = _outputs(first_out, out_features, OUT, HALVES == 2) + expert * out_features * HALVES
            acc = _multiply_tile(
                GROUP, part * steps * INS, steps, in_features, outs, scale_ptr, zero_ptr, steps_before, buffers, HALVES,
                SCALE_INS, FORMAT,
            )  # fmt: skip
            steps_before += steps
            _store_tile(acc, part, row, stop, first_out, outs, sizes, pointers, scaling, dtype, ACTIVATION, FORMAT)
            tile += gl.num_programs(0)
        first_tile = end_tile


@kernel(do_not_specialize=["num_rows", "steps", "parts"])
def _hopper_four_bit_kernel(
    x_desc, packed_desc, starts_ptr, slots_ptr, weights_ptr, bias_ptr, out_ptr, num_experts, num_rows, in_features,
    out_features, steps, parts, scale_ptr, zero_ptr, factor_ptr,
    ROWS: gl.constexpr, INS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr,
    SCALE_INS: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, INS], x_desc.layout)
    packed = gl.allocate_shared_memory(gl.int16, [STAGES * GROUPS, _GROUP_OUTS, INS // 4], packed_desc.layout)
    full, empty = make_barriers(STAGES, GROUPS)
    buffers = (xs, packed, full, empty)
    gdc_wait()
    gdc_launch_dependents()
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    sizes = (num_experts, num_rows, in_features, out_features, steps, parts)
    pointers = (starts_ptr, slots_ptr, weights_ptr, bias_ptr, out_ptr)
    scaling = (scale_ptr, zero_ptr, factor_ptr)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_tiles, (FIRST, pointers, scaling, sizes, buffers, ACTIVATION, SCALE_INS, FORMAT)),
                (_multiply_tiles, (SECOND, pointers, scaling, sizes, buffers, ACTIVATION, SCALE_INS, FORMAT)),
                (_load_tiles, (x_desc, packed_desc, starts_ptr, sizes, buffers, _halves(ACTIVATION))),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_tiles, (FIRST, pointers, scaling, sizes, buffers, ACTIVATION, SCALE_INS, FORMAT)),
                (_multiply_tiles, (SECOND, pointers, scaling, sizes, buffers, ACTIVATION, SCALE_INS, FORMAT)),
                (_multiply_tiles, (THIRD, pointers, scaling, sizes, buffers, ACTIVATION, SCALE_INS, FORMAT)),
                (_load_tiles, (x_desc, packed_desc, starts_ptr, sizes, buffers, _halves(ACTIVATION))),
            ],
            worker_num_warps=[4, 4, 1],
            worker_num_regs=[160, 160, 24],
        )


class HopperTile(NamedTuple):
    """Rows of a tile, inputs of a step, and warpgroups, each of 64 weight rows; if gated, half of them the gate's."""

    rows: int
    ins: int = 128
    groups: int = 2

    @property
    def stage_bytes(self) -> int:
        """Bytes of a step's inputs and weights."""
        return (2 * self.rows + _GROUP_OUTS.value * self.groups // 2) * self.ins


_TILES = (
    *(HopperTile(rows, groups=groups) for rows in (32, 64, 128) for groups in (2, 3)), HopperTile(256, ins=64)
)  # fmt: skip
_BARRIER_BYTES = 2048


def choose_tile(num_rows: int, num_outs: int, parts: int, num_experts: int, num_programs: int) -> HopperTile:
    """Return the tile whose programs take the least time; num_rows: of each expert; num_outs: weight rows."""

    def cost(tile: HopperTile) -> tuple[float, int]:
        tiles = num_experts * ceil(num_rows / tile.rows) * ceil(num_outs / (64 * tile.groups)) * parts
        # Widening a weight takes as long as its products with 90 rows, and a third warpgroup hides some of that.
        groups = {2: 2, 3: 2.7}[tile.groups]
        return ceil(tiles / num_programs) * groups * (tile.rows + 90), -tile.rows * tile.groups

    # Beside what finds an expert's tiles, the two largest have no registers left.
    return min(_TILES if num_experts == 1 else _TILES[:-2], key=cost)


def choose_linear_tile(num_rows: int, num_outs: int, parts: int, num_programs: int) -> HopperTile:
    """Return the tile of a linear layer; it changes where `KernelPolicy.four_bit_rows` says."""
    most = next((rows for rows in (32, 64, 128, 256) if num_rows <= rows), MAX_HOPPER_FOUR_BIT_ROWS)
    tile = choose_tile(most, num_outs, parts, 1, num_programs)
    return tile._replace(ins=256) if tile.rows <= 64 and parts == 1 else tile


def multiply_rows(
    x: torch.Tensor, weight: FourBitMatrix, bias: torch.Tensor | None, out: torch.Tensor, activation: Activation | None,
    *, tile: HopperTile, parts: int = 1, starts: torch.Tensor | None = None, slots: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Multiply 16-bit rows with a matrix, or with the matrices of experts, each from its start on.

    slots, weights: of the rows, where outputs go to slots, and are weighted.
    """
    assert x.is_contiguous() and weight.values.is_contiguous() and weight.scales.is_contiguous()
    num_processors, shared_bytes = device_limits(x.device)
    packed = weight.values.flatten(0, -2).view(torch.int16)
    box = _GROUP_OUTS.value // (2 if is_gated(activation) else 1)
    _hopper_four_bit_kernel[(num_processors,)](
        descriptor(x, [tile.rows, tile.ins]), descriptor(packed, [box, tile.ins // 4]),
        starts, slots, weights, bias, out, 1 if starts is None else len(starts) - 1, len(x), x.shape[1], out.shape[-1],
        ceil(x.shape[1] / (tile.ins * parts)), parts, ROWS=tile.rows, INS=tile.ins, GROUPS=tile.groups,
        STAGES=min(12, (shared_bytes - _BARRIER_BYTES) // tile.stage_bytes), ACTIVATION=activation, num_warps=4,
        launch_pdl=True, **weight.scaling,
    )  # fmt: skip


def hopper_four_bit_gemm(
    x: torch.Tensor, weight: FourBitMatrix, bias: torch.Tensor | None = None, gated: bool = False,
    *, parts: int = 1, tile: HopperTile | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute `norm_linear` of 16-bit rows without a norm; the inputs must be a multiple of RUN.

    With parts, which have whole steps of inputs, outputs are the parts of a sum, [parts, num_rows, out_features]
    float32, without bias or gate.
    """
    num_rows, out_features = len(x), len(weight.values) // (2 if gated else 1)
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if parts > 1:
        assert bias is None and not gated
        out = torch.empty(parts, num_rows, out_features, dtype=torch.float32, device=x.device)
    tile = tile or choose_linear_tile(num_rows, len(weight.values), parts, device_limits(x.device)[0])
    assert parts == 1 or x.shape[1] % (parts * tile.ins) == 0
    multiply_rows(x, weight, bias, out, "silu" if gated else None, tile=tile, parts=parts)
    return out
