"""Decides which sequences run in the next step, and how many tokens of each.

A step gives every running sequence its next token and fills what is left of one token budget with chunks of waiting
prompts, so that a long prompt stalls nobody (chunked prefill, Sarathi-Serve, Agrawal et al. 2024). When the cache is
full, the newest sequence loses its blocks and is computed again later (preemption by recomputation, vLLM, Kwon et al.
2023). Planning needs counts alone, never the values of tokens in flight, so a step can be planned while the one
before it still runs.

Running and waiting sequences are ordered by `Sequence.sort_key`: by priority, then by arrival. The last running one is
the one to preempt. The first is preempted only for a waiting one of higher priority, so that one always makes progress.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Iterable, Reversible
from dataclasses import asdict, dataclass, field
from itertools import islice
from operator import attrgetter

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.decode_rows import DecodeRows
from nanovllm.engine.engine_outputs import StreamedToken
from nanovllm.engine.request_messages import new_request, pooling_of, prompt_scores, take_in_logprobs
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.waiting_queue import WaitingQueue
from nanovllm.runner.messages import PromptChunk, ScheduledBatch, StepOutput

_sort_key = attrgetter("sort_key")


@dataclass
class StepChanges:
    """Lists the sequences that a step's tokens have changed.

    Attributes:
        finished: sequences that are complete.
        failed: sequences whose constraint has raised, and what; they are gone.
        dropped: ids of those that had ended before their token came.
        new_tokens: of requests that report them.
    """

    finished: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, BaseException]] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    new_tokens: list[StreamedToken] = field(default_factory=list)


@dataclass
class SchedulerStats:
    """Counts since the scheduler began. Prompt and cached tokens count once a request, when it is first admitted.

    Of clipped keys and values see `StepOutput`.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_clipped_kv: int = 0


class Scheduler:
    """Owns every unfinished sequence, from `add` to the step that finishes it.

    Args:
        block_manager: gives sequences their blocks.
        max_num_running: sequences that may run at once, and so the number of slots.
        max_num_batched_tokens: tokens of one step.
        max_model_len: tokens of one sequence.
        eos_token_ids: tokens that end an output, unless its request ignores them.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_running: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        # Every running sequence must get its next token within the budget of one step.
        assert max_num_running <= max_num_batched_tokens
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.waiting = WaitingQueue()
        # Sorted; there are no more than slots.
        self.running: list[Sequence] = []
        # The running sequences whose prompts are planned.
        self.decoding = DecodeRows(max_num_running, block_manager.block_size)
        self.stats = SchedulerStats()
        self._free_slots = list(reversed(range(max_num_running)))
        self._sequences: dict[int, Sequence] = {}
        # Tokens that the step being planned has room for.
        self._budget = 0
        # Admitted sequences whose prompts are not all planned: those that load blocks, then one of which a part is. No
        # other is admitted before the rest is.
        self._prefilling: list[Sequence] = []
        # Unfinished sequences that are sampled by more than a temperature.
        self._num_extra = 0

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self._sequences[seq.seq_id] = seq
        seq.end_token_ids = frozenset() if seq.params.ignore_eos else self.eos_token_ids
        if seq.params.stop_token_ids:
            seq.end_token_ids = seq.end_token_ids.union(seq.params.stop_token_ids)
        self._num_extra += seq.has_extra
        self.waiting.add_new(seq)

    def schedule(self) -> ScheduledBatch | None:
        """Plan one step; None if nothing can run now.

        Preemption is settled (by priorities and the decode rows) before any block of the step is registered (by the
        chunks).
        """
        if not self.waiting and not self.running:
            return None
        self._preempt_for_priority()
        batch = ScheduledBatch(self.stats.num_steps + 1)
        self._budget = self.max_num_batched_tokens
        self.block_manager.begin_step()
        ending = self._schedule_decodes(batch)
        prefilled = self._schedule_chunks(batch)
        if not len(batch.decode_slots) and not batch.chunks:
            self.block_manager.cancel_step()
            return None
        self.stats.num_steps = batch.number
        batch.sampled_seq_ids += [seq.seq_id for seq in prefilled]
        if self._num_extra:
            planned = [*self.decoding.seqs, *prefilled]
            batch.has_extra = any(seq.has_extra for seq in planned)
            batch.masked = [i for i, seq in enumerate(planned) if seq.constraint is not None]
        for seq in ending:
            self._end_by_count(seq)
        for seq in prefilled:
            self._begin_decoding(seq, batch.number + 1)
        if self.block_manager.loads:
            batch.transfers += self.block_manager.loads.take()
        batch.transfers += self.block_manager.plan_saves(self.running, batch.num_prompt_tokens)
        return batch

    def _preempt_for_priority(self) -> None:
        """Preempt the last running sequences for waiting ones of higher priority that lack a slot or blocks.

        Preempts at most one sequence for each waiting one that fits into this step's token budget. Blocks are checked
        for the first waiting one only, since the others may share its prefix; a long prompt gets the blocks of several
        sequences in successive steps.
        """
        budget = self.max_num_batched_tokens - len(self.decoding)
        for index, seq in enumerate(self._outranking()):
            budget -= 0 if index else self._num_begun_tokens(seq.priority)
            # A preempted sequence waits for its token in flight. At 0, the preempted row's own token is left.
            if budget < 0 or seq.num_in_flight or not self.running or seq.priority >= self.running[-1].priority:
                return
            lacks_blocks = not index and self.block_manager.num_missing_blocks(seq) > 0
            if lacks_blocks or len(self._free_slots) <= index:
                self._preempt(self.running[-1])
            budget -= seq.num_tokens

    def _num_begun_tokens(self, priority: int) -> int:
        """Return the tokens left to prefill of admitted prompts with at least this priority."""
        begun = [seq for seq in self._prefilling if seq.status is SequenceStatus.RUNNING and seq.priority <= priority]
        return sum([seq.num_prefill_tokens - seq.num_computed_tokens for seq in begun])

    def _outranking(self) -> list[Sequence]:
        """Return waiting sequences in order if the first outranks the last running one; at most one per running one."""
        first = self.waiting.first()
        # The usual case must cost nothing.
        if first is None or not self.running or first.priority >= self.running[-1].priority:
            return []
        return list(islice(self.waiting.in_order(), len(self.running)))

    def _schedule_decodes(self, batch: ScheduledBatch) -> list[Sequence]:
        """Plan a token for every sequence that decodes; return those that end with it."""
        for seq in self.decoding.without_room():
            self._make_room(seq, batch)
        ending = self.decoding.plan()
        batch.decode_slots = self.decoding.slots
        batch.sampled_seq_ids = self.decoding.seq_ids
        self._budget -= len(self.decoding)
        return ending

    def _make_room(self, seq: Sequence, batch: ScheduledBatch) -> None:
        """Give a running sequence the blocks its next token needs, if need be from the newest one, or none of them."""
        if seq.status is not SequenceStatus.RUNNING:
            return
        manager = self.block_manager
        manager.release_outside_window(seq)
        while groups := manager.lacking_groups(seq):
            if manager.num_free_blocks < len(groups):
                # Those already in the batch come before this one, so the last is never one of them.
                self._preempt(last := self.running[-1])
                if last is seq:
                    return
            else:
                new, copies = manager.give_blocks(seq, groups)
                batch.new_blocks += new
                batch.transfers += copies
        self.decoding.note_blocks(seq)

    def _schedule_chunks(self, batch: ScheduledBatch) -> list[Sequence]:
        """Plan chunks of admitted and waiting prompts; return the sequences whose prompts end with them.

        A prompt some of whose blocks this step loads from the host's memory gets its first chunk one
        step later, so that other rows do not wait for the copies. If there are no others, the step itself waits for its
        loads, on the device, and computes these prompts.
        """
        before = [seq for seq in self._prefilling if seq.status is SequenceStatus.RUNNING and seq.is_prefill]
        loading: list[Sequence] = []
        planned = self._schedule_prompts(before, loading, batch)
        if loading and not batch.chunks and not len(batch.decode_slots):
            batch.waits_for_loads = True
            batch.transfers += self.block_manager.loads.take()
            first, loading = loading, []
            planned = self._schedule_prompts(first, loading, batch)
        self._prefilling = loading + self._prefilling
        return planned

    def _schedule_prompts(
        self, prefilling: list[Sequence], loading: list[Sequence], batch: ScheduledBatch
    ) -> list[Sequence]:
        """Plan chunks of admitted prompts, then of waiting ones, while there is budget; see `_schedule_chunks`.

        The next step, in which others have their next tokens, waits for what this one loads. Once that is more than the
        link copies in a small step, whoever would load more is admitted in the next one.

        Args:
            prefilling: the admitted ones; what is left of them is in `_prefilling` afterwards.
            loading: takes those that wait for blocks.
            batch: takes the chunks.
        """
        planned = []
        while self._budget and (seq := prefilling.pop(0) if prefilling else self._admit(batch)) is not None:
            if self.block_manager.loads.has_blocks_of(seq):
                loading.append(seq)
                continue
            self._schedule_chunk(seq, batch)
            if seq.is_prefill:
                prefilling.insert(0, seq)
                break
            planned.append(seq)
        self._prefilling = prefilling
        return planned

    def _admit(self, batch: ScheduledBatch) -> Sequence | None:
        """Move the head of the queue to the running, if budget, slots, blocks and what is to be loaded allow."""
        seq, manager = self.waiting.first() if self._free_slots and self._budget else None, self.block_manager
        # A preempted sequence waits for its token in flight, which it will need as input.
        if seq is None or seq.num_in_flight or manager.must_wait_to_load(seq, batch.waits_for_loads):
            return None
        if not manager.allocate(seq):
            return None
        self.waiting.remove(seq)
        insort(self.running, seq, key=_sort_key)
        seq.status = SequenceStatus.RUNNING
        seq.slot = self._free_slots.pop()
        seq.num_prefill_tokens = seq.num_tokens
        seq.num_admissions += 1
        if seq.prompt_outputs is not None and seq.wants_prompt_outputs:
            seq.prompt_outputs.clear()
        if seq.num_cached_tokens is None:
            seq.metrics.queue_time = time.monotonic() - seq.metrics.arrival_time
            seq.num_cached_tokens = seq.num_computed_tokens
            self.stats.num_prompt_tokens += seq.num_prompt_tokens
            self.stats.num_cached_tokens += seq.num_cached_tokens
        batch.new_requests.append(new_request(seq))
        return seq

    def _schedule_chunk(self, seq: Sequence, batch: ScheduledBatch) -> None:
        start = seq.num_computed_tokens
        end = min(seq.num_prefill_tokens, start + self._budget)
        if end > seq.num_blocks * self.block_manager.block_size:
            # With a window, it has blocks for a part of its prompt.
            batch.new_blocks += self.block_manager.extend(seq)
            end = min(end, seq.num_blocks * self.block_manager.block_size)
            if end == start:
                return
        store = start >= max(seq.num_registered_blocks * self.block_manager.block_size, seq.num_shared_tokens)
        ends_prompt = end == seq.num_prefill_tokens
        scores, pooling = prompt_scores(seq, start, end), pooling_of(seq, end)
        if scores is not None or pooling is not None:
            batch.scored_seq_ids.append((seq.seq_id, seq.num_admissions))
        token_ids = seq.token_ids[start:end]
        batch.chunks.append(PromptChunk(seq.slot, start, token_ids, store, ends_prompt, scores, pooling))
        self._budget -= end - start
        seq.num_computed_tokens = end
        self.block_manager.register(seq)

    def _begin_decoding(self, seq: Sequence, first_step: int) -> None:
        """Count the token that this step samples after a prompt."""
        most_tokens = self.max_model_len
        if seq.max_tokens is not None:
            most_tokens = min(most_tokens, seq.num_prompt_tokens + seq.max_tokens)
        seq.num_tokens += 1
        if seq.num_tokens >= most_tokens:
            self._end_by_count(seq)
        else:
            # Nothing more is given in this step. Another output of the request may yet share them.
            if not seq.siblings:
                self.block_manager.release_outside_window(seq)
            self.decoding.add(seq, most_tokens, first_step)

    def _end_by_count(self, seq: Sequence) -> None:
        """Free what a sequence holds; its last token is sampled in this step."""
        self.block_manager.register(seq)
        self._free(seq)
        seq.status = SequenceStatus.ENDING

    def _preempt(self, seq: Sequence) -> None:
        self._free(seq, is_preempted=True)
        seq.status = SequenceStatus.WAITING
        self.waiting.add(seq)
        self.stats.num_preemptions += 1

    def postprocess(self, batch: ScheduledBatch, output: StepOutput) -> StepChanges:
        """Take in a step's tokens."""
        changes, num_decodes = StepChanges(), len(batch.decode_slots)
        self._note_first_tokens(batch)
        take_in_logprobs(batch, output, self._sequences)
        affected = self.decoding.take(batch.decode_slots, output.token_ids[:num_decodes], batch.number)
        for index in [*affected, *range(num_decodes, len(output.token_ids))]:
            self._take_token(batch.sampled_seq_ids[index], int(output.token_ids[index]), changes)
        self.stats.num_output_tokens += len(output.token_ids) - len(changes.dropped)
        self.stats.num_clipped_kv = output.num_clipped_kv
        self.block_manager.confirm_step()
        return changes

    def _take_token(self, seq_id: int, token_id: int, changes: StepChanges) -> None:
        """Take in the token of one sequence."""
        seq = self._sequences.get(seq_id)
        # An EOS is seen one step late: the token sampled after it is dropped.
        if seq is None:
            changes.dropped.add(seq_id)
            return
        seq.append(token_id)
        try:
            # Most sequences are not watched, and need not pay for a call.
            ends = self._watch(seq, token_id, changes) if seq.is_watched else token_id in seq.end_token_ids
        # The error fails this sequence alone. A panic of a native library derives from BaseException.
        except BaseException as error:
            self._finish(seq, "abort")
            changes.failed.append((seq, error))
            return
        if ends:
            self._finish(seq, "stop")
            changes.finished.append(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self.block_manager.register(seq)
        elif seq.status is SequenceStatus.ENDING and not seq.num_in_flight:
            self._finish(seq, "length")
            changes.finished.append(seq)

    def _watch(self, seq: Sequence, token_id: int, changes: StepChanges) -> bool:
        """Pass a token to the sequence's constraint, and report it; returns whether the output ends with it."""
        is_end = token_id in seq.end_token_ids
        if is_end and token_id in (seq.params.stop_token_ids or ()):
            seq.stop_reason = token_id
        if seq.constraint is not None:
            seq.constraint.accept(token_id)
        if seq.request.reports_tokens:
            wants_record = seq.record_bytes and seq.request.is_streamed
            record = bytes(seq.logprobs[-seq.record_bytes :]) if wants_record else b""
            changes.new_tokens.append(StreamedToken(seq.request_id, seq.index, token_id, is_end, record))
        return is_end

    def _note_first_tokens(self, batch: ScheduledBatch) -> None:
        """Take the time of the first tokens of outputs, which come at the ends of prompts."""
        now = time.monotonic()
        for seq_id in batch.sampled_seq_ids[len(batch.decode_slots) :]:
            seq = self._sequences.get(seq_id)
            if seq is not None and seq.metrics.time_to_first_token is None:
                seq.metrics.time_to_first_token = now - seq.metrics.arrival_time

    def stop(self, seq: Sequence) -> None:
        """End an unfinished sequence whose text is complete."""
        self._finish(seq, "stop")

    def abort(self, seq_ids: Iterable[int]) -> None:
        """Drop sequences where they stand. Their blocks are free at once: later writes come after those in flight."""
        for seq_id in seq_ids:
            seq = self._sequences.get(seq_id)
            if seq is not None:
                self._finish(seq, "abort")

    def find(self, seq_id: int) -> Sequence | None:
        """Return an unfinished sequence."""
        return self._sequences.get(seq_id)

    def fail_in_flight(self) -> list[Sequence]:
        """Drop every sequence in a step that has no result yet, and all that such steps put into the prefix cache."""
        waiting = SequenceStatus.WAITING
        # What waits has blocks if it could not be admitted because some of them could not be read.
        failed = [seq for seq in self.sequences if seq.status is not waiting or seq.num_in_flight or seq.block_tables]
        self.abort([seq.seq_id for seq in failed])
        self.block_manager.rollback()
        return failed

    def is_finished(self) -> bool:
        """Whether no sequence is left, waiting, running or with a token in flight."""
        return not self._sequences

    def is_drained(self) -> bool:
        """Whether no sequence is left but those that came since the queue was held; see `WaitingQueue.hold_new`."""
        return len(self._sequences) == self.waiting.num_held

    def preempt_all(self) -> None:
        """Take their blocks from all running sequences, which are computed again."""
        for seq in list(reversed(self.running)):
            self._preempt(seq)

    @property
    def sequences(self) -> Reversible[Sequence]:
        """Every unfinished sequence, in the order of `add`."""
        return self._sequences.values()

    def counters(self) -> dict[str, int]:
        """Return the stats, and how many sequences and blocks are in use now."""
        return {
            **asdict(self.stats),
            "num_running": len(self.running),
            "num_waiting": len(self.waiting),
            "num_used_blocks": self.block_manager.num_used_blocks,
            "num_free_blocks": self.block_manager.num_free_blocks,
            **({} if self.block_manager.host is None else self.block_manager.host.counters()),
        }

    def _finish(self, seq: Sequence, reason: str) -> None:
        if seq.status is SequenceStatus.RUNNING:
            if reason != "abort":
                self.block_manager.register(seq)
            self._free(seq)
        elif seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
            self.block_manager.free(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        # They refer to one another, and would wait for the garbage collector.
        seq.siblings = ()
        seq.metrics.total_time = time.monotonic() - seq.metrics.arrival_time
        self._num_extra -= seq.has_extra
        del self._sequences[seq.seq_id]

    def _free(self, seq: Sequence, is_preempted: bool = False) -> None:
        """Take a running sequence's blocks and its slot."""
        del self.running[bisect_left(self.running, seq.sort_key, key=_sort_key)]
        self.decoding.discard(seq)
        self.block_manager.free(seq, is_preempted)
        self._free_slots.append(seq.slot)
        seq.slot = -1
