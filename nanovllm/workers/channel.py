"""How rank 0 tells the other ranks what to do: a ring in shared memory, with one writer and several readers.

A message is its length and its pickle. The ring carries them as one stream of bytes, so that a message may be larger
than the ring: it then goes in pieces. Positions in the stream only ever grow, and are what orders everything: the
writer's counts the bytes that are there to read, each reader's those that it has read; the writer overwrites nothing
that some reader has not read.

The memory is a file without a name, which other processes inherit as a descriptor: whatever becomes of the processes,
nothing is left behind. Eight bytes are written at once, and in the order of the program, as x86 does.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from typing import Any

_LINE = 8
"""Counters of 8 bytes in a cache line of 64: each has a line to itself."""
_LENGTH_BYTES = 8
_YIELD_SECONDS = 0.02
"""For so long a waiting process only lets others run, which takes it about a microsecond to come back from; then it
begins to sleep."""
_SLEEP_SECONDS = 0.0005


class Channel:
    """Carries any objects that pickle; each reader gets every one, in order.

    Args:
        num_readers: readers are numbered from 0.
        capacity: bytes of the ring.
        descriptor: that of the memory, inherited from the process that made it; None makes it.
    """

    def __init__(self, num_readers: int, capacity: int = 2**20, descriptor: int | None = None) -> None:
        header = 8 * _LINE * (num_readers + 1)
        self.descriptor = _new_memory(header + capacity) if descriptor is None else descriptor
        self.capacity = capacity
        self._memory = mmap.mmap(self.descriptor, header + capacity)
        view = memoryview(self._memory)
        # The writer's position, then each reader's.
        self._counters = view[:header].cast("q")
        self._data = view[header:]

    def send(self, message: object, check: Callable[[], None]) -> None:
        """Write a message; waits while some reader has not read what it would overwrite.

        Args:
            message: anything that pickles.
            check: called now and then while it waits; what it raises ends the waiting.
        """
        payload = pickle.dumps(message, protocol=5)
        unsent = memoryview(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)
        while unsent:
            _wait(lambda: self._num_free > 0, check)
            count = min(len(unsent), self._num_free)
            start = self._written % self.capacity
            until_end = min(count, self.capacity - start)
            self._data[start : start + until_end] = unsent[:until_end]
            self._data[: count - until_end] = unsent[until_end:count]
            # Only now may the readers look.
            self._written += count
            unsent = unsent[count:]

    def receive(self, reader: int, check: Callable[[], None] = lambda: None) -> Any:
        """Wait for reader `reader`'s next message and return it; `check` is called as in `send`."""
        length = int.from_bytes(self._read(reader, _LENGTH_BYTES, check), "little")
        return pickle.loads(self._read(reader, length, check))

    def close(self) -> None:
        """Give the memory back; the system frees it once every process has, or has ended."""
        self._counters.release()
        self._data.release()
        self._memory.close()
        os.close(self.descriptor)

    @property
    def _written(self) -> int:
        return self._counters[0]

    @_written.setter
    def _written(self, position: int) -> None:
        self._counters[0] = position

    @property
    def _num_free(self) -> int:
        slowest = min(self._counters[_LINE::_LINE])
        return self.capacity - (self._written - slowest)

    def _read(self, reader: int, count: int, check: Callable[[], None]) -> bytes:
        place = _LINE * (reader + 1)
        pieces = []
        while count:
            _wait(lambda: self._written > self._counters[place], check)
            position = self._counters[place]
            start = position % self.capacity
            size = min(count, self._written - position, self.capacity - start)
            pieces.append(bytes(self._data[start : start + size]))
            # Only now may the writer overwrite it.
            self._counters[place] = position + size
            count -= size
        return b"".join(pieces)


def _new_memory(size: int) -> int:
    shm = "/dev/shm"
    with tempfile.TemporaryFile(dir=shm if os.path.isdir(shm) else None) as file:
        # Written, not only sized: a file system that is full says so here, and not by a signal later.
        file.write(bytes(size))
        file.flush()
        return os.dup(file.fileno())


def _wait(ready: Callable[[], bool], check: Callable[[], None]) -> None:
    started = time.monotonic()
    while not ready():
        if time.monotonic() - started < _YIELD_SECONDS:
            os.sched_yield()
        else:
            check()
            time.sleep(_SLEEP_SECONDS)
