"""Gather the decode rows of a step from the slots, and scatter sampled tokens back into them.

Each running sequence has a slot. The last slot is for padding rows. A row computes the newest token of its sequence,
and maybe drafts of the next ones. A draft is right if it is the token that is sampled in its place: noise depends on
the request's seed and the output's index alone, so single steps would sample the same tokens (compare Leviathan et al.
2022, arXiv:2211.17192, which changes the sampler instead). Keys of wrong drafts stay where the next step stores its
own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous

_COLUMNS, _ALIGNMENT = 256, 16
"""Entries of a block table that a program copies, and elements that begin at an aligned address."""


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
    """Decode rows of `per_row` tokens each; [num_rows * per_row] int32, row by row, unless stated otherwise.

    Attributes:
        token_ids: the newest token, and its drafts, which are the model's inputs.
        positions: their positions. The tokens of a row that exist come first and end at `seq_lens`; the others, at the
            last one's position, are computed for nothing.
        slot_mapping: [num_groups, num_rows * per_row]; their KV slots; -1 for padding, and if they do not exist.
        seq_lens: [num_rows]; tokens of the row's sequence up to its last one that exists.
        output_index: tokens generated before the one that is sampled after each.
        temperatures: float32.
        seeds: [num_rows * per_row, 2].
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
    state: SlotTensors, slots: torch.Tensor, block_size: int, num_new: torch.Tensor | None = None, ahead: int = 0
) -> DecodeRows:
    """Plain torch form of `gather_decode_rows`."""
    slots = slots.long()
    drafts = state.drafts[slots, : 0 if num_new is None else None]
    columns = torch.arange(1 + drafts.shape[1], dtype=torch.int32, device=slots.device)
    first = (state.num_computed[slots] + ahead).clamp(min=0)
    # Missing drafts come last.
    num_real = torch.ones_like(first) if num_new is None else num_new.minimum(1 + (drafts >= 0).sum(1).int())
    positions = first.unsqueeze(1) + columns.minimum(num_real.unsqueeze(1) - 1)
    index = positions // block_size
    exists = (columns < num_real.unsqueeze(1)) & (slots != len(state.last_token) - 1).unsqueeze(1)
    if state.num_blocks.shape[1]:
        exists = exists & (index < state.num_blocks[slots].T.unsqueeze(2))
    block_tables = state.block_tables[slots].transpose(0, 1).contiguous()
    places = block_tables.gather(2, index.long().expand(len(block_tables), -1, -1)) * block_size
    per_token = slots.repeat_interleave(len(columns), output_size=positions.numel())
    return DecodeRows(
        token_ids=torch.cat((state.last_token[slots].unsqueeze(1), drafts.clamp(min=0)), 1).flatten(),
        positions=positions.flatten(),
        slot_mapping=(places + positions % block_size).where(exists, -1).flatten(1),
        seq_lens=first + num_real,
        output_index=positions.flatten() + 1 - state.num_prompt[per_token],
        temperatures=state.temperature[per_token],
        seeds=state.seed[per_token],
        block_tables=block_tables,
    )


@jit(do_not_specialize=["group_rows", "group_tokens", "max_blocks", "padding_slot", "ahead"])
def _gather_decode_rows_kernel(
    last_token_ptr, num_computed_ptr, num_prompt_ptr, temperature_ptr, seed_ptr, drafts_ptr, num_blocks_ptr,
    block_tables_ptr, slots_ptr, num_new_ptr, token_ids_ptr, positions_ptr, slot_mapping_ptr, seq_lens_ptr,
    output_index_ptr, temperatures_ptr, seeds_ptr, row_tables_ptr, group_rows, group_tokens, max_blocks, padding_slot,
    ahead, block_size, DRAFTS: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, group, part, columns = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.arange(0, PADDED)
    wait_for_previous(PDL)
    slot = tl.load(slots_ptr + row)
    table_ptr = block_tables_ptr + (slot.to(tl.int64) * tl.num_programs(1) + group) * max_blocks
    entries = part * COLUMNS + tl.arange(0, COLUMNS)
    blocks = tl.load(table_ptr + entries, mask=entries < max_blocks, other=0)
    tl.store(row_tables_ptr + (group * group_rows + row) * max_blocks + entries, blocks, mask=entries < max_blocks)
    # Only the programs of the first entries write tokens; the first group's write all that groups share.
    at, mask = row * (DRAFTS + 1) + columns, (columns <= DRAFTS) & (part + tl.zeros_like(columns) == 0)
    first, tokens, num_real = tl.load(num_computed_ptr + slot), tl.load(last_token_ptr + slot), 1
    if num_blocks_ptr is not None:
        first = tl.maximum(first + ahead, 0)
    if DRAFTS > 0:
        draft_ptrs = drafts_ptr + slot * DRAFTS + columns
        num_drafts = tl.sum((tl.load(draft_ptrs, mask=columns < DRAFTS, other=-1) >= 0).to(tl.int32), axis=0)
        num_real = tl.minimum(tl.load(num_new_ptr + row), 1 + num_drafts)
        drafts = tl.load(draft_ptrs - 1, mask=mask & (columns > 0), other=0)
        tokens = tl.where(columns == 0, tokens, tl.maximum(drafts, 0))
    positions = first + tl.minimum(columns, num_real - 1)
    exists = (columns < num_real) & (slot != padding_slot)
    if num_blocks_ptr is not None:
        num_blocks = tl.load(num_blocks_ptr + slot * tl.num_programs(1) + group)
        exists = exists & (positions // block_size < num_blocks)
    blocks = tl.load(table_ptr + positions // block_size, mask=mask, other=0)
    places = tl.where(exists, blocks * block_size + positions % block_size, -1)
    tl.store(slot_mapping_ptr + group * group_tokens + at, places, mask=mask)
    mask = mask & (group + tl.zeros_like(columns) == 0)
    tl.store(token_ids_ptr + at, tokens + tl.zeros_like(columns), mask=mask)
    tl.store(positions_ptr + at, positions, mask=mask)
    tl.store(seq_lens_ptr + row, first + num_real, mask=group + part == 0)
    tl.store(output_index_ptr + at, positions + 1 - tl.load(num_prompt_ptr + slot), mask=mask)
    tl.store(temperatures_ptr + at, tl.load(temperature_ptr + slot) + tl.zeros_like(columns), mask=mask)
    for word in tl.static_range(2):
        tl.store(seeds_ptr + 2 * at + word, tl.load(seed_ptr + 2 * slot + word) + tl.zeros_like(columns), mask=mask)


def gather_decode_rows(
    state: SlotTensors, slots: torch.Tensor, block_size: int, num_new: torch.Tensor | None = None, ahead: int = 0
) -> DecodeRows:
    """Gather decode rows; slots: [num_rows] int32, the last slot for padding rows.

    Args:
        num_new: [num_rows] int32; the most tokens of each row, which has all drafts; None for rows of the newest token.
        ahead: in engines with drafts, the distance of the rows from the next tokens to compute.

    In engines with drafts a token beyond the end of its block table has no KV slot, -1.
    """
    if not uses_triton(slots.device):
        return gather_decode_rows_ref(state, slots, block_size, num_new, ahead)
    num_rows, num_drafts = len(slots), 0 if num_new is None else state.drafts.shape[1]
    num_slots, num_groups, max_blocks = state.block_tables.shape
    num_tokens = num_rows * (1 + num_drafts)
    # Separate tensors are aligned; slices of one would make their readers compile again for each alignment. The same is
    # true of the groups' parts.
    group_rows, group_tokens = (triton.cdiv(size, _ALIGNMENT) * _ALIGNMENT for size in (num_rows, num_tokens))
    rows = DecodeRows(
        token_ids=slots.new_empty(num_tokens),
        positions=slots.new_empty(num_tokens),
        slot_mapping=slots.new_empty(num_groups, group_tokens)[:, :num_tokens],
        seq_lens=slots.new_empty(num_rows),
        output_index=slots.new_empty(num_tokens),
        temperatures=slots.new_empty(num_tokens, dtype=torch.float32),
        seeds=slots.new_empty(num_tokens, 2),
        block_tables=slots.new_empty(num_groups, group_rows, max_blocks)[:, :num_rows],
    )
    _gather_decode_rows_kernel[(num_rows, num_groups, triton.cdiv(max_blocks, _COLUMNS))](
        state.last_token, state.num_computed, state.num_prompt, state.temperature, state.seed, state.drafts,
        state.num_blocks if state.num_blocks.shape[1] else None, state.block_tables, slots, num_new, rows.token_ids,
        rows.positions, rows.slot_mapping, rows.seq_lens, rows.output_index, rows.temperatures, rows.seeds,
        rows.block_tables, group_rows, group_tokens, max_blocks, num_slots - 1, ahead, block_size,
        DRAFTS=num_drafts, PADDED=triton.next_power_of_2(1 + num_drafts), COLUMNS=_COLUMNS, num_warps=1,
        **pdl_options(slots.device),
    )  # fmt: skip
    return rows


def scatter_tokens_ref(
    state: SlotTensors, slots: torch.Tensor, token_ids: torch.Tensor, num_decodes: int, sampled: torch.Tensor,
    seq_lens: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Plain torch form of `scatter_tokens`."""
    num_chunks, slots = len(slots) - num_decodes, slots.long()
    decoded, num_tokens = slots[:num_decodes], len(token_ids)
    per_row = (num_tokens - num_chunks) // max(1, num_decodes)
    rows, num_right = token_ids[: num_tokens - num_chunks].view(num_decodes, per_row), torch.zeros_like(decoded)
    if seq_lens is not None:
        num_new = seq_lens[:num_decodes] - state.num_computed[decoded]
        columns = torch.arange(1, rows.shape[1], device=slots.device)
        is_right = (columns < num_new.unsqueeze(1)) & (rows[:, :-1] == state.drafts[decoded])
        num_right = is_right.long().cumprod(1).sum(1)
        sampled[num_tokens : num_tokens + num_decodes] = num_right + 1
    state.last_token[decoded] = rows.gather(1, num_right.unsqueeze(1)).squeeze(1).int()
    state.last_token[slots[num_decodes:]] = token_ids[num_tokens - num_chunks :].int()
    state.num_computed[decoded] += ((num_right + 1) * (decoded != len(state.last_token) - 1)).int()
    sampled[:num_tokens] = token_ids


@jit(do_not_specialize=["num_rows", "num_decodes", "padding_slot"], unaligned=["sampled_ptr"])
def _scatter_tokens_kernel(
    last_token_ptr, num_computed_ptr, drafts_ptr, slots_ptr, token_ids_ptr, seq_lens_ptr, sampled_ptr, num_rows,
    num_decodes, padding_slot, ROWS: tl.constexpr, DRAFTS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)[None, :]
    mask, decodes = rows < num_rows, rows < num_decodes
    # A row's tokens begin here; a chunk has one.
    at = rows + tl.minimum(rows, num_decodes) * DRAFTS
    wait_for_previous(PDL)
    slots = tl.load(slots_ptr + rows, mask=mask, other=0)
    num_computed = tl.load(num_computed_ptr + slots, mask=decodes, other=0)
    places = at[:, None] + columns
    has_token = mask[:, None] & (columns <= tl.where(decodes, DRAFTS, 0)[:, None])
    tokens = tl.load(token_ids_ptr + places, mask=has_token, other=0)
    tl.store(sampled_ptr + places, tokens, mask=has_token)
    num_right = tl.zeros_like(rows)
    if DRAFTS > 0:
        num_new = tl.load(seq_lens_ptr + rows, mask=decodes, other=1) - num_computed
        is_draft = decodes[:, None] & (columns + 1 < num_new[:, None])
        drafts = tl.load(drafts_ptr + slots[:, None] * DRAFTS + columns, mask=is_draft, other=-1)
        num_right = tl.min(tl.where(tokens == drafts, PADDED, columns), axis=1)
        count_ptrs = sampled_ptr + num_rows + num_decodes * DRAFTS + rows
        tl.store(count_ptrs, (num_right + 1).to(tl.int64), mask=decodes)
    newest = tl.load(token_ids_ptr + at + num_right, mask=mask, other=0)
    tl.store(last_token_ptr + slots, newest.to(tl.int32), mask=mask)
    tl.store(num_computed_ptr + slots, num_computed + num_right + 1, mask=decodes & (slots != padding_slot))


def scatter_tokens(
    state: SlotTensors, slots: torch.Tensor, token_ids: torch.Tensor, num_decodes: int, sampled: torch.Tensor,
    seq_lens: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write sampled tokens into their slots, and count the tokens that decode rows have computed, in place.

    Of a row with drafts, the leading ones count that equal the tokens sampled in their place, and the newest token
    becomes the one sampled after them.

    Args:
        slots: [num_rows] int32, the `num_decodes` decode rows first; only the padding slot may occur more than once.
        token_ids: int64; for each token of the decode rows, and then for each chunk, the token sampled after it.
        sampled: int64; set to token_ids, and then with drafts to the number of tokens that each decode row gained.
        seq_lens: [num_decodes or more] int32; see `DecodeRows`. None for rows of one token.
    """
    if not uses_triton(slots.device):
        scatter_tokens_ref(state, slots, token_ids, num_decodes, sampled, seq_lens)
        return
    num_rows, num_drafts = len(slots), 0 if seq_lens is None else state.drafts.shape[1]
    _scatter_tokens_kernel[(triton.cdiv(num_rows, 128),)](
        state.last_token, state.num_computed, state.drafts, slots, token_ids, seq_lens, sampled, num_rows, num_decodes,
        len(state.last_token) - 1, ROWS=128, DRAFTS=num_drafts, PADDED=triton.next_power_of_2(1 + num_drafts),
        **pdl_options(slots.device),
    )  # fmt: skip
