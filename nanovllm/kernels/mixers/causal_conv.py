"""A short causal convolution of each channel, and SiLU where a layer has it.

A state has the inputs of the last tokens in a ring, that at position p as entry `p % size`. It has an entry for each
weight of a filter, and for each draft of a row, so that a token overwrites no input that is still read.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.mixers.states import TILE, ConvState, StateRows, StateTiles

_BLOCK = 64
"""Channels of a program with prompt tokens."""
_ROW_BLOCK = 256
"""Channels of a program with a row of one token."""


def causal_conv_ref(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: ConvState,
                    tiles: StateTiles, silu: bool = True) -> torch.Tensor:  # fmt: skip
    """Plain torch form of `causal_conv`."""
    width, out = weight.shape[1], torch.zeros_like(x)
    for first, position, read, first_tile, num_tiles in tiles.chunks.tolist():
        if not num_tiles:
            continue
        num_tokens = int(tiles.tiles[first_tile : first_tile + num_tiles, 1].sum())
        before = conv_inputs(x, state, None if read < 0 else tiles.tables[read], position, width)
        inputs = torch.cat((before, x[first : first + num_tokens]))
        out[first : first + num_tokens] = convolve(inputs.unfold(0, width, 1), weight, bias, silu)
    return out


def conv_inputs(
    x: torch.Tensor, state: ConvState, table: torch.Tensor | None, position: int, width: int
) -> torch.Tensor:
    """Return the inputs of the tokens before a position, [width - 1, channels], zeros before the sequence."""
    before = x.new_zeros(width - 1, x.shape[1])
    if table is not None:
        ring = state.pool.read(state.first, (state.size, x.shape[1]), table)
        for i, at in enumerate(range(position - width + 1, position)):
            if at >= 0:
                before[i] = ring[at % state.size]
    return before


def write_inputs(x: torch.Tensor, state: ConvState, table: torch.Tensor, position: int) -> None:
    """Overwrite the inputs of consecutive tokens, [num_tokens, channels], from a position on; none before 0."""
    for at, row in enumerate(x, position):
        if at >= 0:
            state.pool.write(state.first + at % state.size * x.shape[1], row, table)


def convolve(windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool = True) -> torch.Tensor:
    """Return [num_tokens, channels] of windows, [num_tokens, channels, width]; computed in float32."""
    total = (windows.float() * weight.float()).sum(-1)
    total = total if bias is None else total + bias.float()
    return (functional.silu(total) if silu else total).to(windows.dtype)


def store_rings_ref(x: torch.Tensor, width: int, state: ConvState, tiles: StateTiles) -> None:
    """Plain torch form of `store_rings`."""
    rings = []
    for first, count, chunk, write in tiles.tiles.tolist():
        if count and write >= 0:
            start, position, read, *_ = tiles.chunks[chunk].tolist()
            before = conv_inputs(x, state, None if read < 0 else tiles.tables[read], position, width)
            inputs = torch.cat((before, x[start : first + count]))[1 - width :]
            rings.append((write, position + first - start + count, inputs))
    for write, end, inputs in rings:
        write_inputs(inputs, state, tiles.tables[write], end - width + 1)


@jit
def place(index, block, part_stride, PARTS: tl.constexpr, PART_SIZE: tl.constexpr):
    """Return the offsets in a pool of elements of a state; block: from its table, at `index // (PARTS * PART_SIZE)`."""
    part = (index // PART_SIZE % PARTS).to(tl.int64)
    return part * part_stride + block.to(tl.int64) * PART_SIZE + index % PART_SIZE


@jit
def state_ptrs(pool_ptr, table_ptr, lines, columns, part_stride, PARTS: tl.constexpr, PART_SIZE: tl.constexpr):
    """Return pointers to slices of rows of a state, [lines, columns]; lines: where they begin in it."""
    blocks = tl.load(table_ptr + lines // (PARTS * PART_SIZE))
    starts = tl.multiple_of(place(lines, blocks, part_stride, PARTS, PART_SIZE), 16)
    return pool_ptr + starts[:, None] + columns[None, :]


@jit
def inputs_at(
    x_ptr, state_ptr, tables_ptr, tokens, channels, mask, chunk_first, position, read, first, x_stride, table_stride,
    part_stride, CHANNELS: tl.constexpr, RING: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr,
):  # fmt: skip
    """Return a chunk's inputs, float32; tokens before its first one are in the state `read`, or are zeros."""
    inside = tokens >= chunk_first
    x = tl.load(x_ptr + tokens.to(tl.int64) * x_stride + channels, mask=mask & inside, other=0.0)
    at = tl.where(read >= 0, position + tokens - chunk_first, -1)
    table_ptr = tables_ptr + tl.maximum(read, 0) * table_stride
    index = first + tl.maximum(at, 0) % RING * CHANNELS + channels
    stored = mask & (at >= 0) & (tokens < chunk_first)
    block = tl.load(table_ptr + index // (PARTS * PART_SIZE), mask=stored, other=0)
    before = tl.load(state_ptr + place(index, block, part_stride, PARTS, PART_SIZE), mask=stored, other=0.0)
    return tl.where(inside, x, before).to(tl.float32)


@jit(unaligned=["tiles_ptr", "chunks_ptr", "tables_ptr"])
def _causal_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, state_ptr, tiles_ptr, chunks_ptr, tables_ptr, first, x_stride, table_stride,
    part_stride, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channels < CHANNELS
    first_token, count = tl.load(tiles_ptr + tile * 4), tl.load(tiles_ptr + tile * 4 + 1)
    chunk_ptr = chunks_ptr + tl.load(tiles_ptr + tile * 4 + 2) * 5
    chunk_first, position, read = tl.load(chunk_ptr), tl.load(chunk_ptr + 1), tl.load(chunk_ptr + 2)
    wait_for_previous(PDL)
    if count > 0:
        tokens = (first_token + tl.arange(0, TILE))[:, None]
        valid = (tokens < first_token + count) & mask[None, :]
        total = tl.zeros([TILE, BLOCK], tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + channels, mask=mask, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(WIDTH):
            sources = tokens - (WIDTH - 1 - tap)
            if first_token - (WIDTH - 1) >= chunk_first:
                x = tl.load(x_ptr + sources.to(tl.int64) * x_stride + channels[None, :], mask=valid, other=0.0)
                x = x.to(tl.float32)
            else:
                x = inputs_at(x_ptr, state_ptr, tables_ptr, sources, channels[None, :], valid, chunk_first, position,
                              read, first, x_stride, table_stride, part_stride,
                              CHANNELS, RING, PARTS, PART_SIZE)  # fmt: skip
            weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
            total += x * weight[None, :]
        out = total / (1 + tl.exp(-total)) if SILU else total
        places = tokens.to(tl.int64) * CHANNELS + channels[None, :]
        tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=valid)


@jit
def store_ring(
    x_ptr, state_ptr, tables_ptr, write, end, channels, mask, chunk_first, position, read, first, x_stride,
    table_stride, part_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr,
):  # fmt: skip
    """Store the inputs of the last tokens before token `end` of a chunk in the state `write`."""
    for back in tl.static_range(1, WIDTH):
        at = position + end - back - chunk_first
        if at >= 0:
            x = inputs_at(x_ptr, state_ptr, tables_ptr, end - back + tl.zeros_like(channels), channels, mask,
                          chunk_first, position, read, first, x_stride, table_stride, part_stride,
                          CHANNELS, RING, PARTS, PART_SIZE)  # fmt: skip
            index = first + at % RING * CHANNELS + channels
            block = tl.load(tables_ptr + write * table_stride + index // (PARTS * PART_SIZE), mask=mask, other=0)
            offsets = place(index, block, part_stride, PARTS, PART_SIZE)
            tl.store(state_ptr + offsets, x.to(state_ptr.dtype.element_ty), mask=mask)


@jit(unaligned=["tiles_ptr", "chunks_ptr", "tables_ptr"])
def _store_rings_kernel(
    x_ptr, state_ptr, tiles_ptr, chunks_ptr, tables_ptr, first, x_stride, table_stride, part_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk_ptr = chunks_ptr + tl.program_id(0) * 5
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chunk_first, position, read = tl.load(chunk_ptr), tl.load(chunk_ptr + 1), tl.load(chunk_ptr + 2)
    first_tile, num_tiles = tl.load(chunk_ptr + 3), tl.load(chunk_ptr + 4)
    wait_for_previous(PDL)
    # The last tile may overwrite the state that earlier ones read.
    for tile in range(first_tile, first_tile + num_tiles):
        end = tl.load(tiles_ptr + tile * 4) + tl.load(tiles_ptr + tile * 4 + 1)
        write = tl.load(tiles_ptr + tile * 4 + 3)
        if write >= 0:
            store_ring(x_ptr, state_ptr, tables_ptr, write, end, channels, channels < CHANNELS, chunk_first, position,
                       read, first, x_stride, table_stride, part_stride,
                       CHANNELS, WIDTH, RING, PARTS, PART_SIZE)  # fmt: skip


def store_rings(x: torch.Tensor, width: int, state: ConvState, tiles: StateTiles) -> None:
    """Store the inputs before the end of each tile that writes a state, where no scan follows `causal_conv`.

    x: [num_tokens, channels], channels contiguous; width: of the filters; state: where they are stored.
    """
    if not uses_triton(x.device):
        store_rings_ref(x, width, state, tiles)
        return
    assert x.stride(1) == 1 and tiles.tables.is_contiguous()
    _store_rings_kernel[(len(tiles.chunks), triton.cdiv(x.shape[1], _BLOCK))](
        x, state.pool.elements, tiles.tiles, tiles.chunks, tiles.tables, state.first, x.stride(0),
        tiles.tables.stride(0), CHANNELS=x.shape[1], WIDTH=width, RING=state.size, BLOCK=_BLOCK, num_warps=2,
        **state.pool.sizes, **pdl_options(x.device),
    )  # fmt: skip


def causal_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: ConvState,
                tiles: StateTiles, silu: bool = True) -> torch.Tensor:  # fmt: skip
    """Convolve prompt tokens, [num_tokens, channels]; the scan that follows, or `store_rings`, stores the states.

    x: [num_tokens, channels], channels contiguous; weight: [channels, width], the last column for the token itself;
    bias: [channels]; state: the inputs before the chunks. Outputs are not set where no tile has a token.
    """
    if not uses_triton(x.device):
        return causal_conv_ref(x, weight, bias, state, tiles, silu)
    channels, width = weight.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1 and weight.is_contiguous() and tiles.tables.is_contiguous()
    _causal_conv_kernel[(len(tiles.tiles), triton.cdiv(channels, _BLOCK))](
        x, weight, bias, out, state.pool.elements, tiles.tiles, tiles.chunks, tiles.tables, state.first,
        x.stride(0), tiles.tables.stride(0), CHANNELS=channels, WIDTH=width, RING=state.size, SILU=silu, BLOCK=_BLOCK,
        TILE=TILE, num_warps=4, **state.pool.sizes, **pdl_options(x.device),
    )  # fmt: skip
    return out


def causal_conv_rows_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: ConvState, rows: StateRows,
    *, gates: torch.Tensor | None = None, kept: torch.Tensor | None = None, silu: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Plain torch form of `causal_conv_rows`."""
    out, width = torch.zeros_like(x), weight.shape[1]
    for table, position, new in rows.present():
        before = conv_inputs(x, state, table, position, width)
        out[new] = convolve(torch.cat((before, x[new])).unfold(0, width, 1), weight, bias, silu)
        write_inputs(x[new], state, table, position)
        if kept is not None:
            assert rows.slots is not None and gates is not None
            entries = torch.arange(position, position + new.stop - new.start, device=x.device) % kept.shape[1]
            kept[rows.slots[new.start // rows.per_row].long(), entries] = torch.cat((out[new], gates[new]), 1)
    return out if kept is None else kept


@jit(unaligned=["slots_ptr", "positions_ptr", "num_new_ptr", "tables_ptr", "gates_ptr"])
def _causal_conv_rows_kernel(
    x_ptr, gates_ptr, weight_ptr, bias_ptr, out_ptr, state_ptr, slots_ptr, positions_ptr, num_new_ptr, tables_ptr,
    first, x_stride, gates_stride, table_stride, part_stride, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    RING: tl.constexpr, GATES: tl.constexpr, ENTRIES: tl.constexpr, PER_ROW: tl.constexpr, TOKENS: tl.constexpr,
    SILU: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)[:, None]
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    position, table_ptr, mask = tl.load(positions_ptr + row), tables_ptr + row * table_stride, channels < CHANNELS
    num_new = tl.where(tl.load(table_ptr) >= 0, 1, 0) if num_new_ptr is None else tl.load(num_new_ptr + row)
    is_new = index < num_new
    tokens = row * PER_ROW + (PER_ROW - num_new) + index
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    # No kernel since the last step writes to the ring. Inputs are added in the order of their positions.
    for tap in tl.static_range(WIDTH - 1):
        back = WIDTH - 1 - tap
        at = first + tl.maximum(position + index - back, 0) % RING * CHANNELS + channels
        stored = channels < tl.where(is_new & (index < back) & (position + index >= back), CHANNELS, 0)
        block = tl.load(table_ptr + at // (PARTS * PART_SIZE), mask=stored, other=0)
        before = tl.load(state_ptr + place(at, block, part_stride, PARTS, PART_SIZE), mask=stored, other=0.0)
        weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=mask, other=0.0)
        total += before.to(tl.float32) * weight.to(tl.float32)
    wait_for_previous(PDL)
    for tap in tl.static_range(WIDTH):
        if WIDTH - tap <= TOKENS:
            back = WIDTH - 1 - tap
            x_ptrs = x_ptr + (tokens - back) * x_stride + channels
            x = tl.load(x_ptrs, mask=mask & is_new & (index >= back), other=0.0)
            weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=mask, other=0.0)
            total += x.to(tl.float32) * weight.to(tl.float32)
    # The last one has the tokens' own inputs, for entries that no token of the row reads.
    mask &= is_new
    at = first + (position + index) % RING * CHANNELS + channels
    block = tl.load(table_ptr + at // (PARTS * PART_SIZE), mask=mask, other=0)
    tl.store(state_ptr + place(at, block, part_stride, PARTS, PART_SIZE), x, mask=mask)
    out = (total / (1 + tl.exp(-total)) if SILU else total).to(out_ptr.dtype.element_ty)
    if ENTRIES > 0:
        entry = tl.load(slots_ptr + row).to(tl.int64) * ENTRIES + (position + index) % ENTRIES
        out_ptrs = out_ptr + entry * (CHANNELS + GATES) + channels
        tl.store(out_ptrs, out, mask=mask)
        is_gate = is_new & (channels < GATES)
        gates = tl.load(gates_ptr + tokens * gates_stride + channels, mask=is_gate, other=0.0)
        tl.store(out_ptrs + CHANNELS, gates, mask=is_gate)
    else:
        # What is not new comes first.
        tokens = row * PER_ROW + (index + PER_ROW - num_new) % PER_ROW
        out = tl.where(is_new, out, tl.zeros_like(out))
        tl.store(out_ptr + tokens * CHANNELS + channels, out, mask=(index < PER_ROW) & (channels < CHANNELS))


def causal_conv_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: ConvState, rows: StateRows,
    *, gates: torch.Tensor | None = None, kept: torch.Tensor | None = None, silu: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Convolve the new tokens of decode rows, and store their inputs.

    x: [num_rows * per_row, channels], channels contiguous; weight, bias, silu: as of `causal_conv`; gates: [num_rows *
    per_row, size], further inputs of a recurrence. Returns [num_rows * per_row, channels], zeros for tokens that are
    not new, or `kept` (see `StateRows`), which takes each token's outputs, and then its gates.
    """
    if not uses_triton(x.device):
        return causal_conv_rows_ref(x, weight, bias, state, rows, gates=gates, kept=kept, silu=silu)
    channels, width = weight.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device) if kept is None else kept
    tokens = triton.next_power_of_2(rows.per_row)
    block = max(_BLOCK, _ROW_BLOCK // tokens)
    gates_stride, num_gates, entries = 0, 0, 0
    if kept is not None:
        assert gates is not None
        gates_stride, num_gates, entries = gates.stride(0), gates.shape[1], kept.shape[1]
    assert x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous()
    _causal_conv_rows_kernel[(len(rows.tables), triton.cdiv(channels, block))](
        x, gates, weight, bias, out, state.pool.elements, rows.slots, rows.positions, rows.num_new, rows.tables,
        state.first, x.stride(0), gates_stride, rows.tables.stride(0), CHANNELS=channels,
        WIDTH=width, RING=state.size, GATES=num_gates, ENTRIES=entries,
        PER_ROW=rows.per_row, TOKENS=tokens, SILU=silu, BLOCK=block, num_warps=4, **state.pool.sizes,
        **pdl_options(x.device),
    )  # fmt: skip
    return out
