"""Admits one call at a time to an engine, from any thread, and closes the engine between two calls."""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Lock, get_ident
from typing import Any, Protocol
from weakref import WeakSet

_EXIT_SECONDS = 10.0
_POLL_SECONDS = 0.002


class Call:
    """One call that drives an engine. Others wait for a `brief` one, which does no step.

    Args:
        brief: whether it is one.
        wants_tokens: whether it reads the tokens that a step returns.
        lends: whether its own thread may borrow the engine, since it never does within a step.
    """

    def __init__(self, brief: bool = False, wants_tokens: bool = False, lends: bool = False) -> None:
        self.thread = get_ident()
        self.brief = brief
        self.wants_tokens = wants_tokens
        self.lends = lends


class Drivable(Protocol):
    """An engine whose calls a `CallGuard` admits."""

    def begin(self, call: Call) -> bool:
        """Let a call drive the engine, until `end`; returns False if another one does."""


def drive(engine: Drivable, call: Call) -> None:
    """Let a call drive an engine, until its `end`; raises a RuntimeError if another one does."""
    if not engine.begin(call):
        raise RuntimeError("the engine is already running: its generate or step has not ended")


class Loan:
    """The engine, in the hands of a call that the driving one has let in between two steps."""

    def __init__(self) -> None:
        self.granted, self.returned = Event(), Event()


class CallGuard:
    """Admits one call at a time.

    A second call is refused unless the first is brief. A lock would deadlock a signal handler that interrupts the call
    which holds it. Call `begin` within a `try` whose `finally` calls `end`, so that no exception leaves one in place.
    """

    def __init__(self) -> None:
        self.closing = False
        # Calls that wait for the driving one to stand between two steps.
        self.borrowers: deque[Loan] = deque()
        self._mutex = Lock()
        self._current: Call | None = None
        self._pid = os.getpid()

    def begin(self, call: Call) -> bool:
        """Admit a call; returns False if another one drives the engine. Waits while that is brief."""
        while True:
            with self._mutex:
                current = self._current = self._current or call
            if current is call:
                return True
            if not current.brief or current.thread == call.thread:
                return False
            time.sleep(0)

    @contextmanager
    def borrow(self, call: Call) -> Iterator[None]:
        """Hold the engine inside the `with` block: while nobody drives it, or between two steps of who does.

        Raises:
            RuntimeError: this thread itself drives it, and would wait for itself.
        """
        loan = Loan()
        try:
            if not self.begin(call):
                current = self._current
                if current is not None and current.thread == call.thread:
                    if not current.lends:
                        raise RuntimeError("a generate or step of this thread has not ended")
                    yield
                    return
                self.borrowers.append(loan)
                while not (loan.granted.wait(_POLL_SECONDS) or self.begin(call)):
                    pass
            yield
        finally:
            loan.returned.set()

    def lend(self) -> None:
        """Let calls in that wait, for the call that drives the engine and stands between two steps."""
        while self.borrowers:
            loan = self.borrowers.popleft()
            loan.granted.set()
            loan.returned.wait()

    def end(self, call: Call, close: Callable[[], None]) -> None:
        """End a call, which may never have begun.

        Args:
            call: what `begin` was given.
            close: closes the engine, or does nothing if it is closed; called if somebody has asked for it meanwhile.
        """
        if self._current is call:
            try:
                if self.closing:
                    close()
            finally:
                self._current = None

    def close(self, close: Callable[[], None]) -> None:
        """Close the engine, once the call that drives it has ended its step.

        Waits up to ten seconds for it; after that, or if it is this thread's own, that call closes the engine when it
        ends. Does nothing in a forked copy of the engine's process, which must leave the device alone.
        """
        if os.getpid() != self._pid:
            return
        self.closing = True
        deadline = time.monotonic() + _EXIT_SECONDS
        driving = False
        while not driving:
            call = Call()
            try:
                driving = self.begin(call)
            finally:
                self.end(call, close)
            current = self._current
            if (current is not None and current.thread == call.thread) or time.monotonic() > deadline:
                return
            if not driving:
                time.sleep(_POLL_SECONDS)


_engines: WeakSet[Any] = WeakSet()


def exit_with_interpreter(engine: Any) -> None:
    """Have an engine that is still there exit before the interpreter does.

    A daemon thread that the interpreter ends within a step ends the process by C++'s `terminate`.
    """
    _engines.add(engine)


@atexit.register
def _exit_engines() -> None:
    with ExitStack() as stack:
        # All of them, also after one that fails.
        for engine in list(_engines):
            stack.callback(engine.exit)
