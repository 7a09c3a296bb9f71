"""A broadcast channel from rank 0 to the other ranks: one pipe to each.

A message is 8 bytes of length and a pickle. Both sides poll, since a write that wakes a blocked reader takes several
times as long as one that finds it awake.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_LENGTH_BYTES = 8
_PIPE_BYTES = 2**20
"""Capacity of a pipe on Linux; a step's prompts are written before the ranks have read the previous step's."""
_READ_BYTES = 2**16
_YIELD_SECONDS = 0.02
"""A waiting process calls `sched_yield` (about 1 us) for this long, then sleeps between checks."""
_SLEEP_SECONDS = 0.0005


class Sender:
    """Sends objects that pickle; every receiver gets every message, in order, by its descriptor in `receivers`."""

    def __init__(self, num_receivers: int) -> None:
        self.receivers: list[int] = []
        self._writers: list[int] = []
        for _ in range(num_receivers):
            receiver, writer = os.pipe()
            self.receivers.append(receiver)
            self._writers.append(writer)
            os.set_blocking(receiver, False)
            os.set_blocking(writer, False)
            _enlarge(writer)

    def send(self, message: object, check: Callable[[], None]) -> None:
        """Write an object that pickles; wait while a pipe is full: `check` is called repeatedly, and may raise."""
        payload = pickle.dumps(message, protocol=5)
        unsent = dict.fromkeys(self._writers, memoryview(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload))

        def write() -> bool:
            for writer, part in list(unsent.items()):
                with suppress(BlockingIOError):
                    unsent[writer] = part[os.write(writer, part) :]
                    if not unsent[writer]:
                        del unsent[writer]
            return not unsent

        _wait(write, check)

    def close(self) -> None:
        """Close every pipe; a second call does nothing."""
        for descriptors in (self._writers, self.receivers):
            while descriptors:
                os.close(descriptors.pop())


class Receiver:
    """Receives the messages of a `Sender` by one of its `receivers`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = bytearray()

    def receive(self, check: Callable[[], None] = lambda: None) -> Any:
        """Wait for the next message; `check` as in `Sender.send`. EOFError: the sender's process is gone."""
        self._read(_LENGTH_BYTES, check)
        end = _LENGTH_BYTES + int.from_bytes(self._unread[:_LENGTH_BYTES], "little")
        self._read(end, check)
        message = pickle.loads(self._unread[_LENGTH_BYTES:end])
        del self._unread[:end]
        return message

    def _read(self, count: int, check: Callable[[], None]) -> None:

        def read() -> bool:
            with suppress(BlockingIOError):
                part = os.read(self._descriptor, _READ_BYTES)
                if not part:
                    raise EOFError("the sender has closed the channel")
                self._unread.extend(part)
                return True
            return False

        while len(self._unread) < count:
            _wait(read, check)


def _enlarge(descriptor: int) -> None:
    if sys.platform == "linux":
        import fcntl  # noqa: PLC0415

        # A user with many pipes gets no larger ones; long messages then wait for their readers.
        with suppress(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _wait(ready: Callable[[], bool], check: Callable[[], None]) -> None:
    started = time.monotonic()
    while not ready():
        if time.monotonic() - started < _YIELD_SECONDS:
            os.sched_yield()
        else:
            check()
            time.sleep(_SLEEP_SECONDS)
