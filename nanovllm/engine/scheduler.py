"""Decides which sequences run in the next step, and how many tokens of each.

A row of a step is a sequence and the tokens that it computes: computed tokens catch up with existing ones. A sequence
that has caught up computes its newest token; one that is behind (new or preempted) computes a chunk of its missing
tokens. Sequences that have caught up come first, and the others share the rest of the token budget, so that a long
prompt stalls no other row (chunked prefill, Sarathi-Serve, Agrawal et al. 2024). When the cache is full, the newest
sequence loses its blocks and is computed again later (preemption by recomputation, vLLM, Kwon et al. 2023). Planning
needs counts only, never the values of tokens in flight, so a step can be planned while the previous one runs.

Running and waiting sequences are ordered by `Sequence.sort_key`: by priority, then by arrival. The last running one is
preempted first. The first is preempted only for a waiting one of higher priority, so that one always makes progress.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Reversible
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import StreamedToken
from nanovllm.engine.sequence import Sequence, SequenceStatus, SteadyRows, sort_key
from nanovllm.runner.messages import NO_DRAFTS, Chunk, DraftCosts, ScheduledBatch, StepOutput

_MOST_PASSED_OVER = 64
"""Waiting sequences that a step passes over at most, since each is looked up in the prefix cache."""


@dataclass
class StepChanges:
    """Changes made by the tokens of a step."""

    # The step's tokens, each with the id of its sequence.
    seq_ids: list[int]
    token_ids: np.ndarray
    # Ids of sequences that finished before their tokens came, which do not count.
    dropped: set[int] = field(default_factory=set)
    finished: list[Sequence] = field(default_factory=list)
    # Sequences whose constraint raised, and the error; they are dropped.
    failed: list[tuple[Sequence, BaseException]] = field(default_factory=list)
    # Tokens of requests that stream.
    new_tokens: list[StreamedToken] = field(default_factory=list)


@dataclass
class SchedulerStats:
    """Counts since the scheduler began. Prompt and cached tokens count once per request, at first admission.

    For clipped keys and values see `StepOutput`. Models with states also count `num_matched_tokens`: tokens whose keys
    are cached, with or without a state at their end. With speculation, `num_drafts` counts rows that verified drafts;
    accepted drafts are counted in all and by position among the row's drafts.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_clipped_kv: int = 0


class Scheduler:
    """Owns each unfinished sequence, from `add` to its last step; running ones have the `max_num_running` slots."""

    def __init__(
        self, block_manager: BlockManager,
        *, max_num_running: int, max_num_batched_tokens: int, eos_token_ids: frozenset[int] = frozenset(),
        num_drafts: int = 0, draft_costs: DraftCosts = NO_DRAFTS,
    ) -> None:  # fmt: skip
        # Every running sequence must get its next token within the budget of one step.
        assert max_num_running <= max_num_batched_tokens
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = eos_token_ids
        # Sorted by `sort_key`; `_held` has the sequences added since `hold_new`, which wait for `release_new`.
        self.waiting, self.running, self._held = list[Sequence](), list[Sequence](), list[Sequence]()
        self._is_held = False
        # The running sequences that have caught up.
        self.steady = SteadyRows(max_num_running, block_manager.block_size, num_drafts, draft_costs)
        self.stats = SchedulerStats()
        self._num_matched_tokens = 0
        self._free_slots = list(reversed(range(max_num_running)))
        self._sequences: dict[int, Sequence] = {}
        # Tokens that the step being planned has room for.
        self._budget = 0
        # Running sequences that are behind: first sequences that load blocks, then one that had a chunk. No other is
        # admitted before it has caught up.
        self._behind: list[Sequence] = []
        # Unfinished sequences whose sampling needs more than a temperature.
        self._num_extra = 0

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self._sequences[seq.seq_id] = seq
        seq.end_token_ids = frozenset() if seq.params.ignore_eos else self.eos_token_ids
        if seq.params.stop_token_ids:
            seq.end_token_ids = seq.end_token_ids.union(seq.params.stop_token_ids)
        self._num_extra += seq.has_extra
        insort(self._held if self._is_held else self.waiting, seq, key=sort_key)

    def hold_new(self) -> None:
        """Hold back sequences added from now on, until `release_new`."""
        self._is_held = True

    def release_new(self) -> None:
        """Let the held sequences run."""
        self._is_held = False
        self.waiting = sorted(self.waiting + self._held, key=sort_key)
        self._held.clear()

    def schedule(self) -> ScheduledBatch | None:
        """Plan one step; None if nothing can run now. All preemption comes before any block is registered."""
        if not self.waiting and not self.running:
            return None
        self._preempt_for_priority()
        batch = ScheduledBatch(self.stats.num_steps + 1)
        self._budget = self.max_num_batched_tokens
        self.block_manager.begin_step()
        ending = self._schedule_steady(batch)
        caught_up = self._schedule_behind(batch)
        if not len(batch.rows) and not batch.chunks:
            self.block_manager.cancel_step()
            return None
        self.stats.num_steps = batch.number
        batch.sampled_seq_ids += [seq.seq_id for seq in caught_up]
        if self._num_extra:
            sampled = [self._sequences[seq_id] for seq_id in batch.sampled_seq_ids]
            batch.has_extra = any(seq.has_extra for seq in sampled)
            batch.masked = [i for i, seq in enumerate(sampled) if seq.constraint is not None]
        for seq in ending:
            self._end_by_count(seq)
        for seq in caught_up:
            self._begin_steady(seq, batch.number + 1)
        batch.drafts = self.steady.should_draft(len(batch.rows))
        self.block_manager.finish_plan(batch, self.running)
        return batch

    def _preempt_for_priority(self) -> None:
        """Preempt the last running sequences for waiting ones of higher priority that lack a slot or blocks.

        Preempts at most one sequence for each waiting one that fits into this step's token budget. Blocks are checked
        for the first waiting one only, since the others may share its prefix; a long prompt gets the blocks of several
        sequences in successive steps.
        """
        running = self.running
        # The usual case must cost nothing.
        if not self.waiting or not running or self.waiting[0].priority >= running[-1].priority:
            return
        priority = self.waiting[0].priority
        begun = [s for s in self._behind if s.status is SequenceStatus.RUNNING and s.priority <= priority]
        budget = self.max_num_batched_tokens - len(self.steady)
        budget -= sum([seq.num_tokens - seq.num_computed_tokens for seq in begun])
        for index, seq in enumerate(self.waiting[: len(running)]):
            # At 0, the preempted row's own token is left.
            if budget < 0 or not running or seq.priority >= running[-1].priority:
                return
            lacks_blocks = not index and self.block_manager.num_missing_blocks(seq) > 0
            if lacks_blocks or len(self._free_slots) <= index:
                self._preempt(running[-1])
            budget -= seq.num_tokens

    def _schedule_steady(self, batch: ScheduledBatch) -> list[Sequence]:
        """Plan a row for every sequence that has caught up; return the sequences that it finishes."""
        for seq, num_new in self.steady.without_room():
            self._make_room(seq, num_new)
        budget = self._budget
        if self.steady.num_drafts and (self._behind or (self.waiting and self._free_slots)):
            # Prompts get the other half of what rows of one token leave.
            budget = (budget + len(self.steady)) // 2
        batch.rows, batch.sampled_seq_ids, ending = self.steady.plan(budget)
        self._budget -= int(batch.rows.num_new.sum()) if self.steady.num_drafts else len(self.steady)
        return ending

    def _make_room(self, seq: Sequence, num_new: int) -> None:
        """Give a running sequence blocks for its next token, preempting if needed, and free ones for drafts."""
        if seq.status is not SequenceStatus.RUNNING:
            return
        manager = self.block_manager
        manager.release_outside_window(seq)
        while not manager.make_room(seq):
            # Sequences already in the batch come before this one, so the last is never among them.
            self._preempt(last := self.running[-1])
            if last is seq:
                return
        manager.own_states(seq)
        if num_new > 1:
            # The drafter stores keys of the drafts after these tokens.
            num_tokens = min(num_new, self._budget) + num_new - 1
            manager.extend(seq, seq.num_computed_tokens + num_tokens)
        self.steady.note_room(seq, manager.capacity(seq))

    def _schedule_behind(self, batch: ScheduledBatch) -> list[Sequence]:
        """Plan chunks of running and waiting sequences that are behind; return the sequences that catch up.

        A sequence whose blocks this step loads from host memory gets its first chunk one step later, so that other rows
        do not wait for the copies. If there are no others, the step waits for its loads, and computes these sequences.
        """
        before = [seq for seq in self._behind if seq.status is SequenceStatus.RUNNING and seq.is_behind]
        caught_up, loading = self._schedule_chunks(before, batch)
        if loading and not batch.chunks and not len(batch.rows):
            batch.waits_for_loads = True
            batch.transfers += self.block_manager.take_loads()
            caught_up, loading = self._schedule_chunks(loading, batch)
        self._behind = loading + self._behind
        return caught_up

    def _schedule_chunks(self, behind: list[Sequence], batch: ScheduledBatch) -> tuple[list[Sequence], list[Sequence]]:
        """Plan chunks of running sequences `behind`, then of waiting ones, while there is budget.

        The next step waits for the loads of this one. Once they are enough, a sequence that would load more is admitted
        in the next one. Returns the sequences that catch up, and the sequences that wait for blocks; the rest of
        `behind` is in `_behind`.
        """
        caught_up, loading = list[Sequence](), list[Sequence]()
        while self._budget and (seq := behind.pop(0) if behind else self._admit(batch)) is not None:
            if self.block_manager.is_loading(seq):
                loading.append(seq)
                continue
            self._schedule_chunk(seq, batch)
            if seq.is_behind:
                behind.insert(0, seq)
                break
            caught_up.append(seq)
        self._behind = behind
        return caught_up, loading

    def _admit(self, batch: ScheduledBatch) -> Sequence | None:
        """Move the head of the queue to the running sequences, if budget, slots, blocks and pending loads allow."""
        manager = self.block_manager
        seq = self._next_waiting() if self._free_slots and self._budget else None
        # A preempted sequence waits for its token in flight, which is its next input.
        if seq is None or seq.num_in_flight or manager.must_wait_to_load(seq):
            return None
        if not manager.allocate(seq):
            return None
        _remove(self.waiting, seq)
        insort(self.running, seq, key=sort_key)
        seq.status = SequenceStatus.RUNNING
        seq.slot = self._free_slots.pop()
        seq.num_admissions += 1
        if seq.prompt_outputs is not None and seq.wants_prompt_outputs:
            seq.prompt_outputs.clear()
        if seq.num_cached_tokens is None:
            seq.metrics.queue_time = time.monotonic() - seq.metrics.arrival_time
            seq.num_cached_tokens = seq.num_computed_tokens
            self.stats.num_prompt_tokens += seq.num_prompt_tokens
            self.stats.num_cached_tokens += seq.num_cached_tokens
            num_matched = seq.num_branch_blocks * self.block_manager.block_size
            self._num_matched_tokens += max(num_matched, seq.num_cached_tokens)
        batch.new_requests.append(seq.new_request(with_tokens=self.steady.num_drafts > 0))
        return seq

    def _next_waiting(self) -> Sequence | None:
        """Return the next waiting sequence, except one whose state another sequence computes in this step."""
        manager = self.block_manager
        first = islice(self.waiting, _MOST_PASSED_OVER if manager.has_states else 1)
        return next((seq for seq in first if not manager.waits_for_state(seq)), None)

    def _schedule_chunk(self, seq: Sequence, batch: ScheduledBatch) -> None:
        start = seq.num_computed_tokens
        self.block_manager.own_states(seq)
        end = min(seq.num_tokens, start + self._budget)
        if end > self.block_manager.capacity(seq):
            # With a window, it has blocks for a part of its prompt.
            self.block_manager.extend_windows(seq)
            end = min(end, self.block_manager.capacity(seq))
            if end == start:
                return
        store = start >= max(seq.num_registered_blocks * self.block_manager.block_size, seq.num_shared_tokens)
        scores, pooling = seq.prompt_scores(start, end), seq.pooling_of(end)
        layers = tuple(seq.params.hidden_states or ()) if seq.wants_prompt_outputs else ()
        token_ids, samples = seq.token_ids[start:end], end == seq.num_tokens
        self._budget -= end - start
        seq.num_computed_tokens = end
        kept = self.block_manager.register_chunk(seq, start)
        successor = -1 if samples else seq.token_ids[end]
        batch.chunks.append(Chunk(seq.slot, start, token_ids, store, samples, scores, pooling, kept, successor, layers))
        num_outputs = (scores is not None) + (pooling is not None) + bool(layers)
        batch.scored_seq_ids += [(seq.seq_id, seq.num_admissions)] * num_outputs

    def _begin_steady(self, seq: Sequence, first_step: int) -> None:
        """Count the token that this step samples for a sequence that has caught up."""
        seq.num_tokens += 1
        if seq.num_tokens >= seq.most_tokens:
            self._end_by_count(seq)
        else:
            # No more blocks are given in this step. Another output of the request may yet share them.
            if not seq.siblings:
                self.block_manager.release_outside_window(seq)
            self.steady.add(seq, self.block_manager.capacity(seq), first_step)

    def _end_by_count(self, seq: Sequence) -> None:
        """Free the blocks and slot of a sequence whose last token is sampled in this step."""
        self.block_manager.register(seq)
        self._free(seq)
        seq.status = SequenceStatus.ENDING

    def _preempt(self, seq: Sequence) -> None:
        self._free(seq, is_preempted=True)
        seq.status = SequenceStatus.WAITING
        insort(self.waiting, seq, key=sort_key)
        self.stats.num_preemptions += 1

    def postprocess(self, batch: ScheduledBatch, output: StepOutput) -> StepChanges:
        """Add a step's tokens to their sequences, and finish sequences that end."""
        changes, now = StepChanges(batch.sampled_seq_ids, output.token_ids), time.monotonic()
        # Outputs' first tokens follow chunks.
        for seq_id in batch.sampled_seq_ids[len(batch.rows) :]:
            seq = self._sequences.get(seq_id)
            if seq is not None and seq.metrics.time_to_first_token is None:
                seq.metrics.time_to_first_token = now - seq.metrics.arrival_time
        if output.offsets is None:
            _take_logprobs(changes.seq_ids, batch, output, self._sequences)
            num_rows = len(batch.rows)
            attention = self.steady.take(batch.rows.slots, output.token_ids[:num_rows], batch.number)
            for index in [*attention, *range(num_rows, len(output.token_ids))]:
                self._take_tokens(batch.sampled_seq_ids[index], [int(output.token_ids[index])], 1, changes)
        else:
            self._take_ragged(batch, output, output.offsets, changes)
        if output.num_drafts is not None:
            chunks = np.array([chunk.slot for chunk in batch.chunks if chunk.samples], dtype=np.int32)
            slots = np.concatenate((batch.rows.slots, chunks))
            self.steady.note_drafts(slots, output.num_drafts, batch.number)
        self.stats.num_output_tokens += len(changes.token_ids) - len(changes.dropped)
        self.stats.num_clipped_kv = output.num_clipped_kv
        self.block_manager.confirm_step()
        return changes

    def _take_ragged(
        self, batch: ScheduledBatch, output: StepOutput, offsets: np.ndarray, changes: StepChanges
    ) -> None:
        """Process the tokens of a step with drafts, row by row; add the tokens that count to `changes`."""
        seq_ids, ends = batch.sampled_seq_ids, offsets.tolist()
        _take_logprobs(np.repeat(seq_ids, np.diff(offsets)).tolist(), batch, output, self._sequences)
        num_new = batch.rows.num_new.tolist() + [1] * (len(seq_ids) - len(batch.rows))
        changes.seq_ids, parts = [], [output.token_ids[:0]]
        for seq_id, planned, first, end in zip(seq_ids, num_new, ends, ends[1:], strict=False):
            count = self._take_tokens(seq_id, output.token_ids[first:end].tolist(), planned, changes)
            changes.seq_ids += [seq_id] * count
            parts.append(output.token_ids[first : first + count])
        changes.token_ids = np.concatenate(parts)
        changes.dropped.clear()

    def _take_tokens(self, seq_id: int, token_ids: list[int], num_new: int, changes: StepChanges) -> int:
        """Add the tokens of a row, planned to compute `num_new`, to its sequence; return the number that counts."""
        seq = self._sequences.get(seq_id)
        # An EOS is seen one step late: the token sampled after it is dropped.
        if seq is None:
            changes.dropped.add(seq_id)
            return 0
        if num_new > 1:
            self.steady.settle(seq, num_new, len(token_ids))
        for count, token_id in enumerate(token_ids, 1):
            seq.append(token_id)
            try:
                # Most sequences are not watched, and should not pay for a call.
                ends = self._watch(seq, token_id, changes) if seq.is_watched else token_id in seq.end_token_ids
            # The error fails only this sequence. A panic of a native library derives from BaseException.
            except BaseException as error:
                self.finish(seq, "abort")
                changes.failed.append((seq, error))
                return count
            if seq.status is SequenceStatus.ENDING:
                has_all = not seq.num_in_flight
            else:
                has_all = bool(self.steady.num_drafts) and len(seq.token_ids) >= seq.most_tokens
            if ends or has_all:
                self.finish(seq, "stop" if ends else "length")
                changes.finished.append(seq)
                return count
        if seq.status is SequenceStatus.RUNNING:
            self.block_manager.register(seq)
        return len(token_ids)

    def _watch(self, seq: Sequence, token_id: int, changes: StepChanges) -> bool:
        """Pass a token to the sequence's constraint, and report it; return whether the output ends with it."""
        is_end = token_id in seq.end_token_ids
        if is_end and token_id in (seq.params.stop_token_ids or ()):
            seq.stop_reason = token_id
        if seq.constraint is not None:
            seq.constraint.accept(token_id)
        if seq.request.reports_tokens:
            wants_record = seq.record_bytes and seq.request.is_streamed
            position = len(seq.token_ids) - seq.num_prompt_tokens - 1
            start = position * seq.record_bytes
            record = bytes(seq.logprobs[start : start + seq.record_bytes]) if wants_record else b""
            changes.new_tokens.append((seq.request_id, seq.index, position, token_id, is_end, record))
        return is_end

    def finish(self, seq: Sequence, reason: str) -> None:
        """End an unfinished sequence; reason: see `CompletionOutput`."""
        if seq.status is SequenceStatus.RUNNING:
            if reason != "abort":
                self.block_manager.register(seq)
            self._free(seq)
        elif seq.status is SequenceStatus.WAITING:
            if not _remove(self.waiting, seq):
                _remove(self._held, seq)
            self.block_manager.free(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        # Drop records of tokens after the last one.
        del seq.logprobs[(len(seq.token_ids) - seq.num_prompt_tokens) * seq.record_bytes :]
        # Siblings refer to one another, and would wait for the garbage collector.
        seq.siblings = ()
        seq.metrics.total_time = time.monotonic() - seq.metrics.arrival_time
        self._num_extra -= seq.has_extra
        del self._sequences[seq.seq_id]

    def abort(self, seq_ids: Iterable[int]) -> None:
        """Drop sequences at once. Their blocks are free: later writes come after any in flight."""
        for seq_id in seq_ids:
            seq = self._sequences.get(seq_id)
            if seq is not None:
                self.finish(seq, "abort")

    def find(self, seq_id: int) -> Sequence | None:
        """Return an unfinished sequence."""
        return self._sequences.get(seq_id)

    def fail_in_flight(self) -> list[Sequence]:
        """Drop every sequence in a step without a result, and all blocks that such steps registered."""
        waiting = SequenceStatus.WAITING
        # A waiting sequence has blocks if it could not be admitted because some could not be read.
        failed = [seq for seq in self.sequences if seq.status is not waiting or seq.num_in_flight or seq.block_tables]
        self.abort([seq.seq_id for seq in failed])
        self.block_manager.rollback()
        return failed

    def is_finished(self) -> bool:
        """Whether no sequence is left, waiting, running or with a token in flight."""
        return not self._sequences

    def is_drained(self) -> bool:
        """Whether all sequences left arrived after the queue was held."""
        return len(self._sequences) == len(self._held)

    def preempt_all(self) -> None:
        """Preempt all running sequences, which are computed again later."""
        for seq in list(reversed(self.running)):
            self._preempt(seq)

    @property
    def sequences(self) -> Reversible[Sequence]:
        """Every unfinished sequence, in the order of `add`."""
        return self._sequences.values()

    def counters(self) -> dict[str, Any]:
        """Return the stats, and the sequences and blocks in use now."""
        manager = self.block_manager
        counters = {
            **asdict(self.stats),
            "num_running": len(self.running),
            "num_waiting": len(self.waiting) + len(self._held),
            "num_used_blocks": manager.num_used_blocks,
            "num_free_blocks": manager.num_free_blocks,
            **({} if manager.host is None else manager.host.counters()),
        }
        if self.steady.num_drafts:
            verified, accepted = self.steady.num_verified.tolist(), self.steady.num_accepted.tolist()
            counters |= {"num_drafts": verified[0], "num_draft_tokens": sum(verified)}
            counters |= {"num_accepted_tokens": sum(accepted), "num_accepted_per_position": accepted}
        if manager.has_states:
            # Every running sequence has one.
            counters["num_used_states"] = len(self.running)
            counters["num_kept_states"] = manager.num_kept_states
            counters["num_matched_tokens"] = self._num_matched_tokens
        return counters

    def _free(self, seq: Sequence, is_preempted: bool = False) -> None:
        _remove(self.running, seq)
        self.steady.discard(seq)
        self.block_manager.free(seq, is_preempted)
        self._free_slots.append(seq.slot)
        seq.slot = -1


def _remove(queue: list[Sequence], seq: Sequence) -> bool:
    """Remove a sequence from a sorted list, and return whether it was there."""
    index = bisect_left(queue, seq.sort_key, key=sort_key)
    found = queue[index : index + 1] == [seq]
    del queue[index : index + found]
    return found


def _take_logprobs(
    seq_ids: list[int], batch: ScheduledBatch, output: StepOutput, sequences: Mapping[int, Sequence]
) -> None:
    """Give sequences their tokens' log-probabilities (`seq_ids` has one per token), and outputs of prompts' chunks."""
    if output.logprobs is not None:
        records = output.logprobs.records()
        packed, size = records.tobytes(), records[:1].nbytes
        for i, index in enumerate(output.logprob_rows):
            seq = sequences.get(seq_ids[index])
            if seq is not None:
                seq.logprobs += packed[i * size : i * size + seq.record_bytes]
    for (seq_id, num_admissions), item in zip(batch.scored_seq_ids, output.prompt_outputs, strict=True):
        seq = sequences.get(seq_id)
        # A preempted prompt is computed again from its start.
        if seq is not None and seq.num_admissions == num_admissions:
            assert seq.prompt_outputs is not None
            seq.prompt_outputs.append(item)
