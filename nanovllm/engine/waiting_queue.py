"""The sequences that wait, in the order in which they are to run."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from nanovllm.engine.sequence import Sequence


class WaitingQueue:
    """A heap by `Sequence.sort_key`: O(log n) to add, O(1) to remove, whose entry is dropped when it comes first."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int]] = []
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences, in no particular order."""
        return iter(self._sequences.values())

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self._sequences[seq.seq_id] = seq
        heappush(self._heap, (seq.sort_key, seq.seq_id))

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        del self._sequences[seq.seq_id]

    def first(self) -> Sequence | None:
        """Return the sequence that is to run next, if there is one."""
        while self._heap:
            seq = self._sequences.get(self._heap[0][1])
            if seq is not None:
                return seq
            heappop(self._heap)
        return None
