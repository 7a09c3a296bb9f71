"""Who drives an engine: at most one call at a time, from any thread; and how an engine ends while one does."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Protocol
from weakref import WeakSet

_EXIT_SECONDS = 10.0
_POLL_SECONDS = 0.002


class Driver:
    """Admits one call at a time, and closes the engine between two calls.

    A second call is refused, not kept waiting: a lock would make a signal handler wait for the very call that it
    interrupts.
    """

    def __init__(self) -> None:
        self.closing = False
        self._mutex = Lock()
        self._current: list[int] | None = None
        self._pid = os.getpid()

    @contextmanager
    def drive(self, close: Callable[[], None]) -> Iterator[bool]:
        """Drive the engine inside the `with` block, if nobody else does; yields whether that is so.

        Args:
            close: closes the engine, or does nothing if it is closed; called at the end of the block once somebody has
                asked for it.
        """
        me = [get_ident()]
        # In this form an exception between any two instructions leaves no driver behind.
        try:
            with self._mutex:
                self._current = self._current or me
            yield self._current is me
        finally:
            if self._current is me:
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
        while True:
            with self.drive(close) as driving:
                pass
            current = self._current
            if driving or (current is not None and current[0] == get_ident()) or time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)


class _HasExit(Protocol):
    def exit(self) -> None: ...


_engines: WeakSet[_HasExit] = WeakSet()


def exit_with_interpreter(engine: _HasExit) -> None:
    """Have an engine that is still there exit before the interpreter does.

    A daemon thread that the interpreter ends within a step ends the process by C++'s `terminate`.
    """
    _engines.add(engine)


@atexit.register
def _exit_engines() -> None:
    for engine in list(_engines):
        engine.exit()
