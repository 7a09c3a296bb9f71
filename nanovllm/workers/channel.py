"""A broadcast channel from rank 0 to the other ranks: a ring buffer in shared memory, one writer, several readers.

A message is 8 bytes of length and a pickle. The ring carries messages as one byte stream, so a message larger than
the ring is sent in several parts. The writer's position is the number of bytes written, each reader's the number of
bytes it has read; positions only grow. The writer never overwrites bytes that some reader has not read.

The memory is an unnamed file whose descriptor the other processes inherit, so the system frees it however they end.
The channel relies on x86: aligned 8-byte stores are atomic and become visible in program order.
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
"""Counters of 8 bytes per cache line of 64 bytes; each position has its own line."""
_LENGTH_BYTES = 8
_YIELD_SECONDS = 0.02
"""A waiting process calls `sched_yield` (about 1 us) for this long, then sleeps between checks."""
_SLEEP_SECONDS = 0.0005


class Channel:
    """Carries objects that pickle; every reader receives every message, in order.

    Args:
        num_readers: number of readers; they are numbered from 0.
        capacity: bytes of the ring.
        descriptor: inherited descriptor of the memory; None allocates it.
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
        """Write a message; wait while the ring is full.

        Args:
            message: any object that pickles.
            check: called repeatedly while waiting; raises to end the wait.
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
            # After the data, so that readers see only complete bytes.
            self._written += count
            unsent = unsent[count:]

    def receive(self, reader: int, check: Callable[[], None] = lambda: None) -> Any:
        """Wait for reader `reader`'s next message and return it; `check` is called as in `send`."""
        length = int.from_bytes(self._read(reader, _LENGTH_BYTES, check), "little")
        return pickle.loads(self._read(reader, length, check))

    def close(self) -> None:
        """Unmap the memory; the system frees it when every process has closed it or ended."""
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
            # After the copy, because the writer may then overwrite these bytes.
            self._counters[place] = position + size
            count -= size
        return b"".join(pieces)


def _new_memory(size: int) -> int:
    shm = "/dev/shm"
    with tempfile.TemporaryFile(dir=shm if os.path.isdir(shm) else None) as file:
        # Writing zeros allocates the memory now: a full file system raises here instead of SIGBUS later.
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
