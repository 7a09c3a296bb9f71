"""What a server has at once, counted over all of its front ends, for the limits that are the server's."""

from __future__ import annotations

import mmap
from enum import IntEnum


class Counted(IntEnum):
    """What is counted: requests with a body, connections, and requests that wait or run in the engine."""

    REQUESTS = 0
    CONNECTIONS = 1
    PENDING = 2


class ServerCounts:
    """Counts of one front end among those of all.

    Each front end writes to numbers of its own alone, so that none waits for another; two that look at the same time
    may both take the last place.

    Args:
        memory: of all front ends, from `memory_size`; its own if there are no others.
        index: which front end this is.
    """

    def __init__(self, memory: mmap.mmap | bytearray | None = None, index: int = 0) -> None:
        self._numbers = memoryview(bytearray(memory_size(1)) if memory is None else memory).cast("q")
        self._first = index * len(Counted)

    def add(self, counted: Counted, change: int) -> None:
        """Count up or down."""
        self._numbers[self._first + counted] += change

    def set(self, counted: Counted, number: int) -> None:
        """Say how many there are."""
        self._numbers[self._first + counted] = number

    def total(self, counted: Counted) -> int:
        """Return how many there are in all front ends."""
        return sum(self._numbers[counted :: len(Counted)])

    def reset(self) -> None:
        """Count nothing of this front end, which has ended."""
        for counted in Counted:
            self.set(counted, 0)


def memory_size(num_front_ends: int) -> int:
    """Return the bytes of the counts of so many front ends."""
    return 8 * len(Counted) * num_front_ends
