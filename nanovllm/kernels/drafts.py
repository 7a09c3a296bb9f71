"""Rows of several tokens, the newest and drafts of the next ones: their inputs, and the verification of the drafts.

A draft is right if it is the token that is sampled in its place: noise depends on the request's seed and the output's
index alone, so single steps would sample the same tokens (compare Leviathan et al. 2022,
arXiv:2211.17192, which changes the sampler instead). Keys of wrong drafts stay where the next step stores its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.slot_tensors import DecodeRows, SlotTensors, empty_rows

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


def gather_drafted_rows_ref(
    state: SlotTensors, slots: torch.Tensor, num_new: torch.Tensor, block_size: int
) -> DraftedRows:
    """Plain torch form of `gather_drafted_rows`."""
    slots = slots.long()
    first, drafts = state.num_computed[slots], state.drafts[slots]
    tokens = torch.cat((state.last_token[slots].unsqueeze(1), drafts.clamp(min=0)), 1)
    per_row = tokens.shape[1]
    columns = torch.arange(per_row, dtype=torch.int32, device=slots.device)
    # Missing drafts come last. A row of padding is whole, so that its keys begin at 0.
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


@jit(do_not_specialize=["group_rows", "group_tokens", "max_blocks", "padding_slot"])
def _gather_drafted_rows_kernel(
    last_token_ptr, num_computed_ptr, num_prompt_ptr, temperature_ptr, seed_ptr, drafts_ptr, tables_ptr, slots_ptr,
    num_new_ptr, token_ids_ptr, positions_ptr, slot_mapping_ptr, seq_lens_ptr, output_index_ptr, temperatures_ptr,
    seeds_ptr, row_tables_ptr, is_new_ptr, group_rows, group_tokens, max_blocks, padding_slot, block_size,
    DRAFTS: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0), tl.program_id(1)
    per_row: tl.constexpr = DRAFTS + 1
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + row)
    table_ptr = tables_ptr + (slot.to(tl.int64) * tl.num_programs(1) + group) * max_blocks
    row_table_ptr = row_tables_ptr + (group * group_rows + row) * max_blocks
    for start in range(0, max_blocks, COLUMNS):
        entries = start + tl.arange(0, COLUMNS)
        tl.store(row_table_ptr + entries, tl.load(table_ptr + entries, mask=entries < max_blocks, other=0),
                 mask=entries < max_blocks)  # fmt: skip
    columns = tl.arange(0, PADDED)
    mask, at = columns < per_row, row * per_row + columns
    drafts = tl.load(drafts_ptr + slot * DRAFTS + columns, mask=columns < DRAFTS, other=-1)
    num_real = tl.minimum(tl.load(num_new_ptr + row), 1 + tl.sum((drafts >= 0).to(tl.int32), axis=0))
    num_real = tl.where(slot == padding_slot, per_row, num_real)
    is_new = columns >= per_row - num_real
    ahead = tl.maximum(columns - per_row + num_real, 0)
    positions = tl.load(num_computed_ptr + slot) + ahead
    blocks = tl.load(table_ptr + positions // block_size, mask=mask, other=0)
    places = tl.where(is_new & (slot != padding_slot), blocks * block_size + positions % block_size, -1)
    tl.store(slot_mapping_ptr + group * group_tokens + at, places, mask=mask)
    # The first group's program writes all that groups share.
    mask = mask & (group + tl.zeros_like(columns) == 0)
    drafts = tl.load(drafts_ptr + slot * DRAFTS + ahead - 1, mask=mask & (ahead > 0), other=0)
    tokens = tl.where(ahead == 0, tl.load(last_token_ptr + slot), tl.maximum(drafts, 0))
    tl.store(token_ids_ptr + at, tokens, mask=mask)
    tl.store(positions_ptr + at, positions, mask=mask)
    tl.store(is_new_ptr + at, is_new.to(tl.uint8), mask=mask)
    tl.store(output_index_ptr + at, positions + 1 - tl.load(num_prompt_ptr + slot), mask=mask)
    tl.store(temperatures_ptr + at, tl.load(temperature_ptr + slot) + tl.zeros_like(columns), mask=mask)
    for word in tl.static_range(2):
        tl.store(seeds_ptr + 2 * at + word, tl.load(seed_ptr + 2 * slot + word) + tl.zeros_like(columns), mask=mask)
    tl.store(seq_lens_ptr + row, tl.load(num_computed_ptr + slot) + num_real, mask=group == 0)


def gather_drafted_rows(state: SlotTensors, slots: torch.Tensor, num_new: torch.Tensor, block_size: int) -> DraftedRows:
    """Gather rows with all drafts; slots: [num_rows] int32, the last slot for padding; num_new: [num_rows], at most."""
    if not uses_triton(slots.device):
        return gather_drafted_rows_ref(state, slots, num_new, block_size)
    num_rows, num_drafts = len(slots), state.drafts.shape[1]
    num_slots, num_groups, max_blocks = state.block_tables.shape
    rows = empty_rows(slots, 1 + num_drafts, num_groups, max_blocks)
    is_new = slots.new_empty(num_rows, 1 + num_drafts, dtype=torch.uint8)
    _gather_drafted_rows_kernel[(num_rows, num_groups)](
        state.last_token, state.num_computed, state.num_prompt, state.temperature, state.seed, state.drafts,
        state.block_tables, slots, num_new, rows.token_ids, rows.positions, rows.slot_mapping, rows.seq_lens,
        rows.output_index, rows.temperatures, rows.seeds, rows.block_tables, is_new,
        rows.block_tables.stride(0) // max_blocks, rows.slot_mapping.stride(0), max_blocks, num_slots - 1, block_size,
        DRAFTS=num_drafts, PADDED=triton.next_power_of_2(1 + num_drafts), COLUMNS=128, num_warps=1,
        **pdl_options(slots.device),
    )  # fmt: skip
    return DraftedRows(**vars(rows), is_new=is_new.view(torch.bool))


def verify_drafts_ref(
    state: SlotTensors, slots: torch.Tensor, is_new: torch.Tensor, sampled: torch.Tensor,
    tokens: torch.Tensor, counts: torch.Tensor,
) -> None:  # fmt: skip
    """Plain torch form of `verify_drafts`."""
    slots, per_row = slots.long(), sampled.shape[1]
    columns = torch.arange(per_row, device=slots.device)
    num_real = is_new.sum(1, keepdim=True)
    tokens.copy_(sampled.gather(1, (columns + per_row - num_real).clamp(max=per_row - 1)))
    is_right = (columns[1:] < num_real) & (tokens[:, :-1] == state.drafts[slots])
    num_right = is_right.long().cumprod(1).sum(1)
    state.last_token[slots] = tokens.gather(1, num_right.unsqueeze(1)).squeeze(1).int()
    is_row = slots != len(state.last_token) - 1
    state.num_computed[slots] += ((num_right + 1) * is_row).int()
    counts[0], counts[1] = num_right + 1, num_real.squeeze(1)


@jit(do_not_specialize=["num_rows", "padding_slot"], unaligned=["sampled_ptr", "tokens_ptr", "counts_ptr"])
def _verify_drafts_kernel(
    last_token_ptr, num_computed_ptr, drafts_ptr, slots_ptr, is_new_ptr, sampled_ptr, tokens_ptr, counts_ptr, num_rows,
    padding_slot, DRAFTS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0), tl.arange(0, PADDED)
    per_row: tl.constexpr = DRAFTS + 1
    mask = columns < per_row
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + row)
    num_real = tl.sum(tl.load(is_new_ptr + row * per_row + columns, mask=mask, other=0).to(tl.int32), axis=0)
    row_ptr = sampled_ptr + row * per_row
    tokens = tl.load(row_ptr + tl.minimum(columns + per_row - num_real, DRAFTS), mask=mask, other=0)
    tl.store(tokens_ptr + row * per_row + columns, tokens, mask=mask)
    drafts = tl.load(drafts_ptr + slot * DRAFTS + columns, mask=columns < DRAFTS, other=-1)
    is_right = (columns + 1 < num_real) & (tokens == drafts)
    num_right = tl.min(tl.where(is_right, PADDED, columns), axis=0)
    newest = tl.load(row_ptr + tl.minimum(num_right + per_row - num_real, DRAFTS))
    tl.store(last_token_ptr + slot, newest.to(tl.int32))
    num_computed = tl.load(num_computed_ptr + slot) + num_right + 1
    tl.store(num_computed_ptr + slot, num_computed, mask=slot != padding_slot)
    tl.store(counts_ptr + row, (num_right + 1).to(tl.int64))
    tl.store(counts_ptr + num_rows + row, num_real.to(tl.int64))


def verify_drafts(
    state: SlotTensors, slots: torch.Tensor, is_new: torch.Tensor, sampled: torch.Tensor,
    tokens: torch.Tensor, counts: torch.Tensor,
) -> None:  # fmt: skip
    """Accept the leading drafts that equal the tokens sampled in their place, and update the slots.

    slots, is_new: see `gather_drafted_rows`; sampled: [num_rows, 1 + num_drafts] int64, the token after each. Fills
    tokens, of the same shape, with `sampled` of new tokens first, and counts, [2, num_rows] int64, with the number of
    tokens that each row gained, its leading `tokens`, at least 1, and the number of new tokens; all contiguous.
    """
    if not uses_triton(slots.device):
        verify_drafts_ref(state, slots, is_new, sampled, tokens, counts)
        return
    num_rows, per_row = sampled.shape
    _verify_drafts_kernel[(num_rows,)](
        state.last_token, state.num_computed, state.drafts, slots, is_new.view(torch.uint8), sampled, tokens, counts,
        num_rows, len(state.last_token) - 1, DRAFTS=per_row - 1, PADDED=triton.next_power_of_2(per_row), num_warps=1,
        **pdl_options(slots.device),
    )  # fmt: skip


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
