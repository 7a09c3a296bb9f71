"""Sequences: the outputs of requests, with their tokens and counts, written by the scheduler and the block manager.

A running sequence has *caught up* when its newest token is the only one left to compute. Such sequences are rows of one
table of arrays (`SteadyRows`): a step changes all rows by adding to an array, and finds the few that need attention (a
full block, a limit, the end of the output, a reader) by comparison. Only these go through the code for one sequence,
which reads counts and tokens from the table (`Sequence.num_tokens`, `Sequence.token_ids`).
"""

from __future__ import annotations

import time
import typing
from array import array
from bisect import bisect_left, insort
from dataclasses import replace
from enum import Enum, auto
from hashlib import sha256
from operator import attrgetter

import numpy as np

from nanovllm.engine.prefix_cache import BlockKey, BlockTable
from nanovllm.engine.request import Request, TokenConstraint
from nanovllm.outputs import CompletionOutput, Logprob, Logprobs, RequestMetrics, RequestOutput, record_bytes
from nanovllm.runner.messages import NO_DRAFTS, NO_ROWS, DraftCosts, NewRequest, PromptScores, Rows, TokenLogprobs
from nanovllm.sampling_params import SamplingExtra

_MAX_END_TOKENS = 4
"""End tokens per output that are compared in all rows at once; a request with more is watched."""
_FEW_ROWS = 8
"""Up to this number, all rows get attention, which is faster: 8 rows take 20 us, and 40 us by indexing arrays."""
_FIRST_GAIN = 1.0
"""Tokens that a row is assumed to gain by drafts in a step, before any is verified."""
_FEW_GAINS, _MANY_GAINS = 8, 64
"""Steps over which the gains of one row, and of all rows, are averaged."""
_PATIENCE = 4
"""Steps for which a row without drafts is planned as if it had some: results arrive a step after the plan."""
_TRIAL_SHARE = 1 / 400
"""Share of the time that may be spent on drafts that do not pay."""
_NEVER = np.iinfo(np.int64).max
sort_key = attrgetter("sort_key")


class SequenceGroup(list["Sequence"]):
    """The sequences of a request's outputs, in order."""

    __slots__ = ()

    @property
    def request_id(self) -> int:
        """The id of the first sequence."""
        return self[0].seq_id

    @property
    def is_finished(self) -> bool:
        """Whether all outputs are complete."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self)

    def output(self) -> RequestOutput:
        """Return the output of the finished request, without text."""
        first, metrics = self[0], self[0].metrics
        if len(self) > 1:
            # It ends with its last output.
            metrics = replace(metrics, total_time=max(seq.metrics.total_time or 0.0 for seq in self))
        # The field accepts an array.
        tokens: typing.Any = first.request.token_ids
        return RequestOutput(
            request_id=first.seq_id,
            prompt=None,
            prompt_token_ids=tokens,
            outputs=[seq.completion() for seq in self],
            finished=True,
            prompt_logprobs=first.prompt_logprobs(),
            num_cached_tokens=first.num_cached_tokens or 0,
            metrics=metrics,
            hidden_states=first.hidden_states(),
        )


class SequenceStatus(Enum):
    """The stages of a sequence's life."""

    WAITING = auto()
    """Queued; holds no block and no slot. A preempted sequence returns here, maybe with a token still in flight."""
    RUNNING = auto()
    """Holds a slot and blocks until it ends or is preempted."""
    ENDING = auto()
    """Its last token is in flight (a stop by count is known when planning); it holds nothing any more."""
    FINISHED = auto()
    """Its text is complete, or it was aborted."""


class Sequence:
    """One output of a request.

    Three counts describe its progress, and their differences make overlapped steps possible: `len(token_ids)` tokens
    whose values are known here, `num_tokens` that exist (the newest may so far exist only on the device), and
    `num_computed_tokens` whose keys and values are stored or planned to be. Once it has caught up, these are in the
    table `rows`.

    A step may compute drafts, and return fewer tokens than planned. Until its result is known, `num_tokens` and
    `num_computed_tokens` count all that it may return; `num_unsure` of them may turn out not to exist.
    """

    __slots__ = (
        "__weakref__", "_num_computed_tokens", "_num_tokens", "_token_ids", "block_hashes", "block_tables",
        "constraint", "decode_state", "end_token_ids", "finish_reason", "fits_from", "fork_states", "has_extra",
        "index", "is_watched", "logprobs", "metrics", "most_tokens", "num_admissions", "num_branch_blocks",
        "num_cached_tokens", "num_prompt_tokens", "num_registered_blocks", "num_resets", "num_shared_tokens",
        "params", "prompt_outputs", "record_bytes", "request", "request_id", "rows", "seed", "seq_id", "siblings",
        "slot", "sort_key", "source_state", "status", "stop_reason",
    )  # fmt: skip

    def __init__(
        self, seq_id: int, request: Request, seed: int, index: int = 0, constraint: TokenConstraint | None = None
    ) -> None:
        params = request.params
        self.seq_id = seq_id
        # The id of the first sequence of its request.
        self.request_id = seq_id
        self.request = request
        # Its slices go unchanged to hashes, to numpy and to other processes.
        self._token_ids = request.token_ids[:]
        self.num_prompt_tokens = len(self._token_ids)
        self.params = params
        self.seed = seed
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        # Its index among the outputs of its request, and the constraint that masks its tokens.
        self.index = index
        self.constraint = constraint
        # All sequences of a request with several outputs, until this one has finished.
        self.siblings: typing.Sequence[Sequence] = ()
        # Number of tokens, prompt and output, at which it ends; the engine sets it by its limits.
        self.most_tokens = self.num_prompt_tokens + (params.max_tokens or 0)
        # Whether its sampling needs more than a temperature.
        self.has_extra = constraint is not None or params.has_extra
        # Tokens that end the output; the scheduler adds the model's.
        self.end_token_ids: frozenset[int] = frozenset()
        # Whether the host must check each token: other tokens may end it, or tokens are streamed.
        self.is_watched = bool(constraint or params.stop_token_ids or request.reports_tokens)
        # A record for each token of the output, see `nanovllm.outputs`, and the size of one.
        self.logprobs = bytearray()
        self.record_bytes = record_bytes(params.logprobs)
        # Requested outputs of the prompt computed by chunks so far; complete once the whole prompt is computed.
        is_asked = params.prompt_logprobs is not None or request.pooling is not None or bool(params.hidden_states)
        self.prompt_outputs: list[TokenLogprobs | np.ndarray] | None = [] if is_asked else None
        self.num_admissions = 0
        self.metrics = RequestMetrics(time.monotonic())
        self.rows: SteadyRows | None = None
        self._num_tokens = self.num_prompt_tokens
        self._num_computed_tokens = 0
        # Prompt tokens found in the cache at the first admission; None before it.
        self.num_cached_tokens: int | None = None
        self.slot = -1
        # One table for each group of layers; empty while the sequence has no blocks.
        self.block_tables: list[BlockTable] = []
        # Leading blocks of each table that are in the prefix cache, or were found there to be duplicates.
        self.num_registered_blocks = 0
        # Hashes of its prefixes of 0, 1, ... blocks, as far as they were needed; see `prefix_cache`.
        # The first is of the salt, hashed twice: no prefix of other requests, whatever its tokens, has this input.
        self.block_hashes = [sha256(sha256((request.cache_salt or "").encode()).digest()).digest()]
        # Leading blocks whose keys were cached at the last admission.
        self.num_branch_blocks = 0
        # Keys of the cached states before the last token of the prompt, from which the request's other outputs go on.
        self.fork_states: list[BlockKey] = []
        # The hash of the last prefix at whose end its state was kept in decoding.
        self.decode_state: bytes | None = None
        # The hash of the prefix with its first state, if all keys that it found end there.
        self.source_state: bytes | None = None
        # Number of prefix cache resets when the first blocks were given.
        self.num_resets = 0
        # Leading tokens stored in blocks of a sibling.
        self.num_shared_tokens = 0
        # The block manager's count of freed and registered blocks below which this sequence does not fit.
        self.fits_from = 0
        # Sequences run in the order of this key: by priority, then by arrival.
        self.sort_key = (request.priority, seq_id)

    @property
    def priority(self) -> int:
        """The request's priority; lower ones run first."""
        return self.sort_key[0]

    @property
    def token_ids(self) -> array[int]:
        """The tokens whose values are known, prompt and output."""
        if self.rows is not None:
            self.rows.flush(self)
        return self._token_ids

    @property
    def num_tokens(self) -> int:
        """The number of tokens that exist, at most."""
        return self._num_tokens if self.rows is None else int(self.rows.num_tokens[self.slot])

    @num_tokens.setter
    def num_tokens(self, count: int) -> None:
        assert self.rows is None
        self._num_tokens = count

    @property
    def num_computed_tokens(self) -> int:
        """The number of tokens whose keys and values are stored or planned to be."""
        # All but the newest once it has caught up.
        return self._num_computed_tokens if self.rows is None else self.num_tokens - 1

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        assert self.rows is None
        self._num_computed_tokens = count

    @property
    def num_unsure(self) -> int:
        """The number of tokens in flight that may turn out not to exist."""
        return 0 if self.rows is None else int(self.rows.num_unsure[self.slot])

    def append(self, token_id: int) -> None:
        """Append the value of the next token."""
        self.token_ids.append(token_id)
        if self.rows is not None:
            self.rows._num_known[self.slot] += 1

    @property
    def num_in_flight(self) -> int:
        """The number of tokens, at most, that are planned and whose values have not come back yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def wants_prompt_outputs(self) -> bool:
        """Whether the prompt's log-probabilities or hidden states are requested, and not all computed."""
        if self.prompt_outputs is None or self.index:
            return False
        return len(self.token_ids) == self.num_prompt_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Leading tokens that the prefix cache may serve."""
        if not self.wants_prompt_outputs or self.request.pooling == "last":
            return len(self.token_ids)
        # The first scored token follows from the one before it.
        needs_all = self.request.pooling or self.params.hidden_states
        return 0 if needs_all else max(0, self.params.prompt_logprobs_start - 1)

    @property
    def fork_source(self) -> Sequence | None:
        """Another output of the request whose blocks hold the whole prompt, which this waiting one can share."""
        if not self.siblings or self.num_tokens > self.num_prompt_tokens or self.wants_prompt_outputs:
            return None
        others = (other for other in self.siblings if other.status is SequenceStatus.RUNNING and not other.is_behind)
        return next(others, None)

    @property
    def is_behind(self) -> bool:
        """Whether a token known on the host is still to be computed."""
        return self.rows is None and self.num_computed_tokens < self.num_tokens

    def new_request(self, *, with_tokens: bool = False) -> NewRequest:
        """Return the contents of its slot, at admission."""
        params, extra = self.params, None
        if self.has_extra:
            extra = SamplingExtra(
                params, self.token_ids[:] if params.uses_penalties else array("i"), self.num_prompt_tokens,
                tuple(self.end_token_ids) if params.min_tokens else (), self.request.bad_token_ids,
                self.constraint is not None,
            )  # fmt: skip
        tables = [table[:] for table in self.block_tables]
        known = self.token_ids[: None if with_tokens else 0]
        return NewRequest(self.slot, tables, self.num_prompt_tokens, params.temperature, self.seed, extra, known)

    def prompt_scores(self, start: int, end: int) -> PromptScores | None:
        """Return which tokens of the prompt are scored by its chunk `start ... end - 1`."""
        params = self.params
        if params.prompt_logprobs is None or not self.wants_prompt_outputs:
            return None
        # A token is scored by the hidden state before it.
        first, last = max(start + 1, params.prompt_logprobs_start), min(end, self.num_prompt_tokens - 1)
        if first > last:
            return None
        return PromptScores(first - 1 - start, self.token_ids[first : last + 1], params.prompt_logprobs)

    def pooling_of(self, end: int) -> str | None:
        """Return the hidden states requested from a chunk that ends at `end`: "last", or "mean" of all."""
        pooling = self.request.pooling
        return pooling if pooling == "mean" or end == self.num_prompt_tokens else None

    def completion(self) -> CompletionOutput:
        """Return the finished output, without text; its tokens include the EOS that ended them."""
        token_ids, logprobs, cumulative = self.token_ids[self.num_prompt_tokens :].tolist(), None, None
        if self.params.logprobs is not None:
            logprobs = Logprobs[dict[int, Logprob]](self.logprobs, 1 + self.params.logprobs)
            cumulative = logprobs.sum()
        return CompletionOutput(self.index, "", token_ids, cumulative, logprobs, self.finish_reason, self.stop_reason)

    def prompt_logprobs(self) -> Logprobs[dict[int, Logprob] | None] | None:
        """Return the log-probabilities of the prompt's tokens; None if not asked for, or if it was not computed."""
        if self.params.prompt_logprobs is None or self.wants_prompt_outputs:
            return None
        width = 1 + self.params.prompt_logprobs
        parts = [part.records() for part in self.prompt_outputs or () if isinstance(part, TokenLogprobs)]
        records = np.concatenate(parts) if parts else np.empty((0, 1 + 2 * width), dtype=np.int32)
        return Logprobs(records, width, num_missing=self.num_prompt_tokens - len(records))

    def hidden_states(self) -> list[np.ndarray]:
        """Return the value of `RequestOutput.hidden_states`; empty if the prompt was not computed whole."""
        if self.prompt_outputs is None or self.wants_prompt_outputs:
            return []
        parts = [part for part in self.prompt_outputs if isinstance(part, np.ndarray)]
        # Layers come first.
        return list(np.concatenate(parts, 1)) if self.params.hidden_states else parts

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, known={len(self.token_ids)}, exist={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, blocks={[len(table) for table in self.block_tables]})"
        )


class SteadyRows:
    """The running sequences that have caught up, a row each, in the order in which they run.

    Of a row's `num_tokens`, `_num_known` have values, in the sequence's own list or among the `_num_recent` in
    `_recent`. The others are in steps under way. A step is *quiet* if no row can need a block or reach its last token
    in it.

    Attributes:
        seqs: the sequences, one per row.
        num_tokens: [num_slots]; see `Sequence`. The newest of them is computed next.
        num_unsure: [num_slots]; see `Sequence`; zero without drafts.
        num_verified, num_accepted: [num_drafts]; drafts so far, by position among a row's drafts.
    """

    def __init__(self, num_slots: int, block_size: int, num_drafts: int = 0, costs: DraftCosts = NO_DRAFTS) -> None:
        self.block_size, self.num_drafts, self.costs = block_size, num_drafts, costs
        self.num_tokens, self.num_unsure = np.zeros((2, num_slots), dtype=np.int64)
        self.seqs: list[Sequence] = []
        self._rows: Rows | None = NO_ROWS
        self._seq_ids: list[int] = []
        self._num_quiet_steps = 0
        # Tokens whose values are known, and the newest of them, which are not in the sequence's own list yet.
        self._num_known, self._num_recent = np.zeros((2, num_slots), dtype=np.int64)
        self._recent = np.empty((num_slots, block_size), dtype=np.int32)
        # Tokens that fit into the sequence's blocks, and tokens in blocks that other outputs may share.
        self._capacity, self._num_shared = np.zeros((2, num_slots), dtype=np.int64)
        # Number of tokens at which it ends, and the most that one step computes.
        self._most_tokens, self._most_new = np.zeros((2, num_slots), dtype=np.int64)
        self.num_verified, self.num_accepted = np.zeros((2, self.num_drafts), dtype=np.int64)
        # Drafts that the device had when last known, steps since it had any, and tokens that drafts gained a step, on
        # the average of the steps counted.
        self._num_noted, self._num_without, self._num_gains = np.zeros((3, num_slots), dtype=np.int64)
        self._gain, self._usual_gain = np.zeros(num_slots), _FIRST_GAIN
        # The mean gain from which on the last step's drafts are verified, and steps in which drafts did not pay.
        self._least_gain, self._num_idle = np.inf, 0
        self._end_token_ids = np.full((num_slots, _MAX_END_TOKENS), -1, dtype=np.int64)
        self._is_watched = np.zeros(num_slots, dtype=bool)
        # The first step with this row; tokens of earlier ones belong to another sequence.
        self._first_step = np.full(num_slots, _NEVER, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.seqs)

    def add(self, seq: Sequence, capacity: int, first_step: int) -> None:
        """Add a row, from a step on, for a sequence that has caught up; capacity: see `note_room`."""
        slot, ends, params = seq.slot, list(seq.end_token_ids), seq.params
        insort(self.seqs, seq, key=sort_key)
        self._rows = None
        self.num_tokens[slot], self.num_unsure[slot] = seq.num_tokens, 0
        self._num_known[slot], self._num_recent[slot] = len(seq.token_ids), 0
        self._num_shared[slot] = -(-seq.num_prompt_tokens // self.block_size) * self.block_size if seq.siblings else 0
        self._most_tokens[slot] = seq.most_tokens
        # No drafts where the choice of a token depends on earlier tokens of the output beside the model.
        has_drafts = seq.constraint is None and not params.uses_penalties and not params.min_tokens
        self._most_new[slot] = 1 + self.num_drafts if has_drafts else 1
        self._num_noted[slot], self._num_without[slot] = self.num_drafts, 0
        self._gain[slot], self._num_gains[slot] = self._usual_gain, 1
        self._is_watched[slot] = seq.is_watched or len(ends) > _MAX_END_TOKENS
        self._end_token_ids[slot] = (ends + [-1] * _MAX_END_TOKENS)[:_MAX_END_TOKENS]
        self._first_step[slot] = first_step
        seq.rows = self
        self.note_room(seq, capacity)

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence if it has a row, and write its counts and tokens back. It keeps its slot."""
        if seq.rows is None:
            return
        num_tokens = seq.num_tokens
        self.flush(seq)
        del self.seqs[bisect_left(self.seqs, seq.sort_key, key=sort_key)]
        self._rows = None
        self._first_step[seq.slot] = _NEVER
        seq.rows = None
        seq.num_tokens, seq.num_computed_tokens = num_tokens, num_tokens - 1

    def note_room(self, seq: Sequence, capacity: int) -> None:
        """Update the number of tokens that fit into a sequence's blocks."""
        self._capacity[seq.slot] = capacity
        self._num_quiet_steps = 0

    def flush(self, seq: Sequence) -> None:
        """Move a sequence's recent tokens from these arrays to its `token_ids`."""
        slot = seq.slot
        count = self._num_recent[slot]
        if count:
            seq._token_ids.frombytes(self._recent[slot, :count].tobytes())
            self._num_recent[slot] = 0

    def note_drafts(self, slots: np.ndarray, num_drafts: np.ndarray, step: int) -> None:
        """Take in the number of drafts that the device has for rows after a step, by their slots."""
        is_current = self._first_step[slots] <= step + 1
        slots, num_drafts = slots[is_current], num_drafts[is_current]
        self._num_noted[slots] = num_drafts
        self._num_without[slots] = np.where(num_drafts > 0, 0, self._num_without[slots] + 1)

    def without_room(self) -> list[tuple[Sequence, int]]:
        """Return sequences that may lack a block of their own for their next tokens, and how many these are at most."""
        if self._num_quiet_steps:
            return []
        slots = self._all_rows().slots
        num_tokens = self.num_tokens[slots]
        num_new = np.minimum(self._most_new[slots], self._most_tokens[slots] - num_tokens)
        lacks_room = num_tokens + 2 * (num_new - 1) > self._capacity[slots]
        is_shared = num_tokens - self.num_unsure[slots] <= self._num_shared[slots]
        rows = np.flatnonzero((lacks_room | is_shared) & (num_new > 0))
        return [(self.seqs[row], int(num_new[row])) for row in rows]

    def plan(self, budget: int) -> tuple[Rows, list[int], list[Sequence]]:
        """Return the rows, of at most `budget` tokens, the ids of their sequences, and the sequences that end."""
        rows, seq_ids = self._all_rows(), self._seq_ids[:]
        slots = rows.slots
        if self._num_quiet_steps:
            self._num_quiet_steps -= 1
            self.num_tokens[slots] += 1
            return rows, seq_ids, []
        if self.num_drafts:
            rows, seq_ids = self._with_drafts(slots, budget)
        self.num_tokens[rows.slots] += rows.num_new
        num_tokens, most_tokens = self.num_tokens[slots], self._most_tokens[slots]
        if not self.num_drafts and len(slots) and (num_tokens > self._num_shared[slots]).all():
            left = np.minimum(self._capacity[slots] + 1, most_tokens - 1) - num_tokens
            self._num_quiet_steps = max(0, int(left.min()))
        ending = np.flatnonzero(num_tokens - self.num_unsure[slots] >= most_tokens)
        return rows, seq_ids, [self.seqs[row] for row in ending]

    def _all_rows(self) -> Rows:
        """Return one token of every row; the same object until a row is added or removed."""
        if self._rows is None:
            self._rows = Rows.of_one_token(np.array([seq.slot for seq in self.seqs], dtype=np.int32))
            self._seq_ids = [seq.seq_id for seq in self.seqs]
        return self._rows

    def _with_drafts(self, slots: np.ndarray, budget: int) -> tuple[Rows, list[int]]:
        """Return the rows with drafts, and their ids; a row sits out while tokens in flight may be its last."""
        num_tokens = self.num_tokens[slots]
        num_new = np.minimum(self._most_new[slots], self._most_tokens[slots] - num_tokens)
        num_drafts = np.maximum(np.minimum(num_new, self._capacity[slots] + 1 - num_tokens) - 1, 0)
        # Drafts are verified if they pay, by how far the last ones were right.
        num_drafts *= self._mean_gain(slots) >= self._least_gain
        num_new = np.minimum(num_new, 1)
        # The first rows get the rest of the budget.
        left = budget - int(num_new.sum()) - (num_drafts.cumsum() - num_drafts)
        num_drafts = np.clip(left, 0, num_drafts)
        self.num_unsure[slots] += num_drafts
        runs = np.flatnonzero(num_new)
        num_new, num_computed = (num_new + num_drafts)[runs].astype(np.int32), (num_tokens[runs] - 1).astype(np.int32)
        return Rows(slots[runs], num_new, num_computed), [self._seq_ids[row] for row in runs]

    def _mean_gain(self, slots: np.ndarray) -> float:
        """Return the tokens of each row, on average, that drafts for these rows are expected to gain."""
        may_have_drafts = (self._most_new[slots] > 1) & (self._num_without[slots] < _PATIENCE)
        return float(self._gain[slots] @ may_have_drafts) / max(1, len(slots))

    def should_draft(self, num_rows: int) -> bool:
        """Return whether a step should end with drafts; what does not pay is tried again now and then."""
        self._least_gain, num_next = np.inf, len(self.seqs)
        if not num_next or max(num_rows, num_next) > max(self.costs.rows, default=0):
            return False
        slots, least_gain = self._all_rows().slots, self.costs.least_gain(num_next)
        gain = self._mean_gain(slots)
        if gain >= least_gain:
            self._num_idle = 0
        elif gain and least_gain < self.num_drafts:
            self._num_idle += 1
            if self._num_idle * _TRIAL_SHARE >= least_gain:
                # They are verified whatever they gain.
                least_gain, self._num_idle = 0.0, 0
                self._num_gains[slots] = 1
        if gain >= least_gain or self.costs.are_free:
            self._least_gain = least_gain
        return self._least_gain < np.inf

    def settle(self, seq: Sequence, num_new: int, num_returned: int) -> None:
        """Take back tokens that a row planned and did not return, preempted or not, and count the drafts it had."""
        num_drafts = gain = num_returned - 1
        if seq.rows is None:
            seq.num_tokens -= num_new - num_returned
        else:
            slot = seq.slot
            self.num_tokens[slot] -= num_new - num_returned
            self.num_unsure[slot] -= num_new - 1
            # What was noted after the step before.
            num_drafts = int(min(num_new - 1, self._num_noted[slot]))
            if num_drafts:
                self._num_gains[slot] = min(self._num_gains[slot] + 1, _FEW_GAINS)
                self._gain[slot] += (gain - self._gain[slot]) / self._num_gains[slot]
                if not self.costs.are_free:
                    self._usual_gain += (gain - self._usual_gain) / _MANY_GAINS
        self.num_verified[:num_drafts] += 1
        self.num_accepted[:gain] += 1

    def take(self, slots: np.ndarray, token_ids: np.ndarray, step: int) -> np.ndarray:
        """Store a token per row, int64; return the rows that the scheduler must check, and whose tokens it adds."""
        if len(slots) <= _FEW_ROWS:
            return np.arange(len(slots))
        num_known = self._num_known[slots] + 1
        # A block's last token is known before its keys are planned, or one step after.
        affected = (num_known % self.block_size < 2) | self._is_watched[slots] | (self._first_step[slots] > step)
        affected |= (self._end_token_ids[slots] == token_ids[:, None]).any(1)
        if self.num_drafts:
            affected |= num_known >= self._most_tokens[slots]
        rows = np.flatnonzero(affected)
        if len(rows):
            quiet = np.flatnonzero(~affected)
            slots, token_ids, num_known = slots[quiet], token_ids[quiet], num_known[quiet]
        num_recent = self._num_recent[slots]
        self._recent[slots, num_recent] = token_ids
        self._num_recent[slots] = num_recent + 1
        self._num_known[slots] = num_known
        return rows
