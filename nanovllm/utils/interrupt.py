"""Ctrl-C that waits for a good moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_sigint() -> Iterator[Callable[[], None]]:
    """Hold back SIGINT inside the `with` block; the function that it gives lets a held one act.

    In a thread other than the main one, where signals do not arrive, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    held: list[tuple[int, FrameType | None]] = []
    previous = signal.getsignal(signal.SIGINT)

    def release() -> None:
        if held and callable(previous):
            previous(*held.pop())

    signal.signal(signal.SIGINT, lambda signum, frame: held.append((signum, frame)))
    try:
        yield release
    finally:
        signal.signal(signal.SIGINT, previous)
