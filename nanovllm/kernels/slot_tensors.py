"""Gather the rows of a decode step from the slots, and scatter sampled tokens back into them.

Each running sequence has a slot. The last slot is for padding rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous

_ROWS_PER_PROGRAM, _COLUMNS_PER_PROGRAM, _ALIGNMENT = 32, 64, 16


@dataclass
class SlotTensors:
    """The state of each slot's sequence; contiguous [num_slots + 1] int32 unless stated otherwise.

    Attributes:
        last_token: the newest token.
        num_computed: tokens whose keys and values are stored.
        num_prompt: prompt tokens.
        temperature: float32; 0 is greedy.
        seed: [num_slots + 1, 2]; low and high word.
        drafts: [num_slots + 1, num_drafts]; tokens that may follow the newest one, then -1.
        num_blocks: [num_slots + 1, num_groups]; the entries of the block tables. [num_slots + 1, 0] without drafts.
        block_tables: [num_slots + 1, num_groups, max_blocks]; of each group of the KV cache.
    """

    last_token: torch.Tensor
    num_computed: torch.Tensor
    num_prompt: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    drafts: torch.Tensor
    num_blocks: torch.Tensor
    block_tables: torch.Tensor


@dataclass
class DecodeRows:
    """One row per decoding sequence; [num_rows] int32 unless stated otherwise.

    Attributes:
        token_ids: the newest token, which is the model's input.
        positions: its position.
        slot_mapping: [num_groups, num_rows]; its KV slots; -1 for padding.
        seq_lens: tokens that it attends to, including itself.
        output_index: tokens generated before the one that this step samples.
        temperatures: float32.
        seeds: [num_rows, 2].
        block_tables: [num_groups, num_rows, max_blocks].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens: torch.Tensor
    output_index: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    block_tables: torch.Tensor


def gather_decode_rows_ref(
    state: SlotTensors, slots: torch.Tensor, block_size: int, ahead: int | None = None
) -> DecodeRows:
    """Plain torch form of `gather_decode_rows`."""
    positions = (state.num_computed[slots] + (ahead or 0)).clamp(min=0)
    block_tables = state.block_tables[slots].transpose(0, 1)
    index = (positions // block_size).long().expand(len(block_tables), -1)
    blocks = block_tables.gather(2, index.unsqueeze(2)).squeeze(2)
    slot_mapping = blocks * block_size + positions % block_size
    if ahead is not None:
        slot_mapping.masked_fill_(positions // block_size >= state.num_blocks[slots].T, -1)
    return DecodeRows(
        token_ids=state.last_token[slots],
        positions=positions,
        slot_mapping=torch.where(slots == len(state.last_token) - 1, -1, slot_mapping),
        seq_lens=positions + 1,
        output_index=positions + 1 - state.num_prompt[slots],
        temperatures=state.temperature[slots],
        seeds=state.seed[slots],
        block_tables=block_tables,
    )


@jit(do_not_specialize=["num_rows", "group_rows", "max_blocks", "padding_slot", "ahead"])
def _gather_decode_rows_kernel(
    last_token_ptr, num_computed_ptr, num_prompt_ptr, temperature_ptr, seed_ptr, block_tables_ptr, slots_ptr,
    token_ids_ptr, positions_ptr, slot_mapping_ptr, seq_lens_ptr, output_index_ptr, temperatures_ptr, seeds_ptr,
    row_tables_ptr, num_blocks_ptr, num_rows, group_rows, max_blocks, padding_slot, ahead, block_size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    wait_for_previous(PDL)
    slots = tl.load(slots_ptr + rows, mask=mask, other=0)
    group = tl.program_id(2)
    table_ptr = block_tables_ptr + (slots.to(tl.int64) * tl.num_programs(2) + group) * max_blocks
    group_row = group * group_rows
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    in_table = mask[:, None] & (columns < max_blocks)
    entries = tl.load(table_ptr[:, None] + columns, mask=in_table, other=0)
    tl.store(row_tables_ptr + (group_row + rows[:, None]) * max_blocks + columns, entries, mask=in_table)
    # Only the programs of the first columns write the per-row values; the first group's write all that groups share.
    mask = mask & (tl.program_id(1) + tl.zeros_like(rows) == 0)
    positions = tl.load(num_computed_ptr + slots, mask=mask, other=0)
    if num_blocks_ptr is not None:
        positions = tl.maximum(positions + ahead, 0)
    blocks = tl.load(table_ptr + positions // block_size, mask=mask, other=0)
    slot_mapping = tl.where(slots == padding_slot, -1, blocks * block_size + positions % block_size)
    if num_blocks_ptr is not None:
        num_blocks = tl.load(num_blocks_ptr + slots * tl.num_programs(2) + group, mask=mask, other=0)
        slot_mapping = tl.where(positions // block_size < num_blocks, slot_mapping, -1)
    tl.store(slot_mapping_ptr + group_row + rows, slot_mapping, mask=mask)
    mask = mask & (group + tl.zeros_like(rows) == 0)
    tl.store(token_ids_ptr + rows, tl.load(last_token_ptr + slots, mask=mask, other=0), mask=mask)
    tl.store(positions_ptr + rows, positions, mask=mask)
    tl.store(seq_lens_ptr + rows, positions + 1, mask=mask)
    num_prompt = tl.load(num_prompt_ptr + slots, mask=mask, other=0)
    tl.store(output_index_ptr + rows, positions + 1 - num_prompt, mask=mask)
    tl.store(temperatures_ptr + rows, tl.load(temperature_ptr + slots, mask=mask, other=0.0), mask=mask)
    words, both = tl.arange(0, 2)[None, :], mask[:, None]
    seeds = tl.load(seed_ptr + slots[:, None] * 2 + words, mask=both, other=0)
    tl.store(seeds_ptr + rows[:, None] * 2 + words, seeds, mask=both)


def empty_rows(slots: torch.Tensor, per_row: int, num_groups: int, max_blocks: int) -> DecodeRows:
    """Return rows of `per_row` tokens to be filled by a kernel; see `DraftedRows` for more than one."""
    num_rows, num_tokens = len(slots), per_row * len(slots)
    # Separate tensors are aligned; slices of one would make their readers compile again for each alignment. The same is
    # true of the groups' parts.
    group_rows, group_tokens = (triton.cdiv(size, _ALIGNMENT) * _ALIGNMENT for size in (num_rows, num_tokens))
    return DecodeRows(
        token_ids=slots.new_empty(num_tokens),
        positions=slots.new_empty(num_tokens),
        slot_mapping=slots.new_empty(num_groups, group_tokens)[:, :num_tokens],
        seq_lens=slots.new_empty(num_rows),
        output_index=slots.new_empty(num_tokens),
        temperatures=slots.new_empty(num_tokens, dtype=torch.float32),
        seeds=slots.new_empty(num_tokens, 2),
        block_tables=slots.new_empty(num_groups, group_rows, max_blocks)[:, :num_rows],
    )


def gather_decode_rows(
    state: SlotTensors, slots: torch.Tensor, block_size: int, ahead: int | None = None
) -> DecodeRows:
    """Gather the rows of a decode step; slots: [num_rows] int32, the last slot for padding rows.

    ahead: distance of the rows from the next tokens to compute; beyond its table a row has no KV slot, -1.
    """
    if not uses_triton(slots.device):
        return gather_decode_rows_ref(state, slots, block_size, ahead)
    num_rows, (num_slots, num_groups, max_blocks) = len(slots), state.block_tables.shape
    rows = empty_rows(slots, 1, num_groups, max_blocks)
    grid = triton.cdiv(num_rows, _ROWS_PER_PROGRAM), triton.cdiv(max_blocks, _COLUMNS_PER_PROGRAM), num_groups
    _gather_decode_rows_kernel[grid](
        state.last_token, state.num_computed, state.num_prompt, state.temperature, state.seed, state.block_tables,
        slots, rows.token_ids, rows.positions, rows.slot_mapping, rows.seq_lens, rows.output_index, rows.temperatures,
        rows.seeds, rows.block_tables, None if ahead is None else state.num_blocks, num_rows,
        rows.slot_mapping.stride(0), max_blocks, num_slots - 1, ahead or 0, block_size,
        ROWS=_ROWS_PER_PROGRAM, COLUMNS=_COLUMNS_PER_PROGRAM, **pdl_options(slots.device),
    )  # fmt: skip
    return rows


def scatter_tokens_ref(
    state: SlotTensors, slots: torch.Tensor, token_ids: torch.Tensor, num_decodes: int, sampled: torch.Tensor
) -> None:
    """Plain torch form of `scatter_tokens`."""
    state.last_token[slots] = token_ids.int()
    decoded = slots[:num_decodes]
    state.num_computed[decoded] += (decoded != len(state.last_token) - 1).int()
    sampled[: len(token_ids)] = token_ids


@jit(do_not_specialize=["num_rows", "num_decodes", "padding_slot"])
def _scatter_tokens_kernel(
    last_token_ptr, num_computed_ptr, slots_ptr, token_ids_ptr, sampled_ptr, num_rows, num_decodes, padding_slot,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    wait_for_previous(PDL)
    slots = tl.load(slots_ptr + rows, mask=mask, other=0)
    token_ids = tl.load(token_ids_ptr + rows, mask=mask, other=0)
    tl.store(last_token_ptr + slots, token_ids.to(tl.int32), mask=mask)
    tl.store(sampled_ptr + rows, token_ids, mask=mask)
    decoded = mask & (rows < num_decodes) & (slots != padding_slot)
    num_computed = tl.load(num_computed_ptr + slots, mask=decoded, other=0)
    tl.store(num_computed_ptr + slots, num_computed + 1, mask=decoded)


def scatter_tokens(
    state: SlotTensors, slots: torch.Tensor, token_ids: torch.Tensor, num_decodes: int, sampled: torch.Tensor
) -> None:
    """Write sampled tokens into their slots, and add 1 to `num_computed` of the decode rows' slots, in place.

    slots: [num_rows] int32, the `num_decodes` decode rows first; only the padding slot may occur more than once;
    token_ids: [num_rows] int64; sampled: [num_rows or more] int64, whose first entries are set to token_ids.
    """
    if not uses_triton(slots.device):
        scatter_tokens_ref(state, slots, token_ids, num_decodes, sampled)
        return
    num_rows = len(slots)
    _scatter_tokens_kernel[(triton.cdiv(num_rows, 128),)](
        state.last_token, state.num_computed, slots, token_ids, sampled, num_rows, num_decodes,
        len(state.last_token) - 1, ROWS=128, **pdl_options(slots.device),
    )  # fmt: skip
