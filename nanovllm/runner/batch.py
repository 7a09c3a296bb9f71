"""Puts a scheduled batch on the device as tensors, padded to a size that a CUDA graph may have.

A decode row is only a slot number; everything else about it is read from the slot on the device (`SlotState`). So the
host sends only changes: new requests, new blocks, and the tokens of prompts, in one packed copy per step. A step
without changes sends nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import StepMetadata
from nanovllm.kernels.attention.prefill_attention import QUERY_TILE
from nanovllm.kernels.mixers.states import TILE, StateRows, StateTiles
from nanovllm.kernels.slot_tensors import DecodeRows, gather_decode_rows
from nanovllm.runner.messages import NO_ROWS, Chunk, ScheduledBatch
from nanovllm.runner.slot_state import SlotState
from nanovllm.sampling.sampler import ExtraRows, Sampled, SamplingInputs


@dataclass(frozen=True)
class StepShape:
    """Sizes of one step: decode rows, prompt tokens and prompt chunks; with padding in a `DeviceStep`.

    `variant` is the attention backend's, see `AttentionBackend.plan_host`. With `num_drafts` each decode row has that
    many tokens more. `drafts`: whether it ends with drafts for the next step.
    """

    num_decodes: int
    num_prompt_tokens: int = 0
    num_chunks: int = 0
    variant: Hashable = None
    num_drafts: int = 0
    drafts: bool = False

    @property
    def num_row_tokens(self) -> int:
        """Tokens of the decode rows."""
        return self.num_decodes * (1 + self.num_drafts)

    @property
    def num_logits(self) -> int:
        """Rows of logits, of all tokens of the decode rows, and one for each chunk."""
        return self.num_row_tokens + self.num_chunks


@dataclass
class StepInputs:
    """The inputs of one step on the device; decode rows first.

    Attributes:
        token_ids, positions: [num_tokens] int32.
        metadata: what attention reads.
        sample_indices: [num_samples]; the tokens whose hidden states are sampled from; None for all.
        sample_slots: [num_rows] int32; the slots of decode rows, and of chunks that end a prompt.
        sampling: the sampling parameters of each sample.
        successors: [num_chunks] int32; the token after each chunk, -1 if none is known. Empty without drafts or chunks.
        drafts: see `StepShape`.
        hidden_states: [num_tokens, size]; of all tokens, for the drafter. None if it reads none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: StepMetadata
    sample_indices: torch.Tensor | None
    sample_slots: torch.Tensor
    sampling: SamplingInputs
    successors: torch.Tensor | None = None
    drafts: bool = False
    hidden_states: torch.Tensor | None = None


@dataclass(frozen=True)
class Unsampled:
    """The result of a forward pass whose sampling waits for masks, or for options beyond a temperature."""

    inputs: StepInputs
    # [num_samples, tokens of this rank]
    logits: torch.Tensor
    # [num_prompt_tokens, hidden_size] by layer, see `SamplingParams.hidden_states`; empty unless chunks ask for any.
    prompt_states: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class DeviceStep:
    """A step on the device, from sending its plan (`batch`) to the result of its forward pass (`computed`).

    Attributes:
        shape: sizes, padding included.
        is_capture_size: whether a CUDA graph may be captured for the shape.
        prompts: the chunks, as tensors on the device; the next step's staging overwrites them.
        seq_lens_host: tokens that each sequence attends to, decode rows first; empty if a graph may be captured.
        query_lens_host: tokens of each chunk; likewise.
        extra: options of rows beyond a temperature.
    """

    batch: ScheduledBatch
    shape: StepShape
    is_capture_size: bool
    prompts: PromptArrays
    seq_lens_host: list[int]
    query_lens_host: list[int]
    extra: ExtraRows | None = None
    computed: Sampled | Unsampled | None = None


class PromptArrays(NamedTuple):
    """Arrays of int32 (numpy on the host, torch on the device) for T prompt tokens in C chunks, padding included.

    G is the number of groups of the KV cache.

    Attributes:
        token_ids, positions: [T].
        slot_mapping: [G * T], group after group, `block * block_size + offset`; -1 stores nothing, as for padding.
        slots, seq_lens: [C]; a chunk's slot, and the tokens up to its end. Padding has the padding slot, and 1.
        cu_seqlens_q: [C + 1]; where each chunk starts among the tokens.
        sample_indices, sample_slots: [C]; the last tokens of the chunks that end a prompt (padding: 0, its slot).
        tiles: [2 * num_tiles]; the chunk of each tile of queries (-1 for padding), then its number within the chunk.
        sample_tiles: [2 * C]; likewise for the tiles that contain one of sample_indices.
        successors: [C]; the token after each chunk, -1 if none is known. Empty in engines without drafts.
        state_tiles, state_chunks: [4 * num_tiles] and [5 * C], if layers keep states; see `StateTiles`.
        kept_states: [S * n]; blocks of the states that are kept within chunks.
    """

    token_ids: Any
    positions: Any
    slot_mapping: Any
    slots: Any
    seq_lens: Any
    cu_seqlens_q: Any
    sample_indices: Any
    sample_slots: Any
    tiles: Any
    sample_tiles: Any
    successors: Any
    state_tiles: Any
    state_chunks: Any
    kept_states: Any


_NO_PROMPTS = PromptArrays._make([NO_ROWS.slots] * len(PromptArrays._fields))
"""Empty arrays, so that nothing has to be sent."""


@dataclass(frozen=True)
class PromptLayout:
    """Lays out prompt chunks as arrays.

    Attributes:
        block_tables: [num_slots + 1, G, max_blocks] int32; of all slots, on the host. The last slot is for padding.
        block_size: tokens in a block.
        num_state_blocks: blocks of a state; 0 if no layer keeps any.
        has_drafts: whether the engine drafts.
    """

    block_tables: np.ndarray
    block_size: int
    num_state_blocks: int = 0
    has_drafts: bool = False

    def arrays(self, chunks: list[Chunk], num_tokens: int, num_chunks: int) -> PromptArrays:
        """Return the arrays of chunks, padded for `num_tokens` tokens and `num_chunks` chunks."""
        if not num_chunks:
            return _NO_PROMPTS
        tables, block_size, padding_slot = self.block_tables, self.block_size, len(self.block_tables) - 1
        lens = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
        cu_seqlens_q = np.concatenate(([0], lens.cumsum())).astype(np.int32)
        token_ids = np.concatenate([np.asarray(chunk.token_ids) for chunk in chunks] or [slots])
        positions = np.arange(cu_seqlens_q[-1], dtype=np.int32) + np.repeat(starts - cu_seqlens_q[:-1], lens)
        slot_mapping = np.full((tables.shape[1], num_tokens), -1, dtype=np.int32)
        blocks = tables[np.repeat(slots, lens), :, positions // block_size].T
        slot_mapping[:, : len(positions)] = blocks * block_size + positions % block_size
        for chunk, (first, end) in zip(chunks, pairwise(cu_seqlens_q), strict=True):
            if not chunk.store:
                slot_mapping[:, first:end] = -1
        samples = np.array([chunk.samples for chunk in chunks], dtype=bool)
        successors = np.array([chunk.successor for chunk in chunks], dtype=np.int32)
        state_tiles, state_chunks, kept_states = self._state_arrays(chunks, num_tokens, num_chunks)
        return PromptArrays(
            token_ids=_pad(token_ids, num_tokens, 0),
            positions=_pad(positions, num_tokens, 0),
            slot_mapping=slot_mapping.reshape(-1),
            slots=_pad(slots, num_chunks, padding_slot),
            seq_lens=_pad(starts + lens, num_chunks, 1),
            cu_seqlens_q=_pad(cu_seqlens_q, num_chunks + 1, int(cu_seqlens_q[-1])),
            sample_indices=_pad(cu_seqlens_q[1:][samples] - 1, num_chunks, 0),
            sample_slots=_pad(slots[samples], num_chunks, padding_slot),
            tiles=_tiles(lens, starts, num_tokens // QUERY_TILE + num_chunks),
            sample_tiles=np.concatenate(
                (_pad(np.flatnonzero(samples), num_chunks, -1), _pad((lens[samples] - 1) // QUERY_TILE, num_chunks, 0))
            ),
            successors=_pad(successors, num_chunks, -1) if self.has_drafts else NO_ROWS.slots,
            state_tiles=state_tiles,
            state_chunks=state_chunks,
            kept_states=kept_states,
        )

    def _state_arrays(
        self, chunks: list[Chunk], num_tokens: int, num_chunks: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the fields of `StateTiles`, flat.

        Each chunk starts from its slot's state and leaves its own there. The tables have a row for each chunk,
        then one for each kept state.
        """
        num_blocks = self.num_state_blocks
        if not num_blocks:
            return NO_ROWS.slots, NO_ROWS.slots, NO_ROWS.slots
        tiles: list[tuple[int, int, int, int]] = []
        rows: list[tuple[int, int, int, int, int]] = []
        kept: list[int] = []
        first = 0
        for number, chunk in enumerate(chunks):
            first_tile, done, length = len(tiles), 0, len(chunk.token_ids)
            writes = [(state.num_tokens - chunk.start, state.block_ids) for state in chunk.kept_states]
            for end, block_ids in [*writes, (length, None)]:
                for start in range(done, end, TILE):
                    stop, write = min(start + TILE, end), -1
                    if stop == end:
                        write = number if block_ids is None else num_chunks + len(kept) // num_blocks
                    tiles.append((first + start, stop - start, number, write))
                kept += block_ids or ()
                done = end
            rows.append((first, chunk.start, number if chunk.start else -1, first_tile, len(tiles) - first_tile))
            first += length
        # States are kept at block ends within chunks, and before a prompt's last token.
        most_kept = num_tokens // self.block_size + 2 * num_chunks
        most_tiles = num_tokens // TILE + num_chunks + most_kept
        return (
            _pad_rows(tiles, most_tiles, (0, 0, 0, -1)),
            _pad_rows(rows, num_chunks, (0, 0, -1, 0, 0)),
            _pad(np.array(kept, dtype=np.int32), most_kept * num_blocks, 0),
        )


def _pad_rows(rows: Sequence[tuple[int, ...]], size: int, padding: tuple[int, ...]) -> np.ndarray:
    """Return rows, and padding up to `size` rows, flat."""
    return np.array([*rows, *[padding] * (size - len(rows))], dtype=np.int32).reshape(-1)


def _tiles(lens: np.ndarray, starts: np.ndarray, size: int) -> np.ndarray:
    """Return every chunk's tiles of queries, longest contexts first, since they take the longest."""
    counts = -(-lens // QUERY_TILE)
    chunk = np.repeat(np.arange(len(lens), dtype=np.int32), counts)
    number = np.arange(len(chunk), dtype=np.int32) - np.repeat(counts.cumsum() - counts, counts)
    order = np.argsort(-(starts[chunk] + number * QUERY_TILE), kind="stable")
    return np.concatenate((_pad(chunk[order], size, -1), _pad(number[order], size, 0)))


def _pad(array: np.ndarray, size: int, value: int) -> np.ndarray:
    out = np.full(size, value, dtype=np.int32)
    out[: len(array)] = array
    return out


class Staging:
    """Two pinned buffers on the host, which alternate and are guarded by events, and their copy on the device."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._device_buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._host_buffers = [torch.empty(capacity, dtype=torch.int32, pin_memory=self.is_cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if self.is_cuda else []
        self._turn = 0

    def send(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        """Copy int32 arrays to the device in one non-blocking copy; returns views, valid until the next call."""
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


class BatchBuilder:
    """Turns scheduled batches into tensors; the last group of the cache has `num_state_blocks` of each state."""

    def __init__(
        self, num_slots: int, max_blocks: int, block_size: int, max_num_batched_tokens: int, backend: AttentionBackend,
        device: torch.device,
        *, num_groups: int, num_state_blocks: int = 0, num_drafts: int = 0,
    ) -> None:  # fmt: skip
        self.block_size, self.num_drafts = block_size, num_drafts
        self._num_state_blocks = num_state_blocks
        self.slots = SlotState(num_slots, max(max_blocks, num_state_blocks), num_groups, device, num_drafts)
        # [num_slots + 1]; accepted tokens of each slot that are not in its state yet, see `StateRows`.
        self.num_pending: torch.Tensor | None = None
        if num_state_blocks:
            # Padding has no state.
            self.slots.tensors.block_tables[self.slots.padding_slot, -1] = -1
            if num_drafts:
                self.num_pending = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self._backend = backend
        self._decode_slots = torch.full((num_slots,), self.slots.padding_slot, dtype=torch.int32, device=device)
        self._num_new = torch.ones_like(self._decode_slots)
        self._sent_decode_slots = self._sent_num_new = self._sent_plan = NO_ROWS.slots
        self._layout = PromptLayout(self.slots.block_tables, block_size, num_state_blocks, num_drafts > 0)
        # The most that a step sends: padded prompts; decode slots; attention's plan; indices and values of all slots.
        prompts = sum(map(len, self._layout.arrays([], 2 * max_num_batched_tokens, 2 * num_slots)))
        self._staging = Staging(prompts + 2 * self.slots.size + 2 * num_slots + len(backend.plan_buffer), device)

    def plan(self, batch: ScheduledBatch) -> tuple[StepShape, np.ndarray]:
        """Return the shape of a batch without padding, and the device part of attention's plan."""
        # Layers that see all tokens, and may share attention over common prefixes, are in the first group if in any.
        slots, rows = self.slots, batch.rows
        if rows.num_computed is not None:
            slots.num_computed[rows.slots] = rows.num_computed
        num_drafts = self.num_drafts if self.num_drafts and (rows.num_new > 1).any() else 0
        decoding = NO_ROWS.slots if num_drafts else rows.slots
        variant, array = self._backend.plan_host(decoding, slots.num_computed, slots.block_tables[:, 0])
        return StepShape(len(rows), batch.num_chunk_tokens, len(batch.chunks), variant, num_drafts, batch.drafts), array

    def send(
        self, batch: ScheduledBatch, shape: StepShape, plan: np.ndarray = NO_ROWS.slots,
        *, is_capture_size: bool = False,
    ) -> DeviceStep:  # fmt: skip
        """Update the host's copy of the slots and send changes to the device, padded to `shape`.

        Equal shapes get their tensors at equal addresses, as CUDA graphs need; `plan` is from the method `plan`.
        """
        slots, chunks = self.slots, batch.chunks
        changed_index, changed_values = slots.update_host(batch)
        prompts = self._layout.arrays(chunks, shape.num_prompt_tokens, shape.num_chunks)
        num_padding = shape.num_decodes - len(batch.rows)
        decode_slots = batch.rows.slots
        if num_padding:
            decode_slots = np.append(decode_slots, np.full(num_padding, slots.padding_slot, dtype=np.int32))
        changed_slots = NO_ROWS.slots if np.array_equal(decode_slots, self._sent_decode_slots) else decode_slots
        num_new, changed_num_new = batch.rows.num_new, NO_ROWS.slots
        if shape.num_drafts and not np.array_equal(num_new, self._sent_num_new):
            changed_num_new = num_new
        # The prompts' arrays come first, since their sizes follow from the shape.
        changed_plan = NO_ROWS.slots if plan is self._sent_plan else plan
        sent = self._staging.send(
            [*prompts, changed_slots, changed_num_new, changed_plan, changed_index, changed_values]
        )
        *prompt_tensors, new_slots, new_num_new, new_plan, index_tensor, value_tensor = sent
        if len(new_plan):
            self._backend.plan_buffer.copy_(new_plan)
            self._sent_plan = plan
        slots.update_device(index_tensor, value_tensor)
        if len(new_slots):
            self._decode_slots[: len(new_slots)] = new_slots
            self._sent_decode_slots = decode_slots
        if len(new_num_new):
            self._num_new[: len(new_num_new)] = new_num_new
            self._sent_num_new = num_new
        num_computed, per_row = slots.num_computed[batch.rows.slots], 1 + shape.num_drafts
        slots.num_computed[batch.rows.slots] = num_computed + batch.rows.num_new
        seq_lens, query_lens = list[int](), list[int]()
        if not is_capture_size:
            seq_lens = (num_computed + per_row).tolist() + [per_row] * num_padding
            seq_lens += [chunk.start + len(chunk.token_ids) for chunk in chunks]
            query_lens = [len(chunk.token_ids) for chunk in chunks]
        return DeviceStep(batch, shape, is_capture_size, PromptArrays._make(prompt_tensors), seq_lens, query_lens)

    def send_empty(self, shape: StepShape, *, is_capture_size: bool = True) -> DeviceStep:
        """Send a step of padding only; the host treats it as one chunk if no graph may be captured for it."""
        step = self.send(ScheduledBatch(), shape, is_capture_size=is_capture_size)
        if not is_capture_size:
            step.seq_lens_host = step.query_lens_host = [shape.num_prompt_tokens]
        return step

    def gather(self, step: DeviceStep) -> StepInputs:
        """Assemble a step's inputs from data on the device; a CUDA graph may hold this."""
        shape, prompts, state = step.shape, step.prompts, self.slots.tensors
        slots = self._decode_slots[: shape.num_decodes]
        num_row_tokens, num_new = shape.num_row_tokens, self._num_new[: len(slots)] if shape.num_drafts else None
        decodes = gather_decode_rows(state, slots, self.block_size, num_new)
        metadata = self._metadata(step, decodes)
        if self._num_state_blocks:
            metadata.state_rows = self._state_rows(slots, decodes, step)
            metadata.state_tiles = self._state_tiles(prompts)
        token_ids, positions, sample_slots, sample_indices = decodes.token_ids, decodes.positions, slots, None
        sampling = SamplingInputs(decodes.temperatures, decodes.seeds, decodes.output_index)
        if shape.num_chunks:
            token_ids = torch.cat((token_ids, prompts.token_ids))
            positions = torch.cat((positions, prompts.positions))
            decode_indices = torch.arange(num_row_tokens, device=slots.device)
            sample_indices = torch.cat((decode_indices, prompts.sample_indices + num_row_tokens))
            sample_slots = torch.cat((slots, prompts.sample_slots))
            # Torch casts a 32-bit index anew at each use.
            index = sample_slots.long()
            if shape.num_drafts:
                per_row = slots.long().repeat_interleave(1 + shape.num_drafts, output_size=num_row_tokens)
                index = torch.cat((per_row, prompts.sample_slots.long()))
            output_index = positions[sample_indices] + 1 - state.num_prompt[index]
            sampling = SamplingInputs(state.temperature[index], state.seed[index], output_index)
        return StepInputs(
            token_ids, positions, metadata, sample_indices, sample_slots, sampling, prompts.successors, shape.drafts
        )

    def _metadata(self, step: DeviceStep, decodes: DecodeRows) -> StepMetadata:
        """Return what attention reads: decode rows, then chunks."""
        shape, prompts = step.shape, step.prompts
        slot_mappings, block_tables = list(decodes.slot_mapping), list(decodes.block_tables)
        seq_lens = decodes.seq_lens
        if shape.num_chunks:
            # Each group's tables are separate tensors, and therefore aligned.
            tables = self.slots.tensors.block_tables[prompts.slots]
            new_mappings = prompts.slot_mapping.view(len(slot_mappings), -1)
            slot_mappings = [torch.cat(parts) for parts in zip(slot_mappings, new_mappings, strict=True)]
            block_tables = [torch.cat(parts) for parts in zip(block_tables, tables.unbind(1), strict=True)]
            seq_lens = torch.cat((seq_lens, prompts.seq_lens))
        return StepMetadata(
            num_decodes=shape.num_decodes,
            slot_mappings=slot_mappings,
            block_tables=block_tables,
            seq_lens=seq_lens,
            cu_seqlens_q=prompts.cu_seqlens_q,
            query_tiles=prompts.tiles,
            sample_tiles=prompts.sample_tiles,
            seq_lens_host=step.seq_lens_host,
            query_lens_host=step.query_lens_host,
            variant=shape.variant,
            row_positions=decodes.positions if shape.num_drafts else None,
        )

    def _state_tiles(self, prompts: PromptArrays) -> StateTiles:
        """Return the states of the chunks: sequences own the ones in their tables, and overwrite them."""
        num_blocks = self._num_state_blocks
        kept = prompts.kept_states.view(len(prompts.kept_states) // num_blocks, num_blocks)
        tables = torch.cat((self.slots.tensors.block_tables[prompts.slots, -1, :num_blocks], kept))
        chunks = prompts.state_chunks.view(len(prompts.slots), 5)
        return StateTiles(prompts.state_tiles.view(len(prompts.state_tiles) // 4, 4), chunks, tables)

    def _state_rows(self, slots: torch.Tensor, decodes: DecodeRows, step: DeviceStep) -> StateRows:
        """Return the states of the decode rows."""
        tables = decodes.block_tables[-1][:, : self._num_state_blocks]
        if self.num_pending is None:
            return StateRows(decodes.positions, tables)
        # A chunk stores its states at once.
        self.num_pending.index_fill_(0, step.prompts.slots.long(), 0)
        positions = self.slots.tensors.num_computed[slots]
        num_new = (decodes.seq_lens - positions).where(slots != self.slots.padding_slot, 0)
        return StateRows(positions, tables, 1 + step.shape.num_drafts, slots, self.num_pending[slots], num_new)
