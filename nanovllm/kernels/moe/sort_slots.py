"""The (row, choice) pairs of many rows by expert: counted and placed by two kernels, however many an expert has."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.moe.route import Routing

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
    """Count each expert's slots in one chunk."""
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
    """Place the slots of one chunk after the slots of the experts and chunks before it."""
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
