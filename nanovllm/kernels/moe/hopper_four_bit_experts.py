"""The experts of many rows with weights in four bits on Hopper, by the kernel of linear layers.

It copies tiles of inputs by TMA, whose rows must be next to each other: for the first product they are gathered before.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import device_limits, jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.four_bits import FourBitMatrix
from nanovllm.kernels.linear.hopper_four_bit_gemm import HopperTile, choose_tile, multiply_rows
from nanovllm.kernels.moe.activation import Activation
from nanovllm.kernels.moe.grouped_gemm import SortedSlots
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.policy import EXPERT_TILE_ROWS, FASTEST, KernelPolicy


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
