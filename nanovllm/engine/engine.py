"""The engine's interface to its front ends: requests in, results out, both plain data that pickles.

One call at a time drives it, step by step. Calls from other threads wait for the gap between two steps.
"""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any, ClassVar, NoReturn
from weakref import WeakSet

from nanovllm.engine.engine_outputs import EngineOutputs, NewTokens
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.request import Request, RequestLimits
from nanovllm.engine.stats_history import StatsSample

_EXIT_SECONDS = 10.0
_engines: WeakSet[Engine] = WeakSet()


class Unpicklable:
    """An object that cannot be pickled or copied.

    Without this, pickling would serialise gigabytes of weights and cache before failing.
    """

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} holds a device and cannot be pickled or copied: create one in each process")


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

    Attributes:
        is_in_process: whether it runs in this process, and accepts values that do not pickle.
        limits: limits that requests must keep to.
    """

    is_in_process: ClassVar[bool]
    limits: RequestLimits

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_closing = False
        # The first of these drives the engine. A list, since appending cannot be interrupted half-way.
        self._drivers: list[_Driver] = []
        # A step holds `_mutex`. Work between two steps holds `_turn` as well, so that it comes before the next step. A
        # signal handler that interrupts either gets both locks, and finds the engine busy.
        self._turn, self._mutex = RLock(), RLock()
        self._is_busy = False
        _engines.add(self)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Let only this call step the engine inside the `with` block.

        Raises:
            EngineRunningError: another call drives it.
        """
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
        """Drive the engine: run steps while there is work, and yield the tokens of each; see `run_step`.

        Raises:
            EngineRunningError: another call drives it.
        """
        with self.driving():
            while has_work():
                yield self.run_step()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other threads from the engine inside the `with` block; close it at the end if that was requested.

        Raises:
            EngineRunningError: this thread already holds the engine: a signal handler has interrupted it.
        """
        with self._mutex:
            self._enter()
            try:
                yield
            finally:
                self._leave()

    def _enter(self) -> None:
        if self._is_busy:
            raise EngineRunningError
        self._is_busy = True

    def _leave(self) -> None:
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
    @abstractmethod
    def state(self) -> EngineState:
        """The cause that holds steps up, as of the last call that changed it."""

    @property
    @abstractmethod
    def request_ids(self) -> set[int]:
        """Ids of unfinished requests."""

    @property
    @abstractmethod
    def has_results(self) -> bool:
        """Whether `take_results` would return anything."""

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
        """Queue requests that arrive together, in the order in which they should run; return their ids."""

    @abstractmethod
    def abort(self, request_ids: Iterable[int], *, keep_outputs: bool = False) -> None:
        """Drop requests, whatever their progress; from any thread.

        Args:
            request_ids: the id of any output stands for the whole request; ids of finished requests are ignored.
            keep_outputs: finish them with their tokens so far instead; unfinished outputs get `finish_reason` "abort".

        Raises:
            ValueError: a value is not an id.
        """

    @abstractmethod
    def stop(self, outputs: list[tuple[int, int]]) -> None:
        """End outputs, by request and index, whose text reached a stop string; finished ones are ignored."""

    @abstractmethod
    def run_step(self, wants_tokens: bool = False) -> NewTokens:
        """Run a step, or wait for one, for the call that drives the engine; its results are kept.

        Signals are handled when it ends. Returns the step's tokens if `wants_tokens`.

        Raises:
            RuntimeError: the engine is closed.
        """

    @abstractmethod
    def take_results(self) -> EngineOutputs:
        """Return the results of steps, each once."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `LLMEngine` with values that pickle, on every live engine, between two steps.

        Returns:
            The results, one for each engine, in order.

        Raises:
            RuntimeError: the engine is closed, or one exits before it answers; all others have answered by then.
            Exception: what the method raises.
        """

    @abstractmethod
    def stats(self, *, now: bool = False) -> dict[str, int]:
        """Return the counters since the engine began, and the blocks in use, of all engines together.

        now: ask engines in other processes, which may wait for a step; otherwise use their latest report.
        """

    @abstractmethod
    def stats_history(self) -> list[StatsSample]:
        """Return the counters over time, oldest first; the last sample is of now."""

    @abstractmethod
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
