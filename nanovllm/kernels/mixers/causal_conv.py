"""A short causal convolution of each channel, and SiLU where a layer has it.

A state has the inputs of the last tokens in a ring, that at position p as entry `p % size`. It has an entry for each
weight of a filter, and for each draft of a row, so that a token overwrites no input that is still read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.mixers.states import TILE, StateRows, StateTensor, StateTiles

_BLOCK = 64
"""Channels of a program with prompt tokens."""
_ROW_BLOCK = 256
"""Channels of a program with a row of one token."""


@dataclass(frozen=True)
class CausalConv:
    """The convolution of a layer.

    Attributes:
        weight: [channels, width], contiguous, the last column for a token itself; bias: [channels] or None.
        inputs: the rings in states, [entries, channels].
        silu: whether outputs go through SiLU.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    inputs: StateTensor
    silu: bool = True

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of kernels."""
        channels, width = self.weight.shape
        return {"CHANNELS": channels, "WIDTH": width, "RING": self.inputs.shape[0], **self.inputs.arguments}

    def prompt(self, x: torch.Tensor, tiles: StateTiles, stores: bool = True) -> torch.Tensor:
        """Convolve prompt tokens, and store the inputs before the end of each tile that writes a state.

        x: [num_tokens, channels], channels contiguous; stores: False if a scan that follows stores them, on devices
        with Triton. Outputs are not set where no tile has a token.
        """
        if not uses_triton(x.device):
            return self.prompt_ref(x, tiles)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        assert x.stride(1) == 1 and self.weight.is_contiguous() and tiles.tables.is_contiguous()
        programs, options = triton.cdiv(x.shape[1], _BLOCK), {"BLOCK": _BLOCK, **self.sizes, **pdl_options(x.device)}
        _causal_conv_kernel[(len(tiles.tiles), programs)](
            x, self.weight, self.bias, out, tiles_ptr=tiles.tiles, chunks_ptr=tiles.chunks, tables_ptr=tiles.tables,
            x_stride=x.stride(0), table_stride=tiles.tables.stride(0), SILU=self.silu, TILE=TILE, num_warps=4,
            **options,
        )  # fmt: skip
        if stores:
            _store_rings_kernel[(len(tiles.chunks), programs)](
                x, tiles_ptr=tiles.tiles, chunks_ptr=tiles.chunks, tables_ptr=tiles.tables, x_stride=x.stride(0),
                table_stride=tiles.tables.stride(0), num_warps=2, **options,
            )  # fmt: skip
        return out

    def prompt_ref(self, x: torch.Tensor, tiles: StateTiles) -> torch.Tensor:
        """Plain torch form of `prompt`, which stores the inputs."""
        out, stored, num_before = torch.zeros_like(x), [], self.weight.shape[1] - 1
        for first, count, chunk, write in tiles.tiles.tolist():
            if count:
                start, position, read, *_ = tiles.chunks[chunk].tolist()
                ring = None if read < 0 else self.inputs.read(tiles.tables[read])
                before = self.inputs_before(position, ring)[first - start :]
                inputs = torch.cat((before, x[max(start, first - num_before) : first + count]))
                out[first : first + count] = self.convolve(inputs)
                if write >= 0:
                    stored.append((inputs[count:], tiles.tables[write], position + first - start + count))
        # Other tiles may begin with the states that are overwritten.
        for inputs, table, end in stored:
            self.inputs.write(self.with_inputs(self.inputs.read(table), inputs, end), table)
        return out

    def step(
        self, x: torch.Tensor, rows: StateRows, gates: torch.Tensor | None = None, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Convolve the new tokens of decode rows, and store their inputs.

        x: [num_rows * per_row, channels], channels contiguous; gates: [num_rows * per_row, size], further inputs of a
        recurrence. Returns [num_rows * per_row, channels], zeros for tokens that are not new, or `kept` (see
        `StateRows`), which takes each token's outputs, and then its gates.
        """
        if not uses_triton(x.device):
            return self.step_ref(x, rows, gates, kept)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if kept is None else kept
        tokens = triton.next_power_of_2(rows.per_row)
        block = max(_BLOCK, _ROW_BLOCK // tokens)
        gates_stride, num_gates, entries = 0, 0, 0
        if kept is not None:
            assert gates is not None
            gates_stride, num_gates, entries = gates.stride(0), gates.shape[1], kept.shape[1]
        assert x.stride(1) == 1 and self.weight.is_contiguous() and out.is_contiguous()
        _causal_conv_rows_kernel[(len(rows.tables), triton.cdiv(x.shape[1], block))](
            x, gates, self.weight, self.bias, out, slots_ptr=rows.slots, positions_ptr=rows.positions,
            num_new_ptr=rows.num_new, tables_ptr=rows.tables, x_stride=x.stride(0), gates_stride=gates_stride,
            table_stride=rows.tables.stride(0), GATES=num_gates, ENTRIES=entries, PER_ROW=rows.per_row, TOKENS=tokens,
            SILU=self.silu, BLOCK=block, num_warps=4, **self.sizes, **pdl_options(x.device),
        )  # fmt: skip
        return out

    def step_ref(
        self, x: torch.Tensor, rows: StateRows, gates: torch.Tensor | None = None, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Plain torch form of `step`."""
        out = torch.zeros_like(x)
        for row, position, new in rows.present():
            ring, end = self.inputs.read(rows.tables[row]), position + new.stop - new.start
            out[new] = self.convolve(torch.cat((self.inputs_before(position, ring), x[new])))
            self.inputs.write(self.with_inputs(ring, x[new], end), rows.tables[row])
            if kept is not None:
                assert rows.slots is not None and gates is not None
                entries = torch.arange(position, end, device=x.device) % kept.shape[1]
                kept[rows.slots[row].long(), entries] = torch.cat((out[new], gates[new]), 1)
        return out if kept is None else kept

    def convolve(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return outputs, [num_tokens, channels], computed in float32; inputs: also of the width - 1 tokens before."""
        total = (inputs.unfold(0, self.weight.shape[1], 1).float() * self.weight.float()).sum(-1)
        total = total if self.bias is None else total + self.bias.float()
        return (functional.silu(total) if self.silu else total).to(inputs.dtype)

    def inputs_before(self, position: int, ring: torch.Tensor | None) -> torch.Tensor:
        """Return the inputs of the tokens before a position, [width - 1, channels], zeros before the sequence."""
        at = torch.arange(position - self.weight.shape[1] + 1, position, device=self.weight.device)
        if ring is None:
            return self.inputs.pool.new_zeros(len(at), len(self.weight))
        return ring[at % len(ring)].where((at >= 0).unsqueeze(1), 0)

    def with_inputs(self, ring: torch.Tensor, x: torch.Tensor, end: int) -> torch.Tensor:
        """Return a ring with the inputs of the tokens before a position, [num_tokens, channels]; none before 0."""
        at = torch.arange(end - len(x), end, device=x.device)
        ring[at[at >= 0] % len(ring)] = x[at >= 0]
        return ring


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
    x_ptr, pool_ptr, tables_ptr, tokens, channels, mask, chunk_first, position, read, first, x_stride, table_stride,
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
    before = tl.load(pool_ptr + place(index, block, part_stride, PARTS, PART_SIZE), mask=stored, other=0.0)
    return tl.where(inside, x, before).to(tl.float32)


@jit(unaligned=["tiles_ptr", "chunks_ptr", "tables_ptr"])
def _causal_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, pool_ptr, tiles_ptr, chunks_ptr, tables_ptr, first, x_stride, table_stride,
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
                x = inputs_at(x_ptr, pool_ptr, tables_ptr, sources, channels[None, :], valid, chunk_first, position,
                              read, first, x_stride, table_stride, part_stride,
                              CHANNELS, RING, PARTS, PART_SIZE)  # fmt: skip
            weight = tl.load(weight_ptr + channels * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
            total += x * weight[None, :]
        out = total / (1 + tl.exp(-total)) if SILU else total
        places = tokens.to(tl.int64) * CHANNELS + channels[None, :]
        tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=valid)


@jit
def store_ring(
    x_ptr, pool_ptr, tables_ptr, write, end, channels, mask, chunk_first, position, read, first, x_stride,
    table_stride, part_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr,
):  # fmt: skip
    """Store the inputs of the last tokens before token `end` of a chunk in the state `write`."""
    for back in tl.static_range(1, WIDTH):
        at = position + end - back - chunk_first
        if at >= 0:
            x = inputs_at(x_ptr, pool_ptr, tables_ptr, end - back + tl.zeros_like(channels), channels, mask,
                          chunk_first, position, read, first, x_stride, table_stride, part_stride,
                          CHANNELS, RING, PARTS, PART_SIZE)  # fmt: skip
            index = first + at % RING * CHANNELS + channels
            block = tl.load(tables_ptr + write * table_stride + index // (PARTS * PART_SIZE), mask=mask, other=0)
            offsets = place(index, block, part_stride, PARTS, PART_SIZE)
            tl.store(pool_ptr + offsets, x.to(pool_ptr.dtype.element_ty), mask=mask)


@jit(unaligned=["tiles_ptr", "chunks_ptr", "tables_ptr"])
def _store_rings_kernel(
    x_ptr, pool_ptr, tiles_ptr, chunks_ptr, tables_ptr, first, x_stride, table_stride, part_stride,
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
            store_ring(x_ptr, pool_ptr, tables_ptr, write, end, channels, channels < CHANNELS, chunk_first, position,
                       read, first, x_stride, table_stride, part_stride,
                       CHANNELS, WIDTH, RING, PARTS, PART_SIZE)  # fmt: skip


@jit(unaligned=["slots_ptr", "positions_ptr", "num_new_ptr", "tables_ptr", "gates_ptr"])
def _causal_conv_rows_kernel(
    x_ptr, gates_ptr, weight_ptr, bias_ptr, out_ptr, pool_ptr, slots_ptr, positions_ptr, num_new_ptr, tables_ptr,
    first, x_stride, gates_stride, table_stride, part_stride, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    RING: tl.constexpr, GATES: tl.constexpr, ENTRIES: tl.constexpr, PER_ROW: tl.constexpr, TOKENS: tl.constexpr,
    SILU: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)[:, None]
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    position, table_ptr, mask = tl.load(positions_ptr + row), tables_ptr + row * table_stride, channels < CHANNELS
    num_new = tl.where(tl.load(table_ptr) >= 0, 1, 0) if num_new_ptr is None else tl.load(num_new_ptr + row)
    is_new = index < num_new
    tokens = row * PER_ROW + index
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channels, mask=mask, other=0.0).to(tl.float32)
    # No kernel since the last step writes to the ring. Inputs are added in the order of their positions.
    for tap in tl.static_range(WIDTH - 1):
        back = WIDTH - 1 - tap
        at = first + tl.maximum(position + index - back, 0) % RING * CHANNELS + channels
        stored = channels < tl.where(is_new & (index < back) & (position + index >= back), CHANNELS, 0)
        block = tl.load(table_ptr + at // (PARTS * PART_SIZE), mask=stored, other=0)
        before = tl.load(pool_ptr + place(at, block, part_stride, PARTS, PART_SIZE), mask=stored, other=0.0)
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
    tl.store(pool_ptr + place(at, block, part_stride, PARTS, PART_SIZE), x, mask=mask)
    out = (total / (1 + tl.exp(-total)) if SILU else total).to(out_ptr.dtype.element_ty)
    if ENTRIES > 0:
        entry = tl.load(slots_ptr + row).to(tl.int64) * ENTRIES + (position + index) % ENTRIES
        out_ptrs = out_ptr + entry * (CHANNELS + GATES) + channels
        tl.store(out_ptrs, out, mask=mask)
        is_gate = is_new & (channels < GATES)
        gates = tl.load(gates_ptr + tokens * gates_stride + channels, mask=is_gate, other=0.0)
        tl.store(out_ptrs + CHANNELS, gates, mask=is_gate)
    else:
        out = tl.where(is_new, out, tl.zeros_like(out))
        tl.store(out_ptr + tokens * CHANNELS + channels, out, mask=(index < PER_ROW) & (channels < CHANNELS))
