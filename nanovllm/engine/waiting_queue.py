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
        # Those that have come since `hold_new`, and are not to run; None if the queue is not held.
        self._held: dict[int, Sequence] | None = None

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences, in no particular order."""
        return iter(self._sequences.values())

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self._sequences[seq.seq_id] = seq
        heappush(self._heap, (seq.sort_key, seq.seq_id))

    def add_new(self, seq: Sequence) -> None:
        """Queue a sequence that has never run; if the queue is held, for the time after."""
        if self._held is None:
            self.add(seq)
        else:
            self._sequences[seq.seq_id] = self._held[seq.seq_id] = seq

    def hold_new(self) -> None:
        """Let no sequence run that comes from now on, until `release_new`."""
        self._held = {} if self._held is None else self._held

    def release_new(self) -> None:
        """Let those run that have come meanwhile."""
        held, self._held = self._held or {}, None
        for seq in held.values():
            self.add(seq)

    @property
    def num_held(self) -> int:
        """Sequences that are not to run now."""
        return len(self._held or ())

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        del self._sequences[seq.seq_id]
        if self._held is not None:
            self._held.pop(seq.seq_id, None)

    def first(self) -> Sequence | None:
        """Return the sequence that is to run next, if there is one."""
        while self._heap:
            seq = self._sequences.get(self._heap[0][1])
            if seq is not None:
                return seq
            heappop(self._heap)
        return None

    def in_order(self) -> Iterator[Sequence]:
        """Iterate over the sequences in the order in which they are to run; the queue must not change meanwhile."""
        # Children of a heap's entry come after it, so those of the entries seen so far are enough to find the next.
        seen = [(self._heap[0], 0)] if self._heap else []
        before = -1
        while seen:
            (_, seq_id), index = heappop(seen)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(self._heap):
                    heappush(seen, (self._heap[child], child))
            # A sequence that was taken out and came back has two entries.
            if seq_id in self._sequences and seq_id != before:
                yield self._sequences[seq_id]
            before = seq_id
