"""An engine as its front ends know it: requests in, results out, both plain data that pickles.

One call at a time drives it, step by step. What other threads ask for waits for the gap between two steps.
"""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import RLock, get_ident
from typing import Any, ClassVar
from weakref import WeakSet

from nanovllm.engine.engine_outputs import EngineOutputs, NewTokens
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.request import Request, RequestLimits
from nanovllm.engine.stats_history import StatsSample
from nanovllm.utils.unpicklable import Unpicklable

_EXIT_SECONDS = 10.0
_engines: WeakSet[Engine] = WeakSet()


class EngineRunningError(RuntimeError):
    """Another call drives the engine."""

    def __init__(self) -> None:
        super().__init__("the engine is already running: its generate or step has not ended")


@dataclass(eq=False)
class _Driver:
    """A call that drives an engine, or asks to."""

    thread: int = field(default_factory=get_ident)


class Engine(Unpicklable, ABC):
    """An engine in this process (`LLMEngine`), or engines in others (`ReplicatedEngine`).

    Any thread may queue and abort requests, and call what only reads. An engine that is still there when the
    interpreter ends exits before it: a daemon thread that is ended within a step ends the process by C++'s `terminate`.

    Attributes:
        is_in_process: whether it is in this process, and takes what does not pickle.
        limits: what requests must keep to.
    """

    is_in_process: ClassVar[bool]
    limits: RequestLimits

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._is_closing = False
        # Of these the first drives the engine. A list, since appending cannot be interrupted half-way.
        self._drivers: list[_Driver] = []
        # A step holds `_mutex`, and so does what is done between two, which holds `_turn` as well, so that it comes
        # before the next step. A signal handler that runs in the midst gets both, and finds the engine busy.
        self._turn, self._mutex = RLock(), RLock()
        self._is_busy = False
        _engines.add(self)

    @contextmanager
    def driving(self) -> Iterator[None]:
        """Let this call alone step the engine inside the `with` block.

        Raises:
            EngineRunningError: another one does.
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
        """Whether a call drives the engine, or does something between two steps."""
        return bool(self._drivers) or self._is_busy

    def steps(self, has_work: Callable[[], bool]) -> Iterator[NewTokens]:
        """Drive the engine: do a step while there is work, and yield its tokens; see `run_step`.

        Raises:
            EngineRunningError: another call drives it.
        """
        with self.driving():
            while has_work():
                yield self.run_step()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads from the engine inside the `with` block; closes it at the end if that was asked for.

        Raises:
            EngineRunningError: this thread keeps the others out already: a signal handler has interrupted it.
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
        """What holds steps up, as it was after the last call that has changed it."""

    @property
    @abstractmethod
    def request_ids(self) -> set[int]:
        """Ids of unfinished requests."""

    @property
    @abstractmethod
    def has_results(self) -> bool:
        """Whether `take_results` has anything."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether the engine takes requests and steps."""

    @abstractmethod
    def require_open(self) -> object:
        """Raise a RuntimeError if the engine is closed."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether no request is left, no step is under way, and every result has been taken."""

    @abstractmethod
    def enqueue(self, request: Request) -> int:
        """Queue a request that `limits` has passed, and return its id."""

    @abstractmethod
    def enqueue_all(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests that come together, in the order in which they should run; return their ids."""

    @abstractmethod
    def abort(self, request_ids: Iterable[int], *, keep_outputs: bool = False) -> None:
        """Drop requests, wherever they stand; from any thread.

        Args:
            request_ids: the id of any output stands for the whole request; ids of finished ones are ignored.
            keep_outputs: finish them with what they have instead; outputs that have not ended have `finish_reason`
                "abort".

        Raises:
            ValueError: what is given is no id.
        """

    @abstractmethod
    def stop(self, outputs: list[tuple[int, int]]) -> None:
        """End outputs, by request and index, whose text has come to a stop string; ignores those that have ended."""

    @abstractmethod
    def run_step(self, wants_tokens: bool = False) -> NewTokens:
        """Do a step, or wait for one, for the call that drives the engine; its results are kept.

        Signals are handled when it ends. Returns the step's tokens if they are wanted.

        Raises:
            RuntimeError: the engine is closed.
        """

    @abstractmethod
    def take_results(self) -> EngineOutputs:
        """Return, once, what steps have brought."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `LLMEngine` with values that pickle, on every engine that is alive, between two steps.

        Returns:
            The results, one for each engine, in order.

        Raises:
            RuntimeError: the engine is closed, or one ends before it has answered; all others have by then.
            Exception: what the method raises.
        """

    @abstractmethod
    def stats(self, *, now: bool = False) -> dict[str, int]:
        """Return the counters since the engine began, and the blocks in use, of all engines together.

        now: ask engines in other processes, which may wait for a step; else as they were when something came last.
        """

    @abstractmethod
    def stats_history(self) -> list[StatsSample]:
        """Return the counters over time, oldest first; the last sample is of now."""

    @abstractmethod
    def wake(self) -> None:
        """Let a step that waits for another process end."""

    @abstractmethod
    def _close(self) -> None:
        """Free the device; a second call does nothing."""


@atexit.register
def _exit_engines() -> None:
    with ExitStack() as stack:
        # All of them, also after one that fails.
        for engine in list(_engines):
            stack.callback(engine.exit)
