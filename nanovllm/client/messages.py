"""Messages between a front end and an engine's process: plain data, pickled.

A front end sends lists of orders, all pending ones at a time; it chooses the ids of its requests, which no other front
end uses. An engine sends at most one `StepReport` per step and front end: reports that a front end has not read yet are
merged into the next one. When a call has changed its `EngineState`, the engine sends that to all front ends, before the
call's result. The last message of an engine that an error has closed is the error's text, with a traceback.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.request import Abort, Request, RequestLimits, StreamedToken
from nanovllm.outputs import RequestOutput


@dataclass(slots=True)
class Enqueue:
    """Queue a request; its id stands for its first output, and the next ones for the others."""

    request_id: int
    request: Request


@dataclass(slots=True)
class CallEngine:
    """Call a function with the `LLMEngine` and other arguments, between two steps.

    A `CallResult` with the id follows; without an id nothing, and an error ends the engine.
    """

    call_id: int | None
    function: Callable[..., Any]
    args: tuple[Any, ...]


Order = Enqueue | Abort | CallEngine


@dataclass(frozen=True)
class EngineInfo:
    """The first message to a front end; `device` (of several ranks the first's) and `dtype` have torch's names."""

    limits: RequestLimits
    device: str
    dtype: str
    device_name: str


@dataclass
class StepReport:
    """Results of steps for the requests of one front end; `new_tokens` are plain tuples, which pickle faster.

    Attributes:
        finished: finished requests by id; their outputs have neither text nor prompt.
        failures: messages of failures, ids of the failed requests, and the cause if it pickles.
        dropped: ids of requests that were aborted and have no output.
        num_prefill_tokens: computed by the engine since its last report, for all front ends.
    """

    new_tokens: list[StreamedToken] = field(default_factory=list)
    finished: list[tuple[int, RequestOutput]] = field(default_factory=list)
    failures: list[tuple[str, list[int], BaseException | None]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    num_prefill_tokens: int = 0
    stats: dict[str, Any] = field(default_factory=dict)

    def merge(self, later: StepReport) -> None:
        """Add a later report."""
        self.new_tokens += later.new_tokens
        self.finished += later.finished
        self.failures += later.failures
        self.dropped += later.dropped
        self.num_prefill_tokens += later.num_prefill_tokens
        self.stats = later.stats


@dataclass(slots=True)
class CallResult:
    """The result or error of a call, and the engine's counters then."""

    call_id: int
    stats: dict[str, Any]
    result: Any = None
    error: BaseException | None = None


CONNECT, SHUTDOWN = "connect", "shutdown"
"""Later messages of the parent: a front end's connection follows; or shut down."""


def portable(error: BaseException | None) -> BaseException | None:
    """Return an error, without its cause, if it can be sent."""
    try:
        return pickle.loads(pickle.dumps(error))
    # Any error that an exception class raises on pickling; the message still describes it.
    except Exception:
        return None
