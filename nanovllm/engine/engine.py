"""The engine's interface to its front ends: requests in, results out, both plain data that pickles.

One call at a time drives it, step by step. Calls from other threads wait for the gap between two steps.
"""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any, ClassVar, Literal, NoReturn, TypeVar, get_args
from weakref import WeakSet

import numpy as np
from typing_extensions import TypeVarTuple, Unpack

from nanovllm.engine.request import Request, RequestLimits, RequestSeeds, StreamedToken
from nanovllm.engine.stats import StatsHistory, StatsSample
from nanovllm.outputs import RequestOutput, StepError, StepResult
from nanovllm.weights.report import LoadedWeights, MissingWeights

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
PauseMode = Literal["keep", "wait", "abort"]
SleepTag = Literal["weights", "kv_cache"]
SLEEP_TAGS: tuple[str, ...] = get_args(SleepTag)
_EXIT_SECONDS = 10.0
_engines: WeakSet[Engine] = WeakSet()


class Unpicklable:
    """An object that cannot be pickled or copied, which would serialise gigabytes of weights before it fails."""

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} holds a device and cannot be pickled or copied: create one in each process")


@dataclass
class EngineState:
    """The causes that hold an engine's steps up. Changes between two steps; see `LLMEngine.between_steps`."""

    pause_mode: PauseMode | None = None
    # The `SLEEP_TAGS` that have no memory.
    asleep: set[str] = field(default_factory=set)
    # Weights that a sleep dropped, or that a failed change left incomplete.
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
        if not self.missing.count:
            return None
        weights = f"{self.missing.count} weights such as {self.missing.example!r}"
        cause = "were dropped by sleep(level=2), or left undone by a load that failed"
        return f"{weights} {cause}: call load_weights with them, or unload_adapter if that failed"

    def require_no_requests(self, name: str, pending: Sized) -> None:
        """Raise a RuntimeError if there are requests, which the call `name` would change half-way."""
        if self.pause_mode is None and len(pending):
            raise RuntimeError(f"{name}: {len(pending)} requests are pending: let them end, or pause() first")


@dataclass
class NewTokens:
    """The tokens of one step, or of two after a failed launch."""

    # Prompt tokens that were computed.
    num_prefill_tokens: int = 0
    # The ids of sequences, a token for each, and the ids whose token was dropped.
    sampled: list[tuple[list[int], np.ndarray, set[int]]] = field(default_factory=list)
    # The same of an engine in another process, which tells only tokens of requests that report theirs.
    streamed: list[StreamedToken] = field(default_factory=list)


@dataclass
class EngineOutputs:
    """The results of steps, kept until a caller has them, so that no exception or signal loses any.

    Attributes:
        new_tokens: tokens of requests that report theirs, in order.
        finished: finished requests by id; their outputs have no text.
        failures: steps that failed, and requests that failed alone.
        dropped: ids of requests that were aborted and have no output.
    """

    new_tokens: list[StreamedToken] = field(default_factory=list)
    finished: list[tuple[int, RequestOutput]] = field(default_factory=list)
    failures: list[StepError] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    # Tokens of `step` calls that raised instead of returning them.
    _unreported: list[NewTokens] = field(default_factory=list)

    def __bool__(self) -> bool:
        """True if there are finished requests or failures to report."""
        return bool(self.finished or self.failures)

    def fail(self, error: StepError) -> None:
        """Keep a step's failure, unless an earlier failure already covers all its requests."""
        if error.request_ids or not self.failures:
            self.failures.append(error)

    def take_step(self, tokens: NewTokens | None) -> StepResult:
        """Return all that has finished, and a step's tokens if it has some, or raise the oldest failure; each once."""
        if tokens is not None:
            self._unreported.append(tokens)
        self.new_tokens.clear()
        self.dropped.clear()
        if self.failures:
            raise self.failures.pop(0)
        finished, self.finished = self.finished, []
        steps, self._unreported = self._unreported, []
        new: dict[int, list[int]] = {}
        for seq_ids, token_ids, dropped in (sampled for step in steps for sampled in step.sampled):
            for seq_id, token_id in zip(seq_ids, token_ids.tolist(), strict=True):
                if seq_id not in dropped:
                    new.setdefault(seq_id, []).append(token_id)
        for request_id, index, _, token_id, *_ in (token for step in steps for token in step.streamed):
            new.setdefault(request_id + index, []).append(token_id)
        return StepResult(finished, new, sum(s.num_prefill_tokens for s in steps), sum(map(len, new.values())))


class EngineRunningError(RuntimeError):
    """Another call drives the engine."""

    def __init__(self) -> None:
        super().__init__("the engine is already running: its generate or step has not ended")


@dataclass(eq=False)
class _Driver:
    """A call that drives an engine, or is about to."""

    thread: int = field(default_factory=get_ident)


class Engine(Unpicklable, ABC):
    """An engine in this process (`LLMEngine`), or engines in others (`ReplicatedEngine`).

    Any thread may queue and abort requests, and call methods that only read. An engine still open at interpreter exit
    is closed first: a daemon thread killed within a step would end the process through C++'s `terminate`.
    """

    # Whether it runs in this process, and accepts values that do not pickle.
    is_in_process: ClassVar[bool]
    limits: RequestLimits
    # Numbers the requests of this process.
    seeds: RequestSeeds

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_closing = False
        # The first of these drives the engine. A list, since appending cannot be interrupted half-way.
        self._drivers: list[_Driver] = []
        # A step holds `_mutex`. Work between two steps holds `_turn` as well, so that it comes before the next step. A
        # signal handler that interrupts either gets both locks, and finds the engine busy.
        self._turn, self._mutex = RLock(), RLock()
        self._is_busy = False
        self._results = EngineOutputs()
        self._history = StatsHistory()
        _engines.add(self)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Let only this call step the engine inside the `with` block, or raise an `EngineRunningError`."""
        driver = _Driver()
        try:
            self._drivers.append(driver)
            if self._drivers[0] is not driver:
                raise EngineRunningError
            yield
        finally:
            if driver in self._drivers:
                self._drivers.remove(driver)

    @property
    def is_driven(self) -> bool:
        """Whether a call drives the engine, or works between two steps."""
        return bool(self._drivers) or self._is_busy

    def steps(self, has_work: Callable[[], bool]) -> Iterator[NewTokens]:
        """Drive the engine: run steps while there is work, and yield the tokens of each; see `run_step`."""
        with self.driving():
            while has_work():
                yield self.run_step()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other threads from the engine inside the `with` block; close it at the end if that was requested.

        Raises an `EngineRunningError` if a signal handler has interrupted this thread, which holds the engine already.
        """
        with self._mutex:
            if self._is_busy:
                raise EngineRunningError
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False
                if self._is_closing:
                    self._close()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Like `_alone`, ahead of the next step."""
        with self._turn, self._alone():
            yield

    def exit(self) -> None:
        """Free the device; a second call, or one in a forked copy of the process, does nothing.

        Waits up to ten seconds for a step in another thread; one that takes longer frees the device when it ends.
        """
        if os.getpid() != self._pid:
            return
        self._is_closing = True
        self.wake()
        if self._mutex.acquire(timeout=_EXIT_SECONDS):
            try:
                if not self._is_busy:
                    self._close()
            finally:
                self._mutex.release()

    @property
    def has_results(self) -> bool:
        """Whether `take_results` would return anything."""
        results = self._results
        return bool(results.new_tokens or results.finished or results.failures or results.dropped)

    @property
    @abstractmethod
    def state(self) -> EngineState:
        """The cause that holds steps up, as of the last call that changed it."""

    @property
    @abstractmethod
    def request_ids(self) -> set[int]:
        """Ids of unfinished requests."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether the engine accepts requests and runs steps."""

    @abstractmethod
    def require_open(self) -> object:
        """Raise a RuntimeError if the engine is closed."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether no request is left, no step is under way, and all results are taken."""

    @abstractmethod
    def enqueue(self, request: Request) -> int:
        """Queue a request that `limits` has checked, and return its id."""

    @abstractmethod
    def enqueue_all(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests that arrive together, all or none, in the order in which they should run; return their ids."""

    @abstractmethod
    def abort(self, request_ids: Iterable[int], *, keep_outputs: bool = False) -> None:
        """Drop requests, whatever their progress; from any thread. Blocks are free at the latest with the next step.

        The id of any output stands for the whole request; ids of finished requests are ignored, and others a
        ValueError. `keep_outputs` finishes them with their tokens so far instead, with `finish_reason` "abort".
        """

    @abstractmethod
    def stop(self, outputs: list[tuple[int, int]]) -> None:
        """End outputs, by request and index, whose text reached a stop string; finished ones are ignored."""

    @abstractmethod
    def run_step(self) -> NewTokens:
        """Run a step, or wait for one, and return its tokens. Its results are kept, and signals wait."""

    @abstractmethod
    def take_results(self) -> EngineOutputs:
        """Return the results of steps, each once, for a caller that owns every request."""

    @abstractmethod
    def call(self, function: Callable[[Any, Unpack[Ts]], T], *args: Unpack[Ts]) -> list[T]:
        """Call a function with every live `LLMEngine` and other arguments, which all pickle, between two steps.

        Returns the results, one for each engine, in order. Raises the function's error, or a RuntimeError if the engine
        is closed, or one exits before it answers; all others have answered by then.
        """

    @abstractmethod
    def load_weights(self, weights: Any, strict: bool) -> LoadedWeights:
        """Write weights, from a folder or pairs of names and tensors, into every model; see `LLM.load_weights`."""

    @abstractmethod
    def stats(self, *, now: bool = False) -> dict[str, int]:
        """Return the counters of all engines; `now` asks ones in other processes, instead of their latest report."""

    def stats_history(self) -> list[StatsSample]:
        """Return the counters over time, oldest first; the last sample is of now."""
        return self._history.samples(self.stats(now=True))

    def wake(self) -> None:
        """End a step that waits for another process."""

    @abstractmethod
    def _close(self) -> None:
        """Free the device; a second call does nothing."""


@atexit.register
def _exit_engines() -> None:
    with ExitStack() as stack:
        # Close all engines, even if one fails.
        for engine in list(_engines):
            stack.callback(engine.exit)
