"""Deferred handling of signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM inside the `with` block, and raise them at its end.

    Signals without a Python handler are not deferred. Outside the main thread, where Python's handlers do not run, this
    does nothing.
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
            _restore(handlers)
        finally:
            _raise(held)


def _restore(handlers: dict[int, Any]) -> None:
    """Restore all handlers, even if a handler that runs meanwhile raises."""
    if handlers:
        number, handler = handlers.popitem()
        try:
            signal.signal(number, handler)
        finally:
            _restore(handlers)


def _raise(numbers: list[int]) -> None:
    """Raise all signals, even if the handler of one raises."""
    if numbers:
        try:
            signal.raise_signal(numbers.pop(0))
        finally:
            _raise(numbers)
