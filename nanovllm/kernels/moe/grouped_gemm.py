"""The experts of many rows: rows sorted by expert, then one persistent product over the tiles of all experts.

How many rows an expert has is known on the device alone. Neither the grid nor a shape depends on it. Beside weights in
e4m3 rows are either 16 or 32 bits wide, or e4m3, too; of the latter sums are made as in `scaled_gemm`.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch

from nanovllm.kernels._triton import device_limits, is_hopper, jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.e4m3 import Fp8Matrix, kernel_arguments
from nanovllm.kernels.four_bits import FourBitMatrix
from nanovllm.kernels.linear.quantize_rows import Fp8Rows
from nanovllm.kernels.linear.scaled_gemm import multiply_scaled
from nanovllm.kernels.moe.activation import Activation, activate, is_gated
from nanovllm.kernels.moe.expert_gemm import find_scales, multiply_expert
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.policy import EXPERT_TILE_ROWS, FASTEST, FP8_INS, KernelPolicy

_CHUNK = 512
"""Slots per program: few enough that they are placed soon, and enough that the counts of all chunks are read soon."""
_STEP_CELLS = 8192
"""Cells per step, (slot, expert) where slots are placed and (chunk, expert) where counts are added up."""


class SortedSlots(NamedTuple):
    """The (row, choice) pairs, `row * top_k + choice`, by expert.

    Attributes:
        slots: [num_rows * top_k] int32; the slots of this rank's experts, in order.
        starts: [num_experts + 1] int32, where each expert's begin, and where the last one's end.
    """

    slots: torch.Tensor
    starts: torch.Tensor


@jit
def _load_experts(experts_ptr, slots, num_slots, first_expert, num_experts, EXPERTS: tl.constexpr):
    """Return the slots' experts, counted from the first of this rank; EXPERTS for experts of other ranks."""
    experts = tl.load(experts_ptr + slots, mask=slots < num_slots, other=-1) - first_expert
    is_here = (slots < num_slots) & (experts >= 0) & (experts < num_experts)
    return tl.where(is_here, experts, EXPERTS)


@jit(do_not_specialize=["num_slots", "first_expert", "num_experts"])
def _count_slots_kernel(
    experts_ptr, counts_ptr, num_slots, first_expert, num_experts,
    CHUNK: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slots, bins = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), tl.arange(0, 2 * EXPERTS)
    wait_for_previous(PDL)
    experts = _load_experts(experts_ptr, slots, num_slots, first_expert, num_experts, EXPERTS)
    counts = tl.histogram(experts, 2 * EXPERTS)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + bins, counts, mask=bins < EXPERTS)


@jit(do_not_specialize=["num_slots", "first_expert", "num_experts"])
def _place_slots_kernel(
    experts_ptr, counts_ptr, slots_ptr, starts_ptr, num_slots, first_expert, num_experts,
    CHUNK: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk, step, experts = tl.program_id(0), tl.arange(0, STEP), tl.arange(0, EXPERTS)
    totals = tl.zeros([EXPERTS], dtype=tl.int32)
    places = tl.zeros([EXPERTS], dtype=tl.int32)
    wait_for_previous(PDL)
    for start in range(0, tl.num_programs(0), STEP):
        chunks = (start + step)[:, None]
        counts = tl.load(counts_ptr + chunks * EXPERTS + experts[None, :], mask=chunks < tl.num_programs(0), other=0)
        totals += tl.sum(counts, axis=0)
        places += tl.sum(tl.where(chunks < chunk, counts, 0), axis=0)
    stops = tl.cumsum(totals, axis=0)
    if chunk == 0:
        tl.store(starts_ptr + experts, stops - totals, mask=experts < num_experts)
        tl.store(starts_ptr + num_experts, tl.sum(totals, axis=0))
    places += stops - totals
    for start in range(0, CHUNK, STEP):
        slots = chunk * CHUNK + start + step
        chosen = _load_experts(experts_ptr, slots, num_slots, first_expert, num_experts, EXPERTS)
        is_chosen = (chosen[:, None] == experts[None, :]).to(tl.int32)
        ranks = tl.cumsum(is_chosen, axis=0)
        own = tl.sum(is_chosen * (places[None, :] + ranks - 1), axis=1)
        tl.store(slots_ptr + own, slots, mask=chosen < EXPERTS)
        places += tl.sum(is_chosen, axis=0)


def sort_slots(routing: Routing, first_expert: int, num_experts: int) -> SortedSlots:
    """Sort the slots of `num_experts` experts from the first one on."""
    device, num_slots = routing.experts.device, routing.experts.numel()
    experts, num_chunks = max(16, triton.next_power_of_2(num_experts)), triton.cdiv(num_slots, _CHUNK)
    counts = torch.empty(num_chunks, experts, dtype=torch.int32, device=device)
    slots = torch.empty(num_slots, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    _count_slots_kernel[(num_chunks,)](
        routing.experts, counts, num_slots, first_expert, num_experts, CHUNK=_CHUNK, EXPERTS=experts,
        num_warps=4, **pdl_options(device),
    )  # fmt: skip
    _place_slots_kernel[(num_chunks,)](
        routing.experts, counts, slots, starts, num_slots, first_expert, num_experts, CHUNK=_CHUNK, EXPERTS=experts,
        STEP=min(_CHUNK, max(16, _STEP_CELLS // experts)), num_warps=8, **pdl_options(device),
    )  # fmt: skip
    return SortedSlots(slots, starts)


class Tile(NamedTuple):
    """Rows of one expert, rows of its weight (if gated, half are the gate's), bytes of inputs a step, warps, stages."""

    rows: int
    outs: int
    step_bytes: int
    warps: int
    stages: int = 4

    @property
    def stage_bytes(self) -> int:
        """Bytes of a step's inputs and weights."""
        return (self.rows + self.outs) * self.step_bytes


_FEW, _SOME, _MANY, _MOST = EXPERT_TILE_ROWS
Tiles = dict[float, Tile]
_TILES: Tiles = {
    _FEW: Tile(16, 64, 256, 4), _SOME: Tile(32, 64, 256, 4), _MANY: Tile(64, 128, 128, 4), inf: Tile(128, 128, 128, 8)
}  # fmt: skip
_HOPPER_TILES: Tiles = {**_TILES, inf: Tile(128, 256, 128, 8)}
"""Only Hopper's tensor cores, which read from shared memory, have registers left for the larger one."""
_FLOAT32_TILES: Tiles = {_FEW: Tile(16, 64, 256, 8), _SOME: Tile(32, 64, 256, 8), inf: Tile(64, 128, 128, 8)}
_CONVERTING_TILES: Tiles = {inf: Tile(32, 64, 128, 4)}
"""For rows of 32 bits beside weights in e4m3, which have registers for their conversion in small tiles only."""
_FP8_TILES: Tiles = {
    _FEW: Tile(16, 128, FP8_INS, 4), _SOME: Tile(32, 128, FP8_INS, 4), _MANY: Tile(64, 128, FP8_INS, 8),
    inf: Tile(128, 128, FP8_INS, 8),
}  # fmt: skip
"""For rows in e4m3; with up to 64, weights are the first operand. A step's sums have their own registers."""
_HOPPER_FP8_TILES: Tiles = {
    _FEW: _FP8_TILES[_FEW], _SOME: Tile(16, 128, FP8_INS, 4, 3), _MOST: Tile(64, 256, FP8_INS, 8), inf: _FP8_TILES[inf]
}  # fmt: skip
_HOPPER_GATED_FP8_TILES: Tiles = {
    _FEW: _FP8_TILES[_FEW], _SOME: _HOPPER_FP8_TILES[_SOME], _MANY: _HOPPER_FP8_TILES[_MOST], inf: _FP8_TILES[inf]
}  # fmt: skip
_HOPPER_GATED_BLOCKS_TILES: Tiles = {**_HOPPER_GATED_FP8_TILES, inf: Tile(128, 256, FP8_INS, 8, 3)}
"""With a scale for each output, the larger tile has no registers left."""


def choose_tile(x: torch.Tensor, weight: torch.Tensor, rows: float, gated: bool, has_blocks: bool) -> Tile:
    """Return the tile for rows of x's dtype and device, `rows` of each expert on the average, and these weights.

    gated: whether half of the weights are a gate's; has_blocks: whether each block of weights has a scale.
    """
    on_hopper = is_hopper(x.device)
    if x.element_size() == 1 and on_hopper:
        gated_tiles = _HOPPER_GATED_BLOCKS_TILES if has_blocks else _HOPPER_GATED_FP8_TILES
        tiles = gated_tiles if gated else _HOPPER_FP8_TILES
    elif x.element_size() == 1:
        tiles = _FP8_TILES
    elif x.element_size() == 4:
        tiles = _CONVERTING_TILES if weight.element_size() == 1 else _FLOAT32_TILES
    else:
        tiles = _HOPPER_TILES if on_hopper else _TILES
    return next(tile for most, tile in tiles.items() if rows <= most)


@jit
def _multiply_scaled_expert(
    x_ptr, x_scale_ptr, x_rows, weight_ptr, scale_ptr, expert, first_out, in_features, out_features,
    dtype: tl.constexpr, EVEN: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, ACTIVATION: tl.constexpr,
    SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr, ONE_SCALE: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION == "silu"
    ins, num_steps = tl.arange(0, INS), tl.cdiv(in_features, INS)
    # What lies beyond the end is computed from what does not, and is not stored.
    outs = tl.minimum(first_out + tl.arange(0, OUTS), out_features - 1)
    size = tl.cast(out_features, tl.int64) * in_features
    weight_ptr += expert * size * (2 if GATED else 1)
    weight_ptrs = weight_ptr + outs.to(tl.int64)[:, None] * in_features + ins[None, :]
    x_ptrs = x_ptr + x_rows.to(tl.int64)[None, :] * in_features + ins[:, None]
    x_scale_ptrs = x_scale_ptr + x_rows * (num_steps if SCALE_INS else 1)
    scale_ptrs, up_scale_ptrs = find_scales(
        scale_ptr, expert, first_out if ONE_SCALE else outs, in_features, out_features, SCALE_OUTS, SCALE_INS, GATED
    )
    WEIGHTS_FIRST: tl.constexpr = x_rows.shape[0] <= 64
    out, up = multiply_scaled(
        x_ptrs, x_scale_ptrs, 1, weight_ptrs, scale_ptrs, weight_ptrs + size, up_scale_ptrs, 0, num_steps, in_features,
        EVEN, WEIGHTS_FIRST, SCALE_INS > 0, GATED,
    )  # fmt: skip
    out = activate(out, up, dtype, ACTIVATION)
    return tl.trans(out) if WEIGHTS_FIRST else out


@jit
def _grouped_gemm_kernel(
    x_ptr, slots_ptr, starts_ptr, scales_ptr, weight_ptr, out_ptr, num_experts, in_features, out_features,
    EVEN: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    INS: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
    scale_ptr=None, SCALE_OUTS: tl.constexpr = 0, SCALE_INS: tl.constexpr = 0, NATIVE: tl.constexpr = False,
    x_scale_ptr=None, ONE_SCALE: tl.constexpr = False,
    zero_ptr=None, factor_ptr=None, FORMAT: tl.constexpr = None, bias_ptr=None,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    IS_FIRST: tl.constexpr = ACTIVATION is not None
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    if IS_FIRST:
        wait_for_previous(PDL)
    starts = tl.load(starts_ptr + experts, mask=is_expert, other=0)
    stops = tl.load(starts_ptr + experts + 1, mask=is_expert, other=0)
    if not IS_FIRST:
        wait_for_previous(PDL)
    columns = tl.cdiv(out_features, OUTS)
    # An expert's tiles are computed one after the other, so that they find each other's weights and rows in the cache.
    tiles = tl.where(is_expert, tl.cdiv(stops - starts, ROWS), 0)
    tile_stops = tl.cumsum(tiles, axis=0) * columns
    for tile in range(tl.program_id(0), tl.sum(tiles, axis=0) * columns, tl.num_programs(0)):
        expert = tl.sum((tile_stops <= tile).to(tl.int32), axis=0)
        is_this = experts == expert
        row_tiles = tl.sum(tl.where(is_this, tiles, 0), axis=0)
        tile_start = tl.sum(tl.where(is_this, tile_stops, 0), axis=0) - row_tiles * columns
        start = tl.sum(tl.where(is_this, starts, 0), axis=0)
        stop = tl.sum(tl.where(is_this, stops, 0), axis=0)
        places = start + (tile - tile_start) % row_tiles * ROWS + tl.arange(0, ROWS)
        first_out = (tile - tile_start) // row_tiles * OUTS
        outs = first_out + tl.arange(0, OUTS)
        row_mask = places < stop
        slots = tl.load(slots_ptr + places, mask=row_mask, other=0)
        x_rows = slots // TOP_K if IS_FIRST else places
        out_rows = places if IS_FIRST else slots
        if x_scale_ptr is None:
            out = multiply_expert(
                x_ptr + x_rows.to(tl.int64) * in_features, row_mask, weight_ptr, expert, outs, in_features,
                out_features, dtype, EVEN, INS, ACTIVATION, scale_ptr, SCALE_OUTS, SCALE_INS, NATIVE,
                zero_ptr, factor_ptr, FORMAT, bias_ptr,
            )  # fmt: skip
        else:
            x_rows = tl.where(row_mask, x_rows, 0)
            out = _multiply_scaled_expert(
                x_ptr, x_scale_ptr, x_rows, weight_ptr, scale_ptr, expert, first_out, in_features, out_features,
                dtype, EVEN, OUTS, INS, ACTIVATION, SCALE_OUTS, SCALE_INS, ONE_SCALE,
            )  # fmt: skip
        if not IS_FIRST:
            out *= tl.load(scales_ptr + slots, mask=row_mask, other=0.0)[:, None]
        mask = row_mask[:, None] & (outs < out_features)[None, :]
        tl.store(out_ptr + out_rows.to(tl.int64)[:, None] * out_features + outs[None, :], out.to(dtype), mask=mask)


def grouped_gemm(
    x: torch.Tensor | Fp8Rows, routing: Routing, order: SortedSlots, weight: torch.Tensor | Fp8Matrix | FourBitMatrix,
    out: torch.Tensor, activation: Activation | None, policy: KernelPolicy = FASTEST,
    *, bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Multiply rows with the weights of their experts: the first ones, or down; see `expert_gemm`.

    Args:
        x: [num_tokens, in_features], or for down [num_tokens * top_k, in_features], sorted; contiguous. Rows in e4m3
            have a scale each, or one for 128 inputs if the weights, which are e4m3, too, have blocks of these.
        order: the slots by expert; for down from an older kernel than the one ahead.
        out: [num_tokens * top_k, out_features]; filled where the expert is here. Sorted; for down by slot, weighted.
        bias: of all experts' products, not of rows in e4m3.
    """
    (num_rows, top_k), gated = routing.experts.shape, is_gated(activation)
    values, scaling = kernel_arguments(weight)
    weight = weight.values if isinstance(weight, Fp8Matrix) and isinstance(x, Fp8Rows) else values
    if isinstance(x, Fp8Rows):
        scaling["x_scale_ptr"], x = x.scales, x.values
    num_experts, in_features, out_features = len(weight), x.shape[-1], out.shape[-1]
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    rows_per_expert = policy.rows_per_expert(routing.experts.numel(), routing.num_experts)
    tile = choose_tile(x, weight, rows_per_expert, gated, has_blocks=bool(scaling.get("SCALE_INS")))
    outs, ins = tile.outs // 2 if gated else tile.outs, tile.step_bytes // x.element_size()
    if "x_scale_ptr" in scaling:
        # All outputs of a tile are in one block.
        is_even = FP8_INS % outs == 0 and (not gated or out_features % FP8_INS == 0)
        scaling["ONE_SCALE"] = scaling["SCALE_INS"] > 0 and scaling["SCALE_OUTS"] == FP8_INS and is_even
    num_processors, shared_bytes = device_limits(x.device)
    stages = max(1, min(tile.stages, shared_bytes // tile.stage_bytes))
    most_tiles = (num_experts + num_rows * top_k // tile.rows) * triton.cdiv(out_features, outs)
    # Products of fewer than 64 rows on a warpgroup's tensor cores hold a stage in registers.
    buffers = stages if tile.rows >= 64 or x.element_size() == 1 else stages - 1
    resident = num_processors * max(1, shared_bytes // (max(1, buffers) * tile.stage_bytes))
    _grouped_gemm_kernel[(max(1, min(most_tiles, resident)),)](
        x, order.slots, order.starts, routing.weights, weight, out, num_experts, in_features, out_features,
        EVEN=in_features % ins == 0, EXPERTS=triton.next_power_of_2(num_experts), TOP_K=top_k, ROWS=tile.rows,
        OUTS=outs, INS=ins, ACTIVATION=activation, num_warps=tile.warps, num_stages=stages, bias_ptr=bias,
        **pdl_options(x.device), **scaling,
    )  # fmt: skip
