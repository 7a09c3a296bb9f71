"""Messages between a front end and an engine's process: plain data, pickled.

Both sides send lists, of all messages that wait by then. A front end sends orders; it chooses the ids of its requests,
which no other front end uses. An engine first sends its `RequestLimits` and `DeviceInfo`, then at most one `StepReport`
per step and front end. When a call has changed its `EngineState`, the engine sends that to all front ends, before the
call's result. The last message of an engine that an error has closed is the error's text, with a traceback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.engine import EngineOutputs
from nanovllm.engine.request import Abort, Request


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


@dataclass
class StepReport(EngineOutputs):
    """Results of a step for the requests of one front end, which has their prompts; and the engine's counters then.

    `num_prefill_tokens` were computed since the last report, for all front ends.
    """

    num_prefill_tokens: int = 0
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class CallResult:
    """The result or error of a call, and the engine's counters then."""

    call_id: int
    stats: dict[str, Any]
    result: Any = None
    error: BaseException | None = None


CONNECT, SHUTDOWN = "connect", "shutdown"
"""Later messages of the parent: a front end's connection follows; or shut down."""
