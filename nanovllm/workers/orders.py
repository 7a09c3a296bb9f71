"""What rank 0 tells the other ranks, and what they answer; None tells a rank to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanovllm.runner.messages import ScheduledBatch


@dataclass(frozen=True)
class StepOrder:
    """Run a batch. There is no reply: a step that fails ends the rank.

    Attributes:
        batch: the step; without its sequence ids, which only rank 0 needs.
        same_rows: whether its `rows` are those of the step before, and not sent.
    """

    batch: ScheduledBatch
    same_rows: bool


@dataclass(frozen=True)
class CallOrder:
    """Call a function with the rank's `ModelRunner` and other arguments, and reply with its result."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Reply:
    """The result of a call, or the traceback of the exception that it raised."""

    result: Any = None
    traceback: str | None = None
