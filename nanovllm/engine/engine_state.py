"""Pause, sleep and missing-weight state of an engine."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Literal, get_args

from nanovllm.weights.report import MissingWeights

PauseMode = Literal["keep", "wait", "abort"]
SleepTag = Literal["weights", "kv_cache"]
SLEEP_TAGS: tuple[str, ...] = get_args(SleepTag)


@dataclass
class EngineState:
    """The causes that hold an engine's steps up. Changes between two steps; see `LLMEngine.between_steps`.

    Attributes:
        pause_mode: how the engine was paused; None if it is not.
        asleep: the `SLEEP_TAGS` that have no memory.
        missing: weights that a sleep dropped, or that a failed change left incomplete.
    """

    pause_mode: PauseMode | None = None
    asleep: set[str] = field(default_factory=set)
    missing: MissingWeights = field(default_factory=MissingWeights)

    @property
    def holds_steps(self) -> bool:
        """Whether anything holds steps up."""
        return self.pause_mode is not None or self.cannot_run is not None

    @property
    def cannot_run(self) -> str | None:
        """The reason why a step cannot run; None if it can."""
        if self.asleep:
            tags = sorted(self.asleep)
            return f"the engine is asleep, without its {' and '.join(tags)}: call wake_up({tags})"
        if self.missing.count:
            count, example = self.missing.count, self.missing.example
            if self.missing.is_half_merged:
                return (
                    f"{count} weights such as {example!r} have parts of an adapter: call unload_adapter or load_weights"
                )
            cause = "were dropped by sleep(level=2), or left undone by a load that failed"
            return f"{count} weights such as {example!r} {cause}: call load_weights with them"
        return None

    def require_no_requests(self, name: str, pending: Sized) -> None:
        """Raise a RuntimeError if there are requests, which the call `name` would change half-way."""
        if self.pause_mode is None and len(pending):
            raise RuntimeError(f"{name}: {len(pending)} requests are pending: let them end, or pause() first")
