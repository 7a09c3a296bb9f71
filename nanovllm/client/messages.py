"""What a front end and an engine's process say to each other: plain data, pickled.

A front end sends lists of orders, all that it has at a time. An engine sends at most one `StepReport` a step and front
end: what a front end has not taken yet gathers, and comes with the next one. Whenever a call has changed its
`EngineState`, it sends that to all front ends, before the call's result.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.engine_outputs import NewTokens, TokenFields
from nanovllm.engine.request import Abort, Request, RequestLimits
from nanovllm.outputs import RequestOutput


@dataclass(slots=True)
class Enqueue:
    """Queue a request, under an id that the front end has chosen."""

    request_id: int
    request: Request


@dataclass(slots=True)
class Stop:
    """End outputs at their stop strings; see `Engine.stop`."""

    outputs: list[tuple[int, int]]


@dataclass(slots=True)
class CallEngine:
    """Call a method of the `LLMEngine`, between two steps; a `CallResult` follows."""

    call_id: int
    method: str
    args: tuple[Any, ...]


@dataclass(slots=True)
class SendNewTokens:
    """Send every token of each step, or no longer; see `NewTokens`."""

    wanted: bool


Order = Enqueue | Abort | Stop | CallEngine | SendNewTokens


@dataclass(frozen=True)
class EngineInfo:
    """The first message to a front end: what it must know of an engine.

    Attributes:
        limits: what requests must keep to.
        max_num_running: sequences that run at once.
        device, dtype: of the model, by torch's names; of several ranks, the first one's.
        device_name: what people call the device, or devices.
    """

    limits: RequestLimits
    max_num_running: int
    device: str
    dtype: str
    device_name: str


@dataclass
class StepReport:
    """What steps have brought the requests of one front end.

    Attributes:
        new_tokens: of requests that report them, as plain tuples, which pickle faster.
        finished: finished requests by id; their outputs have neither text nor prompt.
        failures: messages of failures, ids of the requests that have failed, and the cause if it pickles.
        dropped: ids of requests that were aborted, and have no output.
        steps: the tokens of every step, if they are wanted.
        stats: the engine's counters.
    """

    new_tokens: list[TokenFields] = field(default_factory=list)
    finished: list[tuple[int, RequestOutput]] = field(default_factory=list)
    failures: list[tuple[str, list[int], BaseException | None]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    steps: list[NewTokens] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.new_tokens or self.finished or self.failures or self.dropped or self.steps)


@dataclass(slots=True)
class CallResult:
    """What a call returned, or what it raised, and the engine's counters then."""

    call_id: int
    stats: dict[str, int]
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Ended:
    """The last message of an engine, which an error has closed.

    Attributes:
        cause: why, with a traceback.
    """

    cause: str


@dataclass(frozen=True)
class EnginePlan:
    """The first message to an engine's process.

    Attributes:
        config: of one engine.
        num_replicas: engines that share the CPU.
    """

    config: Config
    num_replicas: int


@dataclass(frozen=True)
class StartFailure:
    """Why an engine could not be started: the error if it can be sent, and its traceback."""

    error: BaseException | None
    traceback: str


CONNECT, SHUTDOWN = "connect", "shutdown"
"""What the starter says later: a front end's connection follows; or end."""


def portable(error: BaseException | None) -> BaseException | None:
    """Return an error if it can be sent, without its cause."""
    try:
        return pickle.loads(pickle.dumps(error))
    # Whatever a class of exceptions does when it is pickled, the message says what it was.
    except Exception:
        return None
