"""Counts over all front ends of a server, for the limits that are the server's."""

from __future__ import annotations

import mmap
from enum import IntEnum


class Counted(IntEnum):
    """Numbers of the whole server: requests with a body, connections, and requests that wait or run in the engine."""

    REQUESTS = 0
    CONNECTIONS = 1
    PENDING = 2


class ServerCounts:
    """Counts of one front end among those of all.

    A front end writes only its own numbers, so that none waits for another; two that look at the same time may both
    take the last place.

    Args:
        memory: shared by all front ends, of `size` bytes; private if there are no others.
        index: which front end this is.
    """

    def __init__(self, memory: mmap.mmap | bytearray | None = None, index: int = 0) -> None:
        self._numbers = memoryview(bytearray(self.size(1)) if memory is None else memory).cast("q")
        self._first = index * len(Counted)

    @staticmethod
    def size(num_front_ends: int) -> int:
        """Return the bytes that the counts of a server take."""
        return 8 * len(Counted) * num_front_ends

    def add(self, counted: Counted, change: int) -> None:
        """Count up or down."""
        self._numbers[self._first + counted] += change

    def set(self, counted: Counted, number: int) -> None:
        """Set a number of this front end."""
        self._numbers[self._first + counted] = number

    def total(self, counted: Counted) -> int:
        """Return a number of all front ends."""
        return sum(self._numbers[counted :: len(Counted)])

    def reset(self) -> None:
        """Set all numbers of this front end to 0."""
        for counted in Counted:
            self.set(counted, 0)
