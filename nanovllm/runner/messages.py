"""All that crosses from the engine to a runner, and back; and what the engine asks of the runner.

Plain data of plain integers, tokens of prompts packed into arrays of 32-bit ones: it can be sent to another process as
it is. A runner is told of slots and blocks, never of sequences; the ids in `ScheduledBatch.sampled_seq_ids` are for
the way back.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class NewRequest:
    """A sequence takes a slot: all that its slot must hold from now on."""

    slot: int
    block_table: list[int]
    num_prompt_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class NewBlock:
    """Block `block_id` becomes entry `index` of a running slot's block table."""

    slot: int
    index: int
    block_id: int


@dataclass(frozen=True)
class PromptChunk:
    """Tokens at positions `start ... start + len(token_ids) - 1` of the sequence in `slot`.

    `store` is false for the one token that a full prefix hit recomputes inside a shared block: its keys and values are
    there already, and shared blocks are immutable. `samples` is true for the chunk that ends its prompt.
    """

    slot: int
    start: int
    token_ids: array[int]
    store: bool
    samples: bool


@dataclass
class ScheduledBatch:
    """One step: decode rows (one per entry of `decode_slots`) first, then the prompt chunks.

    A decode row's token, position and block table are on the device already, under its slot.
    """

    new_requests: list[NewRequest] = field(default_factory=list)
    new_blocks: list[NewBlock] = field(default_factory=list)
    decode_slots: list[int] = field(default_factory=list)
    chunks: list[PromptChunk] = field(default_factory=list)
    # The sequences a token is sampled for: those of decode_slots, then those of the chunks that sample.
    sampled_seq_ids: list[int] = field(default_factory=list)
    # Whether sampling waits for the host behind the forward pass, as for a mask that depends on the last token.
    sample_apart: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens to compute in this step."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True)
class StepOutput:
    """The sampled tokens, in the order of `ScheduledBatch.sampled_seq_ids`."""

    token_ids: list[int]


class Handle(Protocol):
    """A step under way."""

    def result(self) -> StepOutput:
        """Wait for the step and return its tokens; raises if the step failed."""


class Runner(Protocol):
    """What the engine needs of a `ModelRunner` or a `ParallelRunner`."""

    # Steps that are left under way while the next one is planned: 0 or 1.
    pipeline_depth: int
    num_kvcache_blocks: int

    def execute(self, batch: ScheduledBatch) -> Handle:
        """Queue one step; raises if it cannot be queued."""

    def synchronize(self) -> None:
        """Wait for all that was launched; raises if the device is lost."""

    def exit(self) -> None:
        """Let go of the device."""
