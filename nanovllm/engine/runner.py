"""What an engine needs of the runner that computes its batches."""

from __future__ import annotations

from typing import Protocol

from nanovllm.runner.messages import ScheduledBatch, StepOutput


class Handle(Protocol):
    """A step under way."""

    def result(self) -> StepOutput:
        """Wait for the step and return its tokens; raises if the step failed."""


class Runner(Protocol):
    """What the engine needs of a `ModelRunner`."""

    # Steps that are left under way while the next one is planned: 0 or 1.
    pipeline_depth: int
    num_kvcache_blocks: int

    def execute(self, batch: ScheduledBatch) -> Handle:
        """Queue one step; raises if it cannot be queued."""

    def synchronize(self) -> None:
        """Wait for all that was launched; raises if the device is lost."""

    def exit(self) -> None:
        """Let go of the device."""
