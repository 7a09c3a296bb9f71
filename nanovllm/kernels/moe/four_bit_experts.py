"""Experts with weights in four bits, by the products of linear layers: of few rows, and on Hopper of more.

Of few rows there is, as in `expert_gemm`, a program for each tile of outputs and each (row, choice), whose first of an
expert computes all its rows, or for each expert if nine rows' choices are more; the others end at once. Of more rows
tiles of inputs are copied by TMA, which takes rows next to each other: for the first product they are gathered before.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._gluon import barrier, gl, gluon, kernel
from nanovllm.kernels._triton import device_limits, jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.four_bits import RUN, FourBitMatrix
from nanovllm.kernels.linear.hopper_four_bit_gemm import HopperTile, choose_tile, multiply_rows
from nanovllm.kernels.linear.skinny_four_bit_gemm import (
    SkinnyTile,
    load_of_outputs,
    load_steps,
    multiply_tile,
    outputs_and_ups,
    row_layout,
    row_ptrs,
    weight_sources,
)
from nanovllm.kernels.moe.activation import Activation, activate, is_gated
from nanovllm.kernels.moe.grouped_gemm import SortedSlots
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.policy import EXPERT_TILE_ROWS, FASTEST, MAX_EXPERT_ROWS, KernelPolicy


@gluon.jit
def _rows_of_expert(
    experts_ptr, expert, slot, num_rows, ROWS: gl.constexpr, TOP_K: gl.constexpr, CHOICES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Return the slots of rows that have an expert, [ROWS], -1 of others; and how many are before a slot."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, CHOICES], [32, 1], [WARPS, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    choices = gl.arange(0, CHOICES, gl.SliceLayout(0, LAYOUT))[None, :]
    slots = rows * TOP_K + choices
    chosen = gl.load(experts_ptr + slots, mask=(rows < num_rows) & (choices < TOP_K), other=-1)
    has_expert = chosen == expert
    num_earlier = gl.sum(gl.sum((has_expert & (slots < slot)).to(gl.int32), axis=1), axis=0)
    return gl.max(gl.where(has_expert, slots, -1), axis=1), num_earlier


@gluon.jit
def _some_slots(slots, first, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Return eight of the slots that are not -1, from the one of number `first` on; -1 after the last."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    own = gl.convert_layout(slots, gl.SliceLayout(1, PAIRS))
    others = gl.convert_layout(slots, gl.SliceLayout(0, PAIRS))
    is_before = gl.arange(0, ROWS, gl.SliceLayout(0, PAIRS))[None, :] < gl.arange(0, ROWS, own.type.layout)[:, None]
    number = gl.sum((is_before & (others >= 0)[None, :]).to(gl.int32), axis=1)
    columns = first + gl.arange(0, 8, gl.SliceLayout(0, PAIRS))
    is_column = (number[:, None] == columns[None, :]) & (own >= 0)[:, None]
    return gl.max(gl.where(is_column, own[:, None], -1), axis=0)


@kernel(do_not_specialize=["num_rows", "first_expert"])
def _skinny_experts_kernel(
    x_ptr, experts_ptr, weights_ptr, words_ptr, bias_ptr, out_ptr, num_rows, first_expert, num_experts, out_features,
    scale_ptr, zero_ptr, factor_ptr,
    IN: gl.constexpr, WARPS: gl.constexpr, STEPS: gl.constexpr, OUTS: gl.constexpr, ROWS: gl.constexpr,
    TOP_K: gl.constexpr, CHOICES: gl.constexpr, BY_EXPERT: gl.constexpr, ACTIVATION: gl.constexpr,
    GATED: gl.constexpr, SCALE_INS: gl.constexpr, FORMAT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    IS_FIRST: gl.constexpr = ACTIVATION is not None
    HAS_ZEROS: gl.constexpr = zero_ptr is not None
    first_out, slot = gl.program_id(0) * (OUTS // 2 if GATED else OUTS), gl.program_id(1)
    if IS_FIRST:
        wait_for_previous(PDL)
    expert = slot if BY_EXPERT else gl.load(experts_ptr + slot) - first_expert
    slots, num_earlier = _rows_of_expert(
        experts_ptr, expert + first_expert, 0 if BY_EXPERT else slot, num_rows, ROWS, TOP_K, CHOICES, WARPS
    )
    count = gl.sum((slots >= 0).to(gl.int32), axis=0)
    if (num_earlier == 0) & (expert >= 0) & (expert < num_experts):
        first_row = expert.to(gl.int64) * out_features * (2 if GATED else 1)
        # Seldom more than eight rows have an expert.
        for block in range(gl.cdiv(count, 8) if ROWS > 8 else 1):
            sources = weight_sources(
                words_ptr, scale_ptr, zero_ptr, first_row, first_out, out_features,
                IN, WARPS, OUTS, GATED, SCALE_INS, FORMAT,
            )  # fmt: skip
            loaded = load_steps(sources, 0, IN // 32, STEPS, WARPS, HAS_ZEROS, SCALE_INS, FORMAT)
            factors = load_of_outputs(factor_ptr, 1.0, first_row, first_out, out_features, WARPS, OUTS, GATED)
            biases = load_of_outputs(bias_ptr, 0.0, first_row, first_out, out_features, WARPS, OUTS, GATED)
            if not IS_FIRST:
                wait_for_previous(PDL)
            # The compiler must not move the loads to where they are needed.
            barrier()
            own = slots
            if ROWS > 8:
                own = _some_slots(slots, block * 8, ROWS, WARPS)
            places = gl.maximum(gl.convert_layout(own, row_layout(WARPS)), 0)
            x = row_ptrs(x_ptr, places // TOP_K if IS_FIRST else places, IN)
            acc, _loaded = multiply_tile(
                sources, sources, 0, loaded, x, OUTS, 8, IN, WARPS, 0, False, HAS_ZEROS, SCALE_INS, FORMAT
            )
            out, up = outputs_and_ups(acc, factors, biases, dtype, GATED, FORMAT)
            out = activate(out, up, dtype, ACTIVATION)
            stored = gl.convert_layout(own, gl.SliceLayout(0, out.type.layout))
            if not IS_FIRST:
                out *= gl.load(weights_ptr + stored, mask=stored >= 0, other=0.0)[None, :]
            outs = first_out + gl.arange(0, out.shape[0], gl.SliceLayout(1, out.type.layout))
            mask = (outs < out_features)[:, None] & (stored >= 0)[None, :]
            ptrs = out_ptr + stored.to(gl.int64)[None, :] * out_features + outs[:, None]
            gl.store(ptrs, out.to(dtype), mask=mask)
    elif not IS_FIRST:
        wait_for_previous(PDL)


def skinny_four_bit_experts(
    x: torch.Tensor, routing: Routing, weight: FourBitMatrix, out: torch.Tensor, first_expert: int,
    activation: Activation | None, bias: torch.Tensor | None = None,
    *, tile: SkinnyTile | None = None,
) -> None:  # fmt: skip
    """Compute `expert_gemm` of 16-bit rows and weights in four bits; their inputs must be a multiple of RUN."""
    num_rows, top_k = routing.experts.shape
    in_features, out_features, gated = x.shape[-1], out.shape[-1], is_gated(activation)
    values, is_narrow = weight.values, num_rows <= 8
    assert num_rows <= MAX_EXPERT_ROWS and x.is_contiguous() and values.is_contiguous() and out.is_contiguous()
    assert in_features % RUN == 0
    tile = tile or SkinnyTile(16, 4, 8, registers=128 if is_narrow else 168)
    # Alike for all numbers of rows for which the rest is, so that few kernels are compiled.
    by_expert = not is_narrow and 9 * top_k > len(values)
    programs = len(values) if by_expert else num_rows * top_k
    grid = triton.cdiv(out_features, tile.outs // 2 if gated else tile.outs), programs
    _skinny_experts_kernel[grid](
        x, routing.experts, routing.weights, values.view(torch.int32), bias, out, num_rows, first_expert, len(values),
        out_features, IN=in_features, WARPS=tile.num_warps,
        STEPS=min(tile.steps, triton.cdiv(in_features, tile.num_warps * 4 * RUN)), OUTS=tile.outs,
        ROWS=8 if is_narrow else 16, TOP_K=top_k, CHOICES=triton.next_power_of_2(top_k),
        BY_EXPERT=by_expert, ACTIVATION=activation, GATED=gated, num_warps=tile.num_warps,
        maxnreg=tile.registers, **pdl_options(x.device), **weight.scaling,
    )  # fmt: skip


@jit
def _gather_kernel(
    x_ptr, slots_ptr, starts_ptr, out_ptr, num_experts, in_features,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    if tl.program_id(0) < tl.load(starts_ptr + num_experts):
        row = (tl.load(slots_ptr + tl.program_id(0)) // TOP_K).to(tl.int64)
        x = tl.load(x_ptr + row * in_features + columns, mask=columns < in_features)
        place = tl.program_id(0).to(tl.int64) * in_features
        tl.store(out_ptr + place + columns, x, mask=columns < in_features)


def choose_expert_tile(rows_per_expert: float, num_outs: int, num_experts: int, num_programs: int) -> HopperTile:
    """Return the tile for some rows of an expert on average; see `choose_tile`.

    It changes where `KernelPolicy.expert_rows` says, since only kernels for these numbers are compiled at the start.
    """
    most = next((rows for rows in EXPERT_TILE_ROWS if rows_per_expert <= rows), EXPERT_TILE_ROWS[-1])
    return choose_tile(most, num_outs, 1, num_experts, num_programs)


def hopper_four_bit_experts(
    x: torch.Tensor, routing: Routing, order: SortedSlots, weight: FourBitMatrix, out: torch.Tensor,
    activation: Activation | None, policy: KernelPolicy = FASTEST,
    *, bias: torch.Tensor | None = None, tile: HopperTile | None = None,
) -> None:  # fmt: skip
    """Compute `grouped_gemm` of 16-bit rows; their inputs must be a multiple of RUN."""
    top_k, in_features, (num_experts, num_outs) = routing.experts.shape[1], x.shape[-1], weight.values.shape[:2]
    slots, weights = (order.slots, routing.weights) if activation is None else (None, None)
    if activation is not None:
        rows = torch.empty(len(order.slots), in_features, dtype=x.dtype, device=x.device)
        _gather_kernel[(len(rows),)](
            x, order.slots, order.starts, rows, num_experts, in_features, TOP_K=top_k,
            BLOCK=triton.next_power_of_2(in_features), num_warps=4, **pdl_options(x.device),
        )  # fmt: skip
        x = rows
    average = policy.rows_per_expert(routing.experts.numel(), routing.num_experts)
    tile = tile or choose_expert_tile(average, num_outs, num_experts, device_limits(x.device)[0])
    multiply_rows(x, weight, bias, out, activation, tile=tile, starts=order.starts, slots=slots, weights=weights)
