"""Keeps the sequences that decode as arrays by slot: a step changes all of them at once, and only some are affected.

A decode step gives every row one token more. That is two moves: what changes in all rows is an addition to an array
(`plan`, `take`), and who is affected (a block is full, a limit is reached, the output ends, somebody watches) is found
by comparison. Only those rows go through the scheduler's code for one sequence, whose counts and tokens are read from
here (`Sequence.num_tokens`, `Sequence.token_ids`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

import numpy as np

from nanovllm.engine.sequence import Sequence

_MAX_END_TOKENS = 4
"""Tokens that end an output and are looked for in all rows at once; a request with more is watched."""
_FEW_ROWS = 8
"""Up to so many rows are all treated as affected, which is faster: 8 rows take 20 us, and 40 by indexing arrays."""
_NEVER = np.iinfo(np.int64).max
_sort_key = attrgetter("sort_key")


class DecodeRows:
    """The sequences that decode, in the order in which they run.

    Of a row's `num_tokens`, `_num_known` have values: those in the sequence's own list and `_num_recent` in `_recent`.
    The others are in steps under way. A row is *affected* by a step if the scheduler must look at its token; a step is
    *quiet* if no row can need a block or reach its last token in it.

    Args:
        num_slots: sequences that may run at once.
        block_size: tokens of a block.

    Attributes:
        num_tokens: [num_slots]; tokens that exist, see `Sequence`. The newest of them is computed next.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_tokens = np.zeros(num_slots, dtype=np.int64)
        self._seqs: list[Sequence] = []
        self._slots: np.ndarray | None = None
        self._seq_ids: list[int] = []
        # Steps in which nobody will need a block or end by count.
        self._num_quiet_steps = 0
        # Tokens whose values are known, and the newest of them, which are not in the sequence's own list yet.
        self._num_known = np.zeros(num_slots, dtype=np.int64)
        self._recent = np.empty((num_slots, block_size), dtype=np.int32)
        self._num_recent = np.zeros(num_slots, dtype=np.int64)
        # Tokens that the sequence's blocks have room for; and those in blocks that other outputs may share.
        self._capacity = np.zeros(num_slots, dtype=np.int64)
        self._num_shared = np.zeros(num_slots, dtype=np.int64)
        # Tokens with which it ends, whatever they are.
        self._most_tokens = np.zeros(num_slots, dtype=np.int64)
        self._end_token_ids = np.full((num_slots, _MAX_END_TOKENS), -1, dtype=np.int64)
        self._is_watched = np.zeros(num_slots, dtype=bool)
        # The first step that decodes it: tokens of earlier ones were another sequence's.
        self._first_step = np.full(num_slots, _NEVER, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._seqs)

    @property
    def seqs(self) -> list[Sequence]:
        """The sequences, a row each."""
        return self._seqs

    @property
    def slots(self) -> np.ndarray:
        """Their slots, [num_rows] int32; replaced, never changed, when a sequence joins or leaves."""
        if self._slots is None:
            self._slots = np.array([seq.slot for seq in self._seqs], dtype=np.int32)
            self._seq_ids = [seq.seq_id for seq in self._seqs]
        return self._slots

    @property
    def seq_ids(self) -> list[int]:
        """Their ids, as a list for the caller."""
        return self._seq_ids[:] if self._slots is not None else [seq.seq_id for seq in self._seqs]

    def add(self, seq: Sequence, most_tokens: int, first_step: int) -> None:
        """Let a sequence decode, whose prompt is planned.

        Args:
            seq: has a slot.
            most_tokens: tokens with which it ends.
            first_step: number of the first step that decodes it.
        """
        slot, ends = seq.slot, list(seq.end_token_ids)
        insort(self._seqs, seq, key=_sort_key)
        self._slots = None
        self.num_tokens[slot] = seq.num_tokens
        self._num_known[slot] = len(seq.token_ids)
        self._num_recent[slot] = 0
        self._num_shared[slot] = -(-seq.num_prompt_tokens // self.block_size) * self.block_size if seq.siblings else 0
        self._most_tokens[slot] = most_tokens
        self._is_watched[slot] = seq.is_watched or len(ends) > _MAX_END_TOKENS
        self._end_token_ids[slot] = (ends + [-1] * _MAX_END_TOKENS)[:_MAX_END_TOKENS]
        self._first_step[slot] = first_step
        seq.rows = self
        self.note_blocks(seq)
        self._num_quiet_steps = 0

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence, and give its counts and tokens back to it. It still has its slot."""
        if seq.rows is None:
            return
        num_tokens = seq.num_tokens
        self.flush(seq)
        del self._seqs[bisect_left(self._seqs, seq.sort_key, key=_sort_key)]
        self._slots = None
        self._first_step[seq.slot] = _NEVER
        seq.rows = None
        seq.num_tokens, seq.num_computed_tokens = num_tokens, num_tokens - 1

    def note_blocks(self, seq: Sequence) -> None:
        """Note how many tokens a sequence's blocks hold, after blocks were added."""
        self._capacity[seq.slot] = seq.num_blocks * self.block_size

    def note_token(self, seq: Sequence) -> None:
        """Count a token that was appended to a sequence."""
        self._num_known[seq.slot] += 1

    def flush(self, seq: Sequence) -> None:
        """Append to a sequence's `token_ids` the tokens that only these arrays have."""
        slot = seq.slot
        count = self._num_recent[slot]
        if count:
            seq.append_known(self._recent[slot, :count].tobytes())
            self._num_recent[slot] = 0

    def without_room(self) -> list[Sequence]:
        """Return the sequences that may lack a block of their own for the token that they compute next."""
        if self._num_quiet_steps:
            return []
        slots = self.slots
        num_tokens = self.num_tokens[slots]
        rows = np.flatnonzero((num_tokens > self._capacity[slots]) | (num_tokens <= self._num_shared[slots]))
        return [self._seqs[row] for row in rows]

    def plan(self) -> list[Sequence]:
        """Count one token more in each row; return the sequences that end with it."""
        slots = self.slots
        self.num_tokens[slots] += 1
        if self._num_quiet_steps:
            self._num_quiet_steps -= 1
            return []
        num_tokens, most_tokens = self.num_tokens[slots], self._most_tokens[slots]
        if len(slots) and (num_tokens > self._num_shared[slots]).all():
            left = np.minimum(self._capacity[slots] + 1, most_tokens - 1) - num_tokens
            self._num_quiet_steps = max(0, int(left.min()))
        return [self._seqs[row] for row in np.flatnonzero(num_tokens >= most_tokens)]

    def take(self, slots: np.ndarray, token_ids: np.ndarray, step: int) -> np.ndarray:
        """Store the tokens of a step's quiet rows; return the affected rows, whose tokens are left to the caller.

        Args:
            slots: [num_rows] int32; of the step.
            token_ids: [num_rows] int64.
            step: its number.
        """
        if len(slots) <= _FEW_ROWS:
            return np.arange(len(slots))
        num_known = self._num_known[slots] + 1
        # A block's last token is known before its keys are planned, or one step after.
        affected = (num_known % self.block_size < 2) | self._is_watched[slots] | (self._first_step[slots] > step)
        affected |= (self._end_token_ids[slots] == token_ids[:, None]).any(1)
        rows = np.flatnonzero(affected)
        if len(rows):
            quiet = np.flatnonzero(~affected)
            slots, token_ids, num_known = slots[quiet], token_ids[quiet], num_known[quiet]
        num_recent = self._num_recent[slots]
        self._recent[slots, num_recent] = token_ids
        self._num_recent[slots] = num_recent + 1
        self._num_known[slots] = num_known
        return rows
