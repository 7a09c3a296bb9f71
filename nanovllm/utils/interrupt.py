"""Defers signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the `with` block.

    Signals without a Python handler are not deferred. No effect outside the main thread, where handlers do not run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handlers: dict[int, Any] = {}
    try:
        for number in _SIGNALS:
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda received, frame: held.append(received))
        yield
    finally:
        try:
            _call_each([partial(signal.signal, number, handler) for number, handler in handlers.items()])
        finally:
            _call_each([partial(signal.raise_signal, number) for number in held])


def _call_each(calls: list[Callable[[], object]]) -> None:
    """Call all functions, even if a signal's handler raises meanwhile."""
    if calls:
        try:
            calls.pop(0)()
        finally:
            _call_each(calls)
