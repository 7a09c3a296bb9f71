"""Defers signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
            _restore(handlers)
        finally:
            _raise(held)


def _restore(handlers: dict[int, Any]) -> None:
    """Restore all handlers, even if a handler raises meanwhile."""
    if handlers:
        number, handler = handlers.popitem()
        try:
            signal.signal(number, handler)
        finally:
            _restore(handlers)


def _raise(numbers: list[int]) -> None:
    """Raise all signals, even if a handler raises."""
    if numbers:
        try:
            signal.raise_signal(numbers.pop(0))
        finally:
            _raise(numbers)
