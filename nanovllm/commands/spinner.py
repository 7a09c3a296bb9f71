"""A sign of life while modules are imported, which takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from threading import Event, Thread

_SECONDS = 0.1


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a text with a spinner on the terminal, if there is one, until the `with` block ends."""
    if not sys.stderr.isatty():
        yield
        return
    ended = Event()
    thread = Thread(target=_spin, args=(text, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _spin(text: str, ended: Event) -> None:
    for frame in cycle("|/-\\"):
        print(f"\r{frame} {text}", end="", file=sys.stderr, flush=True)
        if ended.wait(_SECONDS):
            break
    print(f"\r{' ' * (len(text) + 2)}\r", end="", file=sys.stderr, flush=True)
