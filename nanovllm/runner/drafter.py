"""Drafts the tokens that follow the newest of each sequence, on the device, for the next step to verify."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

import numpy as np
import torch
from typing_extensions import override

from nanovllm.config import SpeculativeConfig
from nanovllm.kernels.drafts import ngram_drafts
from nanovllm.kernels.slot_tensors import SlotTensors
from nanovllm.runner.batch import StepInputs


class Drafter(ABC):
    """Fills `SlotTensors.drafts`, with -1 from the first draft on that it has not."""

    @abstractmethod
    def add(self, slot: int, cached_token_ids: array[int]) -> None:
        """Begin a sequence in a slot; no step computes the tokens of it that are cached."""

    @abstractmethod
    def propose(self, state: SlotTensors, inputs: StepInputs, sampled: torch.Tensor) -> None:
        """Draft for the step's `sample_slots`, after their new tokens were written into the slots.

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

    @override
    def add(self, slot: int, cached_token_ids: array[int]) -> None:
        if cached_token_ids:
            tokens = torch.from_numpy(np.array(cached_token_ids, dtype=np.int32))
            if self.history.is_cuda:
                tokens = tokens.pin_memory()
            self.history[slot, : len(tokens)].copy_(tokens, non_blocking=True)

    @override
    def propose(self, state: SlotTensors, inputs: StepInputs, sampled: torch.Tensor) -> None:
        assert inputs.token_slots is not None
        # What is not new has the slot of padding.
        slots, positions = inputs.token_slots.long(), inputs.positions.long()
        self.history[slots, positions] = inputs.token_ids
        if inputs.sample_indices is not None:
            num_chunks = len(sampled) - inputs.num_row_tokens
            slots = torch.cat((slots[: inputs.num_row_tokens], inputs.sample_slots[-num_chunks:].long()))
            positions = positions[inputs.sample_indices]
        # Behind the accepted drafts these are wrong, and not read before they are written again.
        self.history[slots, positions + 1] = sampled.int()
        ngram_drafts(state, self.history, inputs.sample_slots, self.lookup)
