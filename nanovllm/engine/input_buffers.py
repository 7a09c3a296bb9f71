"""A batch as tensors, and the per-slot state that lives on the device.

Each running sequence holds a slot, a row of one int32 tensor: its newest token, how many of its tokens are computed,
its sampling parameters and its block table. A decode row is nothing but a slot number; everything else about it is
read from the slot on the device. So the host sends only what changes (who joined, which blocks were added, tokens of
prompts), in one packed copy a step, and a step with nothing new sends nothing.

The host keeps a copy of the slots for what must be known there: the sizes of contexts, and where prompt tokens go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm.engine.messages import ScheduledBatch
from nanovllm.engine.prefix_buffers import PrefixBuffers
from nanovllm.engine.prompt_arrays import PromptArrays, make_prompt_arrays
from nanovllm.kernels.slot_state import (
    BLOCK_TABLE,
    NUM_COMPUTED,
    NUM_PROMPT,
    SEED,
    TEMPERATURE,
    gather_decode_rows,
    scatter_tokens,
)
from nanovllm.utils.context import Context

# Finite in float32 with any noise on it; hotter than this is uniform all the same.
_MAX_TEMPERATURE = 1e30


@dataclass(frozen=True)
class StepShape:
    """What one step is made of: decode rows, prompt tokens, and chunks of prompts, padding included.

    `shares_prefixes` is whether decode rows may attend to a common prefix together, `whole_contexts` as in `Context`.
    """

    num_decodes: int
    num_tokens: int = 0
    num_chunks: int = 0
    shares_prefixes: bool = False
    whole_contexts: bool = False


@dataclass
class StagedStep:
    """What a forward pass is made of, once all of it is on its way to the device.

    Attributes:
        shape: sizes, padding included.
        prompts: the prompt chunks, as tensors on the device; the next step's staging overwrites them.
        context_lens_host: tokens that each sequence attends to, decode rows first.
        query_lens_host: tokens of each chunk.
    """

    shape: StepShape
    prompts: PromptArrays
    context_lens_host: list[int]
    query_lens_host: list[int]


@dataclass
class StepInputs:
    """One forward pass.

    Attributes:
        token_ids, positions: [num_tokens] int32; decode rows first.
        context: for attention.
        sample_rows: [num_samples] rows of the hidden states to sample from; None for all.
        sample_slots: [num_samples] int32; the slots that the sampled tokens belong to.
        sample_columns: [num_samples, BLOCK_TABLE] int32; those slots, up to their block tables.
        output_index: [num_samples] int32; tokens that each sequence has generated before.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    context: Context
    sample_rows: torch.Tensor | None
    sample_slots: torch.Tensor
    sample_columns: torch.Tensor
    output_index: torch.Tensor

    @property
    def temperatures(self) -> torch.Tensor:
        """[num_samples] float32."""
        return self.sample_columns.view(torch.float32)[:, TEMPERATURE]

    @property
    def seeds(self) -> torch.Tensor:
        """[num_samples, 2] int32, low and high word."""
        return self.sample_columns[:, SEED : SEED + 2]


class InputBuffers:
    """Slot state, and the staging of what changes it.

    Args:
        num_slots: sequences that may run at once. One slot more exists, for padding rows: its writes go nowhere.
        max_blocks: entries of a block table.
        block_size: tokens of a block.
        max_num_batched_tokens: most tokens of a step.
        max_prefix_items, rows_per_prefix_item: see `PrefixBuffers`.
        whole_contexts_pay: see `AttentionBackend`; takes the contexts' lengths, without what is shared.
        device: where the state lives.
    """

    def __init__(
        self,
        num_slots: int,
        max_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_prefix_items: int,
        rows_per_prefix_item: int,
        whole_contexts_pay: Callable[[np.ndarray], bool],
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.padding_slot = num_slots
        self._whole_contexts_pay = whole_contexts_pay
        width = BLOCK_TABLE + max_blocks
        self.host_state = np.zeros((num_slots + 1, width), dtype=np.int32)
        self.state = torch.zeros(num_slots + 1, width, dtype=torch.int32, device=device)
        self.decode_slots = torch.full((num_slots,), self.padding_slot, dtype=torch.int32, device=device)
        self._sent_decode_slots: list[int] = []
        self.prefixes = PrefixBuffers(num_slots, block_size, max_prefix_items, rows_per_prefix_item, device)
        # Prompt tokens and chunks, padded; decode slots and prefixes; joining rows in whole, and one new block a slot.
        prompts = PromptArrays.total_size(2 * max_num_batched_tokens, 2 * num_slots)
        changes = 2 * (num_slots + 1) * width + 8 * num_slots + 4 * max_prefix_items
        self._staging = Staging(prompts + changes, device)

    def shape_of(self, batch: ScheduledBatch) -> StepShape:
        """The shape that a batch has without padding."""
        prefix_lens = self.prefixes.plan(batch.decode_slots, self.host_state)
        context_lens = self.host_state[batch.decode_slots, NUM_COMPUTED] + 1
        whole = self._whole_contexts_pay(context_lens if prefix_lens is None else context_lens - prefix_lens)
        sizes = len(batch.decode_slots), batch.num_prompt_tokens, len(batch.chunks)
        return StepShape(*sizes, shares_prefixes=prefix_lens is not None, whole_contexts=whole)

    def stage(self, batch: ScheduledBatch, shape: StepShape) -> StagedStep:
        """Send what a batch changes, padded to `shape`; equal shapes find their tensors at equal addresses."""
        index, value = self._update_host_state(batch)
        prompts = make_prompt_arrays(
            batch.chunks, shape.num_tokens, shape.num_chunks, self.host_state, self.padding_slot, self.block_size
        )
        num_padding = shape.num_decodes - len(batch.decode_slots)
        slots = batch.decode_slots + [self.padding_slot] * num_padding
        changed_slots = np.array([] if slots == self._sent_decode_slots else slots, dtype=np.int32)
        # The prompts' arrays come first, since their sizes follow from the shape.
        prefixes = self.prefixes.to_send() if shape.shares_prefixes else changed_slots[:0]
        sent = self._staging.send([*prompts, changed_slots, prefixes, index, value])
        *prompt_tensors, new_slots, new_prefixes, index_tensor, value_tensor = sent
        self.prefixes.receive(new_prefixes)
        if len(index):
            self.state.view(-1)[index_tensor] = value_tensor
        if len(new_slots):
            self.decode_slots[: len(new_slots)] = new_slots
            self._sent_decode_slots = slots
        decode_lens = self.host_state[batch.decode_slots, NUM_COMPUTED] + 1
        self.host_state[batch.decode_slots, NUM_COMPUTED] = decode_lens
        lens = decode_lens.tolist() + [1] * num_padding
        lens += [chunk.start + len(chunk.token_ids) for chunk in batch.chunks]
        return StagedStep(shape, PromptArrays(*prompt_tensors), lens, [len(chunk.token_ids) for chunk in batch.chunks])

    def stage_empty(self, shape: StepShape) -> StagedStep:
        """Stage a step of `shape` that is all padding; the plan of `shape_of` is lost."""
        batch = ScheduledBatch()
        self.shape_of(batch)
        return self.stage(batch, shape)

    def assemble(self, staged: StagedStep) -> StepInputs:
        """Make one forward pass of decode rows and chunks; its tensors come from the device alone."""
        shape, prompts = staged.shape, staged.prompts
        slots = self.decode_slots[: shape.num_decodes]
        rows = gather_decode_rows(self.state, slots, self.block_size)
        context = Context(
            num_decodes=shape.num_decodes,
            kv_slots=rows.kv_slots,
            block_tables=rows.block_tables,
            context_lens=rows.context_lens,
            cu_seqlens_q=prompts.borders,
            query_tiles=prompts.tiles,
            sample_tiles=prompts.sample_tiles,
            context_lens_host=staged.context_lens_host,
            query_lens_host=staged.query_lens_host,
            whole_contexts=shape.whole_contexts,
            shared_prefixes=self.prefixes.shared if shape.shares_prefixes else None,
        )
        if not shape.num_chunks:
            return StepInputs(rows.token_ids, rows.positions, context, None, slots, rows.columns, rows.output_index)
        context.kv_slots = torch.cat((context.kv_slots, prompts.kv_slots))
        context.block_tables = torch.cat((context.block_tables, self.state[prompts.slots, BLOCK_TABLE:]))
        context.context_lens = torch.cat((context.context_lens, prompts.context_lens))
        positions = torch.cat((rows.positions, prompts.positions))
        decode_rows = torch.arange(shape.num_decodes, device=slots.device)
        sample_rows = torch.cat((decode_rows, prompts.sample_rows + shape.num_decodes))
        sample_slots = torch.cat((slots, prompts.sample_slots))
        columns = self.state[sample_slots, :BLOCK_TABLE]
        return StepInputs(
            token_ids=torch.cat((rows.token_ids, prompts.token_ids)),
            positions=positions,
            context=context,
            sample_rows=sample_rows,
            sample_slots=sample_slots,
            sample_columns=columns,
            output_index=positions[sample_rows] + 1 - columns[:, NUM_PROMPT],
        )

    def scatter(self, inputs: StepInputs, token_ids: torch.Tensor, sampled: torch.Tensor) -> None:
        """Put the sampled tokens [num_samples] into their slots, and into `sampled` for the host."""
        scatter_tokens(self.state, inputs.sample_slots, token_ids, inputs.context.num_decodes, sampled)

    def _update_host_state(self, batch: ScheduledBatch) -> tuple[np.ndarray, np.ndarray]:
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
        return index, state.reshape(-1)[index]


class Staging:
    """One packed copy a step from the host to the device.

    Two pinned buffers take turns, so that one is filled while the other may still be read; an event guards each.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._device_buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
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
