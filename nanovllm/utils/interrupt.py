"""Signals that wait for a good moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM inside the `with` block; those that came act, as they would have, at its end.

    A signal without a Python handler acts at once, as does any signal in a thread other than the main one, where
    Python's handlers do not run.
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
    """Set handlers, every one of them, whatever one does that is called meanwhile."""
    if handlers:
        number, handler = handlers.popitem()
        try:
            signal.signal(number, handler)
        finally:
            _restore(handlers)


def _raise(numbers: list[int]) -> None:
    """Raise signals, every one of them, whatever the handler of one does."""
    if numbers:
        try:
            signal.raise_signal(numbers.pop(0))
        finally:
            _raise(numbers)
