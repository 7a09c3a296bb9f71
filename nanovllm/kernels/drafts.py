"""Rows of several tokens, the newest and drafts of the next ones: their inputs, and the verification of the drafts.

A draft is right if it is the token that is sampled in its place: noise depends on the request's seed and the output's
index alone, so the tokens are the ones that one step after another would sample (compare Leviathan et al. 2022,
arXiv:2211.17192, which changes the sampler instead). Keys of wrong drafts stay where the next step stores its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, tl, triton, uses_triton
from nanovllm.kernels.slot_tensors import DecodeRows, SlotTensors

_LOOKUP_TOKENS = 1024
"""Tokens of a text that a program of `_ngram_drafts_kernel` compares at once."""


@dataclass
class DraftedRows(DecodeRows):
    """Rows of 1 + num_drafts tokens each; what `DecodeRows` has for each row it has for each token, in row order.

    But `seq_lens` and `block_tables` are each row's: its tokens up to the row's last, and its blocks.

    Attributes:
        is_new: [num_rows, 1 + num_drafts] bool; tokens that exist. They come last in a row, so that its keys end with
            them; the others are computed for nothing, and their `slot_mapping` is -1.
    """

    is_new: torch.Tensor


def gather_drafted_rows(state: SlotTensors, slots: torch.Tensor, num_new: torch.Tensor, block_size: int) -> DraftedRows:
    """Gather rows with all drafts; slots: [num_rows] int32, the last slot for padding; num_new: [num_rows], at most."""
    slots = slots.long()
    first, drafts = state.num_computed[slots], state.drafts[slots]
    tokens = torch.cat((state.last_token[slots].unsqueeze(1), drafts.clamp(min=0)), 1)
    per_row = tokens.shape[1]
    columns = torch.arange(per_row, dtype=torch.int32, device=slots.device)
    # Drafts come before the ones that are missing. A row of padding is whole, so that its keys begin at 0.
    num_real = torch.minimum(num_new, 1 + (drafts >= 0).sum(1, dtype=torch.int32))
    is_row = slots != len(state.last_token) - 1
    num_real = num_real.where(is_row, per_row).unsqueeze(1)
    is_new = columns >= per_row - num_real
    ahead = (columns - per_row + num_real).clamp(min=0)
    positions = first.unsqueeze(1) + ahead
    block_tables = state.block_tables[slots].transpose(0, 1).contiguous()
    index = (positions // block_size).long().expand(len(block_tables), -1, -1)
    places = block_tables.gather(2, index) * block_size + positions % block_size
    per_token = slots.repeat_interleave(per_row, output_size=len(slots) * per_row)
    return DraftedRows(
        is_new=is_new,
        token_ids=tokens.gather(1, ahead.long()).flatten(),
        positions=positions.flatten(),
        slot_mapping=places.where(is_new & is_row.unsqueeze(1), -1).flatten(1),
        seq_lens=first + num_real.squeeze(1),
        output_index=positions.flatten() + 1 - state.num_prompt[per_token],
        temperatures=state.temperature[per_token],
        seeds=state.seed[per_token],
        block_tables=block_tables,
    )


def verify_drafts(
    state: SlotTensors, slots: torch.Tensor, is_new: torch.Tensor, sampled: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the leading drafts that equal what was sampled in their place, and write the outcome into the slots.

    slots, is_new: see `gather_drafted_rows`; sampled: [num_rows, 1 + num_drafts] int64, the token after each. Returns
    the number of tokens that each row gained, [num_rows] int64, at least 1: the first of those that are new; and
    `sampled` with what is new first.
    """
    slots, per_row = slots.long(), sampled.shape[1]
    columns = torch.arange(per_row, device=slots.device)
    num_real = is_new.sum(1, keepdim=True)
    sampled = sampled.gather(1, (columns + per_row - num_real).clamp(max=per_row - 1))
    is_right = (columns[1:] < num_real) & (sampled[:, :-1] == state.drafts[slots])
    num_right = is_right.long().cumprod(1).sum(1)
    state.last_token[slots] = sampled.gather(1, num_right.unsqueeze(1)).squeeze(1).int()
    is_row = slots != len(state.last_token) - 1
    state.num_computed[slots] += ((num_right + 1) * is_row).int()
    return num_right + 1, sampled


def ngram_drafts_ref(state: SlotTensors, history: torch.Tensor, slots: torch.Tensor, lookup: tuple[int, int]) -> None:
    """Plain torch form of `ngram_drafts`."""
    shortest, longest = lookup
    num_drafts = state.drafts.shape[1]
    for slot in slots.tolist():
        end = int(state.num_computed[slot]) + 1
        text = history[slot, :end]
        place, most = -1, shortest - 1
        for start in range(end - 1):
            length = 0
            while length < min(longest, start + 1) and text[start - length] == text[end - 1 - length]:
                length += 1
            if length >= max(most, shortest):
                place, most = start, length
        if place < 0:
            state.drafts[slot] = -1
        else:
            # What follows the newest tokens is taken to be what follows the match, and then the match again.
            ahead = torch.arange(num_drafts, device=text.device) % (end - 1 - place)
            state.drafts[slot] = text[place + 1 + ahead]


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
        # The longest, and of equal ones the last.
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
