"""Drafts of a sequence's next tokens, from its own tokens."""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import jit, tl, triton, uses_triton
from nanovllm.kernels.slot_tensors import SlotTensors

_LOOKUP_TOKENS = 1024
"""Tokens of a text that a program of `_ngram_drafts_kernel` compares at once."""


def ngram_drafts_ref(state: SlotTensors, history: torch.Tensor, slots: torch.Tensor, lookup: tuple[int, int]) -> None:
    """Plain torch form of `ngram_drafts`."""
    slots, (shortest, longest) = slots.long(), lookup
    ends = state.num_computed[slots, None] + 1
    text = history[slots, : ends.max()]
    starts = torch.arange(text.shape[1], device=text.device)
    matches, lengths = starts < ends - 1, torch.zeros_like(text, dtype=torch.int64)
    for back in range(longest):
        newest = text.gather(1, (ends - 1 - back).clamp(min=0).long())
        matches = matches & (starts >= back) & (text.roll(back, 1) == newest)
        lengths += matches
    # The longest, and of equal ones the last.
    found, place = (lengths * (lengths >= shortest) * len(starts) + starts).max(1, keepdim=True)
    # What follows the newest tokens is taken to be what follows the match, and then the match again.
    ahead = torch.arange(state.drafts.shape[1], device=text.device) % (ends - 1 - place).clamp(min=1)
    drafts = text.gather(1, (place + 1 + ahead).clamp(max=len(starts) - 1))
    state.drafts[slots] = drafts.where(found >= len(starts), -1)


@jit
def _ngram_drafts_kernel(
    history_ptr, drafts_ptr, num_computed_ptr, slots_ptr, history_stride,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, DRAFTS: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    text_ptr = history_ptr + slot * history_stride
    end = tl.load(num_computed_ptr + slot) + 1
    best = tl.zeros([TOKENS], dtype=tl.int64) - 1
    for first in range(0, end - 1, TOKENS):
        starts = first + tl.arange(0, TOKENS)
        length = tl.zeros([TOKENS], dtype=tl.int32)
        matches = starts < end - 1
        for back in tl.static_range(LONGEST):
            newest = tl.load(text_ptr + tl.maximum(end - 1 - back, 0))
            tokens = tl.load(text_ptr + starts - back, mask=matches & (starts >= back), other=-2)
            matches = matches & (tokens == newest)
            length += matches.to(tl.int32)
        score = (length.to(tl.int64) << 32) | starts.to(tl.int64)
        best = tl.maximum(best, tl.where(length >= SHORTEST, score, -1))
    found = tl.max(best, axis=0)
    place = (found & 0x7FFFFFFF).to(tl.int32)
    ahead = tl.arange(0, PADDED)
    period = tl.maximum(end - 1 - place, 1)
    num_found = tl.where(found >= 0, DRAFTS, 0)
    drafts = tl.load(text_ptr + place + 1 + ahead % period, mask=ahead < num_found, other=-1)
    tl.store(drafts_ptr + slot * DRAFTS + ahead, drafts, mask=ahead < DRAFTS)


def ngram_drafts(state: SlotTensors, history: torch.Tensor, slots: torch.Tensor, lookup: tuple[int, int]) -> None:
    """Draft what followed the longest earlier match of a text's newest tokens (prompt lookup; Saxena 2023).

    Fills the slots' `drafts`, with -1 where nothing matches. history: [num_slots + 1, n] int32, each slot's tokens; the
    first `num_computed` + 1 count; slots: [num_rows] int32; lookup: least and most tokens of a match.
    """
    if not uses_triton(slots.device):
        ngram_drafts_ref(state, history, slots, lookup)
        return
    num_drafts = state.drafts.shape[1]
    _ngram_drafts_kernel[(len(slots),)](
        history, state.drafts, state.num_computed, slots, history.stride(0), SHORTEST=lookup[0], LONGEST=lookup[1],
        DRAFTS=num_drafts, PADDED=triton.next_power_of_2(num_drafts), TOKENS=_LOOKUP_TOKENS, num_warps=4,
    )  # fmt: skip
