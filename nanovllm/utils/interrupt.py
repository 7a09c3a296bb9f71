"""Signals that wait for a good moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
    handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
    held: list[int] = []
    for number in handlers:
        signal.signal(number, lambda received, frame: held.append(received))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received in held:
            signal.raise_signal(received)
