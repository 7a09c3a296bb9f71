"""Drafts the tokens that follow the newest of each sequence, on the device, for the next step to verify."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

import numpy as np
import torch
from typing_extensions import override

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.metadata import StepMetadata, set_step_metadata
from nanovllm.config import SpeculativeConfig
from nanovllm.kernels.drafts import ngram_drafts
from nanovllm.kernels.slot_tensors import SlotTensors, gather_decode_rows
from nanovllm.models.draft_head import DraftHead
from nanovllm.runner.batch import StepInputs
from nanovllm.utils.device import to_device


class Drafter(ABC):
    """Fills `SlotTensors.drafts`, with -1 from the first draft on that it has not."""

    @abstractmethod
    def add(self, slot: int, token_ids: array[int]) -> None:
        """Begin a sequence in a slot, whose tokens so far are these."""

    @abstractmethod
    def propose(self, state: SlotTensors, inputs: StepInputs, sampled: torch.Tensor) -> None:
        """Draft for the step's `sample_slots`, after their new tokens were written into the slots.

        Where `StepInputs.drafts` is false, drafts stay as they are, and only what later ones need is computed.
        sampled: [num_samples] int64; the token sampled after each of the step's sampled tokens. A CUDA graph may hold
        this.
        """


class NgramDrafter(Drafter):
    """Drafts what followed the longest match of the newest tokens in prompt and output.

    history: [num_slots + 1, max_model_len + num_drafts + 1] int32, the tokens of each slot's sequence.
    """

    def __init__(self, config: SpeculativeConfig, num_slots: int, max_model_len: int, device: torch.device) -> None:
        self.lookup = config.prompt_lookup_min, config.prompt_lookup_max
        size = num_slots + 1, max_model_len + config.num_speculative_tokens + 1
        self.history = torch.zeros(size, dtype=torch.int32, device=device)
        self._ahead = torch.arange(1, config.num_speculative_tokens + 2, device=device)

    @override
    def add(self, slot: int, token_ids: array[int]) -> None:
        tokens = torch.from_numpy(np.array(token_ids, dtype=np.int32))
        self.history[slot, : len(tokens)] = to_device(tokens, self.history.device)

    @override
    def propose(self, state: SlotTensors, inputs: StepInputs, sampled: torch.Tensor) -> None:
        slots, positions, metadata = inputs.sample_slots.long(), inputs.positions.long(), inputs.metadata
        rows, count, per_row = metadata.num_decodes, metadata.num_row_tokens, metadata.num_queries
        # Behind the accepted drafts these are wrong, and not read before they are written again.
        places = positions[:count:per_row, None] + self._ahead[:per_row]
        self.history[slots[:rows, None], places] = sampled[:count].view(rows, per_row).int()
        if inputs.sample_indices is not None:
            self.history[slots[rows:], positions[inputs.sample_indices[count:]] + 1] = sampled[count:].int()
        if inputs.drafts:
            ngram_drafts(state, self.history, inputs.sample_slots, self.lookup)


class HeadDrafter(Drafter):
    """Drafts with a head that reads the model's hidden states, and keeps its own keys in the same blocks.

    In every step the head, whose attention layer is bound to a cache, stores its keys of the step's tokens, each with
    the one after it. Its keys are therefore shared, copied and evicted with the model's. A block's last keys are of the
    text that it was first computed for: where texts part right after a block, they differ by one embedding. Its layer
    only runs in steps that draft: for the newest token of each row, and then for one draft after another.
    """

    def __init__(self, head: DraftHead, backend: AttentionBackend, *, block_size: int, num_drafts: int) -> None:
        self.head, self.backend, self.block_size, self.num_drafts = head, backend, block_size, num_drafts
        # The plan of a single row divides its context, which may be long.
        one = np.zeros(1, dtype=np.int32)
        self._variant = backend.plan_host(one, one, one.reshape(1, 1)).variant

    @override
    def add(self, slot: int, token_ids: array[int]) -> None:
        """The head's keys are cached with the model's."""

    @override
    def propose(self, state: SlotTensors, inputs: StepInputs, sampled: torch.Tensor) -> None:
        head = self.head
        assert inputs.hidden_states is not None
        embeds = head.embed(_next_token_ids(inputs, sampled, len(state.last_token) - 1))
        hidden = head.begin(inputs.hidden_states)
        with set_step_metadata(inputs.metadata):
            head.store(embeds, hidden, inputs.positions)
        if not inputs.drafts:
            return
        slots = inputs.sample_slots.long()
        rows, tokens = _newest_rows(inputs, state.num_computed[slots]), state.last_token[slots]
        is_padding = slots == len(state.last_token) - 1
        hidden, group = hidden[rows], self.head.attention_layers[0].layer.group
        for number in range(self.num_drafts):
            step, positions = self._step_of_drafts(state, inputs.sample_slots, number)
            # Blocks beyond are other sequences'.
            has_room = step.slot_mappings[group] >= 0
            if not number:
                # Keys in shared blocks stay as they are. Padding may stand for any token.
                places = inputs.metadata.slot_mappings
                step.slot_mappings = [mapping[rows].masked_fill(is_padding, -1) for mapping in places]
            self.backend.plan(step)
            with set_step_metadata(step):
                states, hidden = head.advance(head.embed(tokens), hidden, positions)
            tokens = head.draft(states)
            state.drafts[slots, number] = tokens.where(has_room, -1).int()

    def _step_of_drafts(
        self, state: SlotTensors, slots: torch.Tensor, number: int
    ) -> tuple[StepMetadata, torch.Tensor]:
        """Return the metadata of a row per slot for a draft, or the newest token (0), and its position."""
        rows, none = gather_decode_rows(state, slots, self.block_size, ahead=number - 1), slots.new_empty(0)
        step = StepMetadata(
            num_decodes=len(slots), slot_mappings=list(rows.slot_mapping), block_tables=list(rows.block_tables),
            seq_lens=rows.seq_lens, cu_seqlens_q=none, query_tiles=none, sample_tiles=none,
            seq_lens_host=[] if slots.is_cuda else rows.seq_lens.tolist(), variant=self._variant,
        )  # fmt: skip
        return step, rows.positions


def _next_token_ids(inputs: StepInputs, sampled: torch.Tensor, padding_slot: int) -> torch.Tensor:
    """Return the token after each of a step's tokens, [num_tokens] int32 or int64."""
    first, num_tokens, successors = inputs.metadata.num_row_tokens, len(inputs.token_ids), inputs.successors
    if inputs.sample_indices is None or successors is None:
        return sampled
    # Padding writes to the entry after the last.
    following = torch.cat((sampled[:first].int(), inputs.token_ids[first + 1 :], successors.new_zeros(2)))
    ends = inputs.metadata.cu_seqlens_q[1:] - 1 + first
    following[ends.where(successors >= 0, num_tokens).long()] = successors
    is_padding = inputs.sample_slots[-len(successors) :] == padding_slot
    following[inputs.sample_indices[first:].masked_fill(is_padding, num_tokens).long()] = sampled[first:].int()
    return following[:num_tokens]


def _newest_rows(inputs: StepInputs, num_computed: torch.Tensor) -> torch.Tensor:
    """Return the tokens of a step whose successors are now the newest of their sequences, [num_samples] int64."""
    metadata = inputs.metadata
    starts = torch.arange(0, metadata.num_row_tokens, metadata.num_queries, device=num_computed.device)
    # Padding computes nothing.
    rows = starts + (num_computed[: metadata.num_decodes] - inputs.positions[starts] - 1).clamp(min=0)
    if inputs.sample_indices is None:
        return rows
    return torch.cat((rows, inputs.sample_indices[metadata.num_row_tokens :]))
