"""What the host plans of a step's attention: which variant of the kernels it takes, and what they must be told."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.attention.cascade_buffers import CascadeBuffers

NOTHING = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class DecodeContexts:
    """The contexts that decode rows attend to, on the host.

    Attributes:
        slots: [num_rows] int32; the rows' slots.
        num_computed: [num_slots]; tokens of each slot that are stored, without the one of this step.
        block_tables: [num_slots, max_blocks] int32.
    """

    slots: np.ndarray
    num_computed: np.ndarray
    block_tables: np.ndarray


class HostPlan(NamedTuple):
    """Returned by `AttentionBackend.plan_host`: steps of one variant and size launch the same kernels.

    `array`, [n] int32, is sent to the device, for `AttentionBackend.receive`.
    """

    variant: Hashable
    array: np.ndarray


@dataclass(frozen=True)
class CaptureVariant:
    """A variant of steps that are captured as CUDA graphs; `is_coarse` if few sizes of it are enough."""

    variant: Hashable
    is_coarse: bool = False


class DecodeVariant(NamedTuple):
    """How decode rows attend.

    `uses_cascade`: rows that share a prefix attend to it together. `single_split`: each row's keys are read in a single
    split instead of several (split-KV).
    """

    uses_cascade: bool = False
    single_split: bool = False


class DecodePlanner:
    """Chooses the variant of each step, and keeps what the device knows of common prefixes.

    Args:
        cascade: plans common prefixes.
        should_use_single_split: whether a single split is faster for contexts of these lengths, [num_rows], without
            what is shared. None if there is no such kernel.
    """

    def __init__(
        self, cascade: CascadeBuffers, should_use_single_split: Callable[[np.ndarray], bool] | None = None
    ) -> None:
        self.cascade = cascade
        self._should_use_single_split = should_use_single_split

    @property
    def variants(self) -> list[CaptureVariant]:
        """The variants, those that take less memory first."""
        splits = (False,) if self._should_use_single_split is None else (True, False)
        # Cascade attention pays with many rows only, and by more than the padding costs.
        ways = (False, True) if self.cascade.max_items else (False,)
        return [CaptureVariant(DecodeVariant(way, single), is_coarse=way) for way in ways for single in splits]

    def plan(self, contexts: DecodeContexts) -> HostPlan:
        """Plan a step."""
        shared_lens = self.cascade.plan(contexts.slots, contexts.num_computed, contexts.block_tables)
        single_split = False
        if self._should_use_single_split is not None:
            seq_lens = contexts.num_computed[contexts.slots] + 1
            single_split = self._should_use_single_split(seq_lens if shared_lens is None else seq_lens - shared_lens)
        array = NOTHING if shared_lens is None else self.cascade.to_send()
        return HostPlan(DecodeVariant(shared_lens is not None, single_split), array)

    def receive(self, array: torch.Tensor) -> None:
        """Take in what `plan` returned, once it is on the device."""
        self.cascade.receive(array)
