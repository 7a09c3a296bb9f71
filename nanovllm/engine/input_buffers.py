"""A batch as tensors, and the per-slot state that lives on the device.

Each running sequence holds a slot, a row of one int32 tensor: its newest token, how many of its tokens are computed,
its sampling parameters and its block table. A decode row is nothing but a slot number; everything else about it is
read from the slot on the device. So the host sends only what changes (who joined, which blocks were added, tokens of
prompts), in one packed copy a step, and a step with nothing new sends nothing.

The host keeps a copy of the slots for what must be known there: the sizes of contexts, and where prompt tokens go.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from nanovllm.engine.messages import PromptChunk, ScheduledBatch
from nanovllm.utils.context import Context

LAST_TOKEN, NUM_COMPUTED, NUM_PROMPT, TEMPERATURE, SEED, BLOCK_TABLE = 0, 1, 2, 3, 4, 6
"""Columns of the slot state. The seed takes two, low word first; the block table takes the rest."""

# Finite in float32 with any noise on it; hotter than this is uniform all the same.
_MAX_TEMPERATURE = 1e30


@dataclass
class StepInputs:
    """One forward pass.

    Attributes:
        token_ids, positions: [num_tokens] int32; decode rows first.
        context: for attention.
        sample_rows: [num_samples] rows of the hidden states to sample from; None for all.
        sample_slots: [num_samples] the slots that the sampled tokens belong to.
        decode_slots: [num_decodes] slots of the decode rows, padding included.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    context: Context
    sample_rows: torch.Tensor | None
    sample_slots: torch.Tensor
    decode_slots: torch.Tensor


class InputBuffers:
    """Slot state, and the staging of what changes it.

    Args:
        num_slots: sequences that may run at once. One slot more exists, for padding rows: its writes go nowhere.
        max_blocks: entries of a block table.
        block_size: tokens of a block.
        max_num_batched_tokens: most tokens of a step.
        device: where the state lives.
    """

    def __init__(
        self, num_slots: int, max_blocks: int, block_size: int, max_num_batched_tokens: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.padding_slot = num_slots
        width = BLOCK_TABLE + max_blocks
        self.host_state = np.zeros((num_slots + 1, width), dtype=np.int32)
        self.state = torch.zeros(num_slots + 1, width, dtype=torch.int32, device=device)
        self.decode_slots = torch.full((num_slots,), self.padding_slot, dtype=torch.int32, device=device)
        self._sent_decode_slots: list[int] = []
        # Joining rows in whole, one new block for each slot, decode slots, tokens with places, and chunk borders.
        capacity = 2 * (num_slots + 1) * width + 8 * num_slots + 3 * max_num_batched_tokens + 8
        self._staging = Staging(capacity, device)

    def stage(self, batch: ScheduledBatch, num_decodes: int) -> StepInputs:
        """Send what a batch changes, and return its tensors, with decode rows padded to `num_decodes`."""
        updates = self._update_host_state(batch)
        slots = batch.decode_slots + [self.padding_slot] * (num_decodes - len(batch.decode_slots))
        changed_slots = np.array([] if slots == self._sent_decode_slots else slots, dtype=np.int32)
        chunks = self._chunk_arrays(batch.chunks)
        sent = self._staging.send([*updates, changed_slots, *chunks])
        index, value, new_slots, *chunk_tensors = sent
        if len(index):
            self.state.view(-1)[index] = value
        if len(new_slots):
            self.decode_slots[: len(new_slots)] = new_slots
            self._sent_decode_slots = slots
        lens = [int(n) + 1 for n in self.host_state[batch.decode_slots, NUM_COMPUTED]]
        lens += [1] * (num_decodes - len(lens))
        inputs = self.assemble(num_decodes, batch.chunks, chunk_tensors, lens)
        self.host_state[batch.decode_slots, NUM_COMPUTED] += 1
        return inputs

    def assemble(
        self, num_decodes: int, chunks: list[PromptChunk], chunk_tensors: list[torch.Tensor], decode_lens: list[int]
    ) -> StepInputs:
        """Make one forward pass of decode rows, read from their slots on the device, and of chunks."""
        decode = self.decode_inputs(num_decodes, decode_lens)
        if not chunks:
            return decode
        token_ids, positions, kv_slots, chunk_slots, cu_seqlens_q, chunk_lens, sample_rows, sample_slots = chunk_tensors
        context = decode.context
        context.kv_slots = torch.cat((context.kv_slots, kv_slots))
        context.block_tables = torch.cat((context.block_tables, self.state[chunk_slots, BLOCK_TABLE:]))
        context.context_lens = torch.cat((context.context_lens, chunk_lens))
        context.cu_seqlens_q = cu_seqlens_q
        context.context_lens_host += [chunk.start + len(chunk.token_ids) for chunk in chunks]
        context.query_lens_host = [len(chunk.token_ids) for chunk in chunks]
        decode.token_ids = torch.cat((decode.token_ids, token_ids))
        decode.positions = torch.cat((decode.positions, positions))
        decode.sample_rows = torch.cat((torch.arange(num_decodes, device=self.device), sample_rows + num_decodes))
        decode.sample_slots = torch.cat((decode.decode_slots, sample_slots))
        return decode

    def decode_inputs(self, num_decodes: int, context_lens_host: list[int]) -> StepInputs:
        """Make a forward pass of the first `num_decodes` decode rows; reads nothing but tensors on the device."""
        slots = self.decode_slots[:num_decodes]
        rows = self.state[slots]
        positions = rows[:, NUM_COMPUTED].contiguous()
        block_tables = rows[:, BLOCK_TABLE:]
        blocks = block_tables.gather(1, (positions // self.block_size).long().unsqueeze(1)).squeeze(1)
        kv_slots = blocks * self.block_size + positions % self.block_size
        context = Context(
            num_decodes=num_decodes,
            kv_slots=torch.where(slots == self.padding_slot, -1, kv_slots),
            block_tables=block_tables,
            context_lens=positions + 1,
            cu_seqlens_q=slots[:0],
            context_lens_host=context_lens_host,
            query_lens_host=[],
        )
        return StepInputs(rows[:, LAST_TOKEN], positions, context, None, slots, slots)

    def sampling_inputs(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Temperatures [n], seeds [n, 2], and output indices [n] of the rows to sample."""
        rows = self.state[inputs.sample_slots]
        positions = inputs.positions if inputs.sample_rows is None else inputs.positions[inputs.sample_rows]
        output_index = positions + 1 - rows[:, NUM_PROMPT]
        return rows.view(torch.float32)[:, TEMPERATURE], rows[:, SEED : SEED + 2], output_index

    def scatter(self, inputs: StepInputs, token_ids: torch.Tensor) -> None:
        """Put the sampled tokens [num_samples] into their slots, and count the decoded ones as computed."""
        self.state[:, LAST_TOKEN][inputs.sample_slots] = token_ids.int()
        slots = inputs.decode_slots
        live = (slots != self.padding_slot).int()
        self.state[:, NUM_COMPUTED][slots] = inputs.positions[: len(slots)] + live

    def _update_host_state(self, batch: ScheduledBatch) -> list[np.ndarray]:
        """Apply joins, new blocks and chunk ends to the host's copy; return flat indices and values for the device."""
        state = self.host_state
        width = state.shape[1]
        changed = [np.empty(0, dtype=np.int32)]
        for join in batch.joins:
            row = state[join.slot]
            row[NUM_PROMPT] = join.num_prompt_tokens
            row[TEMPERATURE : TEMPERATURE + 1].view(np.float32)[0] = min(join.temperature, _MAX_TEMPERATURE)
            row[SEED : SEED + 2].view(np.uint32)[:] = join.seed & 0xFFFFFFFF, join.seed >> 32
            row[BLOCK_TABLE : BLOCK_TABLE + len(join.block_table)] = join.block_table
            start = join.slot * width
            changed.append(np.arange(start + NUM_PROMPT, start + BLOCK_TABLE + len(join.block_table), dtype=np.int32))
        for new in batch.new_blocks:
            state[new.slot, BLOCK_TABLE + new.index] = new.block_id
        for chunk in batch.chunks:
            state[chunk.slot, NUM_COMPUTED] = chunk.start + len(chunk.token_ids)
        singles = [new.slot * width + BLOCK_TABLE + new.index for new in batch.new_blocks]
        singles += [chunk.slot * width + NUM_COMPUTED for chunk in batch.chunks]
        changed.append(np.array(singles, dtype=np.int32))
        index = np.concatenate(changed)
        return [index, state.reshape(-1)[index]]

    def _chunk_arrays(self, chunks: list[PromptChunk]) -> list[np.ndarray]:
        """Token ids, positions, cache places; slots, borders, context lengths; last rows and slots that sample."""
        if not chunks:
            return []
        lens = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
        borders = np.concatenate(([0], lens.cumsum())).astype(np.int32)
        token_ids = np.concatenate([np.array(chunk.token_ids, dtype=np.int32) for chunk in chunks])
        positions = np.arange(borders[-1], dtype=np.int32) + np.repeat(starts - borders[:-1], lens)
        blocks = self.host_state[np.repeat(slots, lens), BLOCK_TABLE + positions // self.block_size]
        kv_slots = blocks * self.block_size + positions % self.block_size
        for chunk, (first, end) in zip(chunks, pairwise(borders), strict=True):
            if not chunk.store:
                kv_slots[first:end] = -1
        samples = np.array([chunk.samples for chunk in chunks])
        return [token_ids, positions, kv_slots, slots, borders, starts + lens, borders[1:][samples] - 1, slots[samples]]


class Staging:
    """One packed copy a step from the host to the device.

    Two pinned buffers take turns, so that one is filled while the other may still be read; an event guards each.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._device_buffer = torch.empty(capacity, dtype=torch.int32, device=device)
        self._host_buffers = [torch.empty(capacity, dtype=torch.int32, pin_memory=self.is_cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if self.is_cuda else []
        self._turn = 0

    def send(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        """Copy int32 arrays to the device in one piece; returns them as views, valid until the next call."""
        lengths = [len(part) for part in parts]
        total = sum(lengths)
        views = self._device_buffer[:total].split(lengths)
        if total:
            self._turn ^= 1
            if self.is_cuda:
                self._copied[self._turn].synchronize()
            host = self._host_buffers[self._turn][:total]
            np.concatenate(parts, out=host.numpy())
            self._device_buffer[:total].copy_(host, non_blocking=True)
            if self.is_cuda:
                self._copied[self._turn].record()
        return list(views)
