"""Counts requests and connections across front ends, for the limits of the whole server."""

from __future__ import annotations

import mmap
from enum import IntEnum


class Counted(IntEnum):
    """Counted quantities: requests with a body, connections, and requests in the engine."""

    REQUESTS = 0
    CONNECTIONS = 1
    PENDING = 2


class ServerCounts:
    """One front end's counts, in memory shared by all.

    A front end writes only its own numbers, so that no locks are needed; front ends that check a limit at the same time
    may slightly exceed it.

    Args:
        memory: memory shared by all front ends, of `size` bytes; private if there is only one.
        index: index of this front end.
    """

    def __init__(self, memory: mmap.mmap | bytearray | None = None, index: int = 0) -> None:
        self._numbers = memoryview(bytearray(self.size(1)) if memory is None else memory).cast("q")
        self._first = index * len(Counted)

    @staticmethod
    def size(num_front_ends: int) -> int:
        """Return the size of a server's counts in bytes."""
        return 8 * len(Counted) * num_front_ends

    def add(self, counted: Counted, change: int) -> None:
        """Change a number of this front end."""
        self._numbers[self._first + counted] += change

    def set(self, counted: Counted, number: int) -> None:
        """Set a number of this front end."""
        self._numbers[self._first + counted] = number

    def total(self, counted: Counted) -> int:
        """Return a number's total over all front ends."""
        return sum(self._numbers[counted :: len(Counted)])

    def reset(self) -> None:
        """Set all numbers of this front end to 0."""
        for counted in Counted:
            self.set(counted, 0)
