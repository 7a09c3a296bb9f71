"""The beginning and the end of a step: from slots to rows, and from sampled tokens back to slots.

The slot state is one int32 tensor, a row for each running sequence and one more, the last, for padding. See
`engine/input_buffers.py` for who writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import gdc_launch_dependents, gdc_wait, jit, pdl_options, tl, triton, uses_triton

LAST_TOKEN, NUM_COMPUTED, NUM_PROMPT, TEMPERATURE, SEED, BLOCK_TABLE = 0, 1, 2, 3, 4, 6
"""Columns of the slot state: newest token, tokens computed, tokens of the prompt, temperature (a float32's bits), seed
(low word, high word), and from there on the block table."""
_ROWS_PER_PROGRAM, _COLUMNS_PER_PROGRAM = 32, 64


@dataclass
class DecodeRows:
    """One row for each decoding sequence, int32, [num_rows] if not said otherwise.

    Attributes:
        token_ids: the newest token, which is the input.
        positions: its position.
        kv_slots: where its keys and values go; -1 for padding.
        context_lens: tokens that it attends to, itself included.
        output_index: tokens that the sequence has generated before the next one.
        columns: [num_rows, BLOCK_TABLE]; the slot up to its block table.
        block_tables: [num_rows, max_blocks].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    context_lens: torch.Tensor
    output_index: torch.Tensor
    columns: torch.Tensor
    block_tables: torch.Tensor


def gather_decode_rows_ref(state: torch.Tensor, slots: torch.Tensor, block_size: int) -> DecodeRows:
    """Plain torch form of `gather_decode_rows`."""
    rows = state[slots]
    positions = rows[:, NUM_COMPUTED].contiguous()
    blocks = rows[:, BLOCK_TABLE:].gather(1, (positions // block_size).long().unsqueeze(1)).squeeze(1)
    kv_slots = blocks * block_size + positions % block_size
    kv_slots = torch.where(slots == len(state) - 1, -1, kv_slots)
    return DecodeRows(
        token_ids=rows[:, LAST_TOKEN].contiguous(),
        positions=positions,
        kv_slots=kv_slots,
        context_lens=positions + 1,
        output_index=positions + 1 - rows[:, NUM_PROMPT],
        columns=rows[:, :BLOCK_TABLE].contiguous(),
        block_tables=rows[:, BLOCK_TABLE:].contiguous(),
    )


@jit(do_not_specialize=["num_rows", "width", "padding_slot"])
def _gather_decode_rows_kernel(
    state_ptr, slots_ptr, token_ids_ptr, positions_ptr, kv_slots_ptr, context_lens_ptr, output_index_ptr,
    columns_ptr, block_tables_ptr, num_rows, width, padding_slot, block_size,
    LAST_TOKEN: tl.constexpr, NUM_COMPUTED: tl.constexpr, NUM_PROMPT: tl.constexpr, BLOCK_TABLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slots = tl.load(slots_ptr + rows, mask=mask, other=0)
    row_ptr = state_ptr + slots.to(tl.int64) * width
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    values = tl.load(row_ptr[:, None] + columns, mask=mask[:, None] & (columns < width), other=0)
    before_table = mask[:, None] & (columns < BLOCK_TABLE)
    in_table = mask[:, None] & (columns >= BLOCK_TABLE) & (columns < width)
    tl.store(columns_ptr + rows[:, None] * BLOCK_TABLE + columns, values, mask=before_table)
    table_ptr = block_tables_ptr + rows[:, None] * (width - BLOCK_TABLE)
    tl.store(table_ptr + columns - BLOCK_TABLE, values, mask=in_table)
    # One program of those of a row writes its numbers.
    mask = mask & (tl.program_id(1) + tl.zeros_like(rows) == 0)
    positions = tl.load(row_ptr + NUM_COMPUTED, mask=mask, other=0)
    blocks = tl.load(row_ptr + BLOCK_TABLE + positions // block_size, mask=mask, other=0)
    kv_slots = tl.where(slots == padding_slot, -1, blocks * block_size + positions % block_size)
    tl.store(token_ids_ptr + rows, tl.load(row_ptr + LAST_TOKEN, mask=mask, other=0), mask=mask)
    tl.store(positions_ptr + rows, positions, mask=mask)
    tl.store(kv_slots_ptr + rows, kv_slots, mask=mask)
    tl.store(context_lens_ptr + rows, positions + 1, mask=mask)
    num_prompt = tl.load(row_ptr + NUM_PROMPT, mask=mask, other=0)
    tl.store(output_index_ptr + rows, positions + 1 - num_prompt, mask=mask)


def gather_decode_rows_triton(state: torch.Tensor, slots: torch.Tensor, block_size: int) -> DecodeRows:
    """Triton form of `gather_decode_rows`."""
    num_rows, width = len(slots), state.shape[1]
    # Tensors of their own, so aligned: every kernel that reads them would be compiled again for each other alignment.
    numbers = (torch.empty_like(slots) for _ in range(5))
    tables = (slots.new_empty(num_rows, size) for size in (BLOCK_TABLE, width - BLOCK_TABLE))
    out = DecodeRows(*numbers, *tables)
    _gather_decode_rows_kernel[(triton.cdiv(num_rows, _ROWS_PER_PROGRAM), triton.cdiv(width, _COLUMNS_PER_PROGRAM))](
        state, slots, out.token_ids, out.positions, out.kv_slots, out.context_lens, out.output_index,
        out.columns, out.block_tables, num_rows, width, len(state) - 1, block_size,
        LAST_TOKEN=LAST_TOKEN, NUM_COMPUTED=NUM_COMPUTED, NUM_PROMPT=NUM_PROMPT, BLOCK_TABLE=BLOCK_TABLE,
        ROWS=_ROWS_PER_PROGRAM, COLUMNS=_COLUMNS_PER_PROGRAM, **pdl_options(slots.device),
    )  # fmt: skip
    return out


def gather_decode_rows(state: torch.Tensor, slots: torch.Tensor, block_size: int) -> DecodeRows:
    """Make the rows of a decode step.

    Args:
        state: [num_slots + 1, width] int32, contiguous.
        slots: [num_rows] int32.
        block_size: tokens of a cache block.
    """
    form = gather_decode_rows_triton if uses_triton(state.device) else gather_decode_rows_ref
    return form(state, slots, block_size)


def scatter_tokens_ref(
    state: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, num_decodes: int, sampled: torch.Tensor
) -> None:
    """Plain torch form of `scatter_tokens`."""
    state[:, LAST_TOKEN][slots] = token_ids.int()
    decoded = slots[:num_decodes]
    state[:, NUM_COMPUTED][decoded] += (decoded != len(state) - 1).int()
    sampled[: len(token_ids)] = token_ids


@jit(do_not_specialize=["num_rows", "num_decodes", "width", "padding_slot"])
def _scatter_tokens_kernel(
    state_ptr, slots_ptr, token_ids_ptr, sampled_ptr, num_rows, num_decodes, width, padding_slot,
    LAST_TOKEN: tl.constexpr, NUM_COMPUTED: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < num_rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slots = tl.load(slots_ptr + rows, mask=mask, other=0)
    token_ids = tl.load(token_ids_ptr + rows, mask=mask, other=0)
    row_ptr = state_ptr + slots.to(tl.int64) * width
    tl.store(row_ptr + LAST_TOKEN, token_ids.to(tl.int32), mask=mask)
    tl.store(sampled_ptr + rows, token_ids, mask=mask)
    decoded = mask & (rows < num_decodes) & (slots != padding_slot)
    tl.store(row_ptr + NUM_COMPUTED, tl.load(row_ptr + NUM_COMPUTED, mask=decoded, other=0) + 1, mask=decoded)


def scatter_tokens_triton(
    state: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, num_decodes: int, sampled: torch.Tensor
) -> None:
    """Triton form of `scatter_tokens`."""
    num_rows = len(slots)
    _scatter_tokens_kernel[(triton.cdiv(num_rows, 128),)](
        state, slots, token_ids, sampled, num_rows, num_decodes, state.stride(0), len(state) - 1,
        LAST_TOKEN=LAST_TOKEN, NUM_COMPUTED=NUM_COMPUTED, ROWS=128, **pdl_options(slots.device),
    )  # fmt: skip


def scatter_tokens(
    state: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, num_decodes: int, sampled: torch.Tensor
) -> None:
    """Put sampled tokens into their slots, in place, and count the decoded ones as computed.

    Args:
        state: [num_slots + 1, width] int32, contiguous; the last row takes what belongs to nobody.
        slots: [num_rows] int32, decode rows first; none but the last may be there twice.
        token_ids: [num_rows] int64.
        num_decodes: how many of the rows are decode rows.
        sampled: [at least num_rows] int64; its first entries become the tokens.
    """
    form = scatter_tokens_triton if uses_triton(state.device) else scatter_tokens_ref
    form(state, slots, token_ids, num_decodes, sampled)
