"""A runner whose model is a hash of what the cache says the context is.

Every block it is told of holds token ids, written and read as a real runner writes and reads keys. A token that comes
out right therefore shows that each page was the right one, at the right time, with the right content.
"""

from __future__ import annotations

import random
import signal
import zlib
from array import array
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import MakeConstraint, Request, no_constraint
from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.runner.messages import (
    NO_DRAFTS,
    BlockTransfer,
    CacheKind,
    DraftCosts,
    HostMemory,
    KeptState,
    PagedCache,
    Rows,
    ScheduledBatch,
    StateCache,
    StepOutput,
    TokenLogprobs,
)
from tests.cache_checks import check_blocks

VOCAB_SIZE = 50
EMPTY = -1


def next_token(context: list[int]) -> int:
    """The mock model."""
    return zlib.crc32(array("i", context).tobytes()) % VOCAB_SIZE


def state_after(state: int, tokens: Sequence[int], part: int) -> int:
    """The mock model's recurrent layer: a running hash."""
    for token in tokens:
        state = zlib.crc32(array("q", [state, token, part]).tobytes())
    return state


def complete(
    prompt: list[int],
    max_tokens: int,
    eos: frozenset[int],
    max_model_len: int,
    *windows: int | None,
    states: Sequence[int] = (),
) -> list[int]:
    """Return what the mock model generates, without an engine.

    Args:
        windows: of each group of layers.
        states: blocks of each kind of state.
    """
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens and (len(tokens) < max_model_len or len(tokens) == len(prompt)):
        seen = [token for window in windows or (None,) for token in tokens[-(window or 0) :]]
        hashes = [state_after(0, tokens, part) for num_blocks in states for part in range(num_blocks)]
        tokens.append(next_token([*seen, *(state % VOCAB_SIZE for state in hashes)]))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


@dataclass
class MockHandle:
    token_ids: list[int]
    error: BaseException | None = None
    logprob_rows: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    prompt_outputs: list[TokenLogprobs | np.ndarray] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)
    offsets: np.ndarray | None = None

    def result(self) -> StepOutput:
        if self.error is not None:
            raise self.error
        return StepOutput(
            np.array(self.token_ids, dtype=np.int64),
            self.logprob_rows,
            self.logprobs,
            self.prompt_outputs,
            offsets=self.offsets,
        )


def window_kinds(*windows: int | None) -> list[CacheKind]:
    """Kinds of caches by the tokens that layers see at most; None if they see all."""
    return [PagedCache(window) for window in windows]


def slot_rows(*slots: int) -> Rows:
    """A row of one token for each slot."""
    return Rows.of_one_token(np.array(slots, dtype=np.int32))


def mock_logprobs(token_ids: Sequence[int], num_logprobs: int) -> TokenLogprobs:
    """Return the mock model's log-probabilities: a number that follows from each token, and the ids after it."""
    ids = np.array(token_ids).reshape(-1, 1) + np.arange(num_logprobs + 1)
    return TokenLogprobs(-(ids + 1) / 64, ids, np.array(token_ids) + 1)


def mock_pooling(token_ids: Sequence[int]) -> np.ndarray:
    """Hidden states of one element each, added up."""
    return np.array([sum(token_ids)], dtype=np.float32)


def mock_hidden_states(token_ids: Sequence[int], layers: Sequence[int]) -> np.ndarray:
    """Return the mock model's hidden states, [num_layers, num_tokens, 1]."""
    return np.array([[[token + layer] for token in token_ids] for layer in layers], dtype=np.float32)


class LateCopies:
    """Copies to the host's memory and back, which end later, in their order, at times that `rng` decides."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        # With the number of the step that queued each.
        self.queue: list[tuple[int, BlockTransfer]] = []

    def loading(self) -> set[int]:
        return {move.destination for _, move in self.queue if move.kind == "load"}

    def saving(self) -> set[int]:
        return {move.source for _, move in self.queue if move.kind == "save"}

    def ending(self, count: int) -> list[BlockTransfer]:
        """Take the first ones, which end now."""
        ended, self.queue = self.queue[:count], self.queue[count:]
        return [move for _, move in ended]

    def at_begin(self, batch: ScheduledBatch) -> list[BlockTransfer]:
        """Take the copies that end before a step, including all that it waits for."""
        given, count = batch.given_blocks, self.rng.randint(0, len(self.queue))
        for index, (number, move) in enumerate(self.queue, 1):
            assert number < batch.number
            if move.kind == "load" or move.source in given:
                count = max(count, index)
        return self.ending(count)

    def loads(self) -> list[BlockTransfer]:
        """Take all copies up to the last load."""
        return self.ending(max((i for i, (_, move) in enumerate(self.queue, 1) if move.kind == "load"), default=0))


class MockRunner:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        pipeline_depth: int,
        windows: list[int | None] | None = None,
        num_host_slots: int = 0,
        copy_seed: int = 0,
        *,
        num_drafts: int = 0,
        draft_ratio: float = 1.0,
        states: Sequence[StateCache] = (),
    ) -> None:
        self.num_kvcache_blocks = num_blocks
        self.num_drafts, self.draft_costs = num_drafts, NO_DRAFTS
        if num_drafts:
            self.draft_costs = DraftCosts((max(1, num_slots - 1),), (draft_ratio,))
        # Decides which drafts are right, most of them.
        self.draft_rng, self.share_right = random.Random(copy_seed), 0.7
        # Slots in the host's memory that can be saved to, and how many there will be.
        self.num_ready_slots, self.most_ready_slots = 0, num_host_slots
        self.host_memory: HostMemory | None = None
        if num_host_slots:
            # A step may load and save any number.
            self.host_memory = HostMemory(
                num_host_slots, lambda: self.num_ready_slots, lambda: self.num_ready_slots == self.most_ready_slots,
                block_bytes=1,
            )  # fmt: skip
        self.copies = LateCopies(random.Random(copy_seed))
        self.block_size = block_size
        self.pipeline_depth = pipeline_depth
        self.windows: list[int | None] = windows or [None]
        # Each block of a state holds a hash of the tokens so far.
        self.states: list[CacheKind] = list(states)
        self.cache_kinds = [*window_kinds(*self.windows), *self.states]
        # Numbers that every token follows from.
        self.weights: list[int] = []
        # The tokens of a page, or of a state: its group, its part, tokens computed and their hash.
        self.cache: list[list[int] | tuple[int, ...]] = []
        self.clear_cache()
        self.host: dict[int, list[int] | tuple[int, ...]] = {}
        # By slot and group.
        self.tables: list[list[list[int]]] = [[] for _ in range(num_slots)]
        self.last_token = [EMPTY] * num_slots
        self.num_computed = [0] * num_slots
        # With drafts, a state is stored one step late: the tokens that it lacks.
        self.pending: list[list[int]] = [[] for _ in range(num_slots)]
        # The slots whose prompts are not all computed, which may be given blocks a step before they use them.
        self.prefilling: set[int] = set()
        # Of the slots that ask for log-probabilities.
        self.num_logprobs: dict[int, int] = {}
        self.batches: list[ScheduledBatch] = []
        self.fail_launch = False
        self.fail_result = False
        self.interrupt = False
        self.closed = 0

    def clear_cache(self) -> None:
        """Make all blocks empty."""
        self.cache = [[EMPTY] * self.block_size for _ in range(self.num_kvcache_blocks)]

    def sample(self, step: MockHandle, masks: np.ndarray | None = None) -> MockHandle:
        shape = None if masks is None else masks.shape
        assert shape == ((len(step.masked), -(-VOCAB_SIZE // 32)) if step.masked else None)
        return step

    def forward(self, batch: ScheduledBatch) -> MockHandle:
        handle = self._run(batch)
        handle.masked = batch.masked
        return handle

    def _run(self, batch: ScheduledBatch) -> MockHandle:
        if self.fail_launch:
            self.fail_launch = False
            raise RuntimeError("launch failed")
        if self.interrupt:
            self.interrupt = False
            signal.raise_signal(signal.SIGINT)
        self.batches.append(batch)
        self._check_new_blocks(batch)
        transfers = self._update_slots(batch)
        # All keys of a step are stored before any is read.
        for slot in batch.rows.slots:
            self._store(slot, self.num_computed[slot], self.last_token[slot])
        for chunk in batch.chunks:
            assert len(chunk.token_ids)
            for position, token in enumerate(chunk.token_ids, chunk.start):
                if chunk.store:
                    self._store(chunk.slot, position, token)
                else:
                    loaded = {self._load(chunk.slot, position, group) for group in range(len(self.windows))}
                    assert loaded == {token}, "what is not stored must be there"
        sampled: list[list[int]] = []
        rows = list(zip(batch.rows.slots.tolist(), batch.rows.num_new.tolist(), strict=True))
        if any(num_new > 1 for _, num_new in rows):
            assert self.batches[-2].drafts
        for slot, num_new in rows:
            assert 1 <= num_new <= 1 + self.num_drafts
            sampled.append(self._run_row(slot, num_new))
        for chunk in batch.chunks:
            # Its first token sees what was stored before.
            self._context(chunk.slot, chunk.start + 1)
            self._advance(chunk.slot, chunk.start, chunk.token_ids, chunk.kept_states)
            self.num_computed[chunk.slot] = chunk.start + len(chunk.token_ids)
            if chunk.samples:
                self.prefilling.discard(chunk.slot)
                sampled.append([self._sample(chunk.slot)])
        assert len(sampled) == len(batch.sampled_seq_ids)
        assert len(batch.rows) <= max(self.draft_costs.rows, default=0) or not batch.drafts
        if self.fail_result:
            self.fail_result = False
            self._lose_written(batch, transfers)
            return MockHandle([], RuntimeError("step failed"))
        slots = batch.rows.slots.tolist() + [chunk.slot for chunk in batch.chunks if chunk.samples]
        slots = [slot for slot, tokens in zip(slots, sampled, strict=True) for _ in tokens]
        tokens = [token for row in sampled for token in row]
        handle = MockHandle(tokens, prompt_outputs=self._prompt_outputs(batch))
        if (batch.rows.num_new > 1).any():
            handle.offsets = np.cumsum([0, *map(len, sampled)])
        handle.logprob_rows = [index for index, slot in enumerate(slots) if slot in self.num_logprobs]
        if handle.logprob_rows:
            most = max(self.num_logprobs[slots[index]] for index in handle.logprob_rows)
            handle.logprobs = mock_logprobs([tokens[index] for index in handle.logprob_rows], most)
        return handle

    def _lose_written(self, batch: ScheduledBatch, transfers: list[BlockTransfer]) -> None:
        """A step that failed may have left anything in the blocks that it was to write."""
        for slot in batch.rows.slots:
            self._store(slot, self.num_computed[slot] - 1, EMPTY)
        slots = [*batch.rows.slots, *(chunk.slot for chunk in batch.chunks)]
        blocks = [block for slot in slots for table in self.tables[slot][len(self.windows) :] for block in table]
        blocks += [block for chunk in batch.chunks for kept in chunk.kept_states for block in kept.block_ids]
        blocks += [transfer.destination for transfer in transfers]
        for block in blocks:
            self.cache[block] = [EMPTY] * self.block_size
        for chunk in batch.chunks:
            for position in range(chunk.start, chunk.start + len(chunk.token_ids)) if chunk.store else ():
                self._store(chunk.slot, position, EMPTY)

    def _update_slots(self, batch: ScheduledBatch) -> list[BlockTransfer]:
        """Apply new requests, blocks and copies, which are returned."""
        for request in batch.new_requests:
            self.prefilling.add(request.slot)
            self.tables[request.slot] = [list(table) for table in request.block_tables]
            self.pending[request.slot] = []
            self.num_logprobs.pop(request.slot, None)
            if request.extra is not None and request.extra.params.logprobs is not None:
                self.num_logprobs[request.slot] = request.extra.params.logprobs
        transfers = self._transfer(batch)
        for new in batch.new_blocks:
            table = self.tables[new.slot][new.group]
            if new.index < len(table):
                assert BlockTransfer("copy", table[new.index], new.block_id) in batch.transfers
                table[new.index] = new.block_id
            else:
                assert new.index == len(table)
                table.append(new.block_id)
        return transfers

    def _run_row(self, slot: int, num_new: int) -> list[int]:
        """Compute a row's newest token, and drafts up to the first wrong one, whose keys are stored all the same."""
        pending, self.pending[slot] = self.pending[slot], [self.last_token[slot]]
        if pending:
            self._advance(slot, self.num_computed[slot] - len(pending), pending)
        if not self.num_drafts:
            self._advance(slot, self.num_computed[slot], self.pending[slot])
            self.pending[slot] = []
        tokens: list[int] = []
        while True:
            self.num_computed[slot] += 1
            tokens.append(self._sample(slot))
            if len(tokens) == num_new:
                return tokens
            position, is_right = self.num_computed[slot], self.draft_rng.random() < self.share_right
            if not is_right:
                for ahead in range(num_new - len(tokens)):
                    self._store(slot, position + ahead, self.draft_rng.randrange(VOCAB_SIZE))
                return tokens
            self._store(slot, position, tokens[-1])
            self.pending[slot].append(tokens[-1])

    def _check_new_blocks(self, batch: ScheduledBatch) -> None:
        """Assert that blocks are given to running requests alone, and to none that comes with its block tables."""
        running = {*batch.rows.slots.tolist(), *(chunk.slot for chunk in batch.chunks), *self.prefilling}
        running -= {request.slot for request in batch.new_requests}
        assert {new.slot for new in batch.new_blocks} <= running, "a block for a request that does not run"
        kept = {block for chunk in batch.chunks for state in chunk.kept_states for block in state.block_ids}
        assert kept.isdisjoint(new.block_id for new in batch.new_blocks), "a kept state's block is given away"
        starts = {chunk.slot: chunk.start for chunk in batch.chunks}
        for request in batch.new_requests:
            for window, table in zip_longest(self.windows, request.block_tables):
                # What lies before a window is read no more, and may be free again.
                first = max(0, starts.get(request.slot, 0) - window + 1) // self.block_size if window else 0
                assert kept.isdisjoint(table[first:]), "a kept state's block is given away"

    def _prompt_outputs(self, batch: ScheduledBatch) -> list[TokenLogprobs | np.ndarray]:
        outputs: list[TokenLogprobs | np.ndarray] = []
        for chunk in batch.chunks:
            if chunk.scores is not None:
                first = chunk.start + chunk.scores.first
                # The chunk may end before the last token that is scored.
                inside = [self._load(chunk.slot, p + 1) for p in range(first, chunk.start + len(chunk.token_ids) - 1)]
                assert inside == list(chunk.scores.token_ids)[: len(inside)]
                outputs.append(mock_logprobs(chunk.scores.token_ids, chunk.scores.num_logprobs))
            if chunk.pooling is not None:
                outputs.append(mock_pooling(chunk.token_ids if chunk.pooling == "mean" else chunk.token_ids[-1:]))
            if chunk.hidden_states:
                outputs.append(mock_hidden_states(chunk.token_ids, chunk.hidden_states))
        assert len(outputs) == len(batch.scored_seq_ids)
        return outputs

    def _transfer(self, batch: ScheduledBatch) -> list[BlockTransfer]:
        """Queue loads and saves, which end later, and return the copies, which are made."""
        self._end_copies(self.copies.at_begin(batch))
        transfers = [move for move in batch.transfers if move.kind == "copy"]
        contents = [copy(self.cache[move.source]) for move in transfers]
        for transfer, content in zip(transfers, contents, strict=True):
            assert transfer.destination not in self.copies.saving() | self.copies.loading()
            self.cache[transfer.destination] = content
        moves = [move for move in batch.transfers if move.kind != "copy"]
        assert [move.kind for move in moves] == sorted(move.kind for move in moves), "loads come before saves"
        self.copies.queue += [(batch.number, move) for move in moves]
        if batch.waits_for_loads:
            self._end_copies(self.copies.loads())
        self.num_ready_slots = min(self.most_ready_slots, self.num_ready_slots + self.copies.rng.randint(0, 4))
        return transfers

    def _end_copies(self, moves: list[BlockTransfer]) -> None:
        for move in moves:
            if move.kind == "load":
                assert EMPTY not in self.host[move.source], "what is loaded must have been saved"
                self.cache[move.destination] = copy(self.host[move.source])
            else:
                assert EMPTY not in self.cache[move.source], "what is saved must have been computed"
                self.host[move.destination] = copy(self.cache[move.source])

    def synchronize(self) -> None:
        self._end_copies(self.copies.ending(len(self.copies.queue)))

    def exit(self) -> None:
        self.closed += 1

    def _store(self, slot: int, position: int, token: int) -> None:
        for group, table in enumerate(self.tables[slot][: len(self.windows)]):
            block = table[position // self.block_size]
            self._check_no_copy(block)
            # Layers of one group cannot read what another group's have stored.
            if isinstance(page := self.cache[block], tuple):
                page = self.cache[block] = [EMPTY] * self.block_size
            page[position % self.block_size] = EMPTY if token == EMPTY else token + group * VOCAB_SIZE

    def _check_no_copy(self, block: int) -> None:
        if self.copies.queue:
            assert block not in self.copies.saving() | self.copies.loading(), "a copy needs the block"

    def _load(self, slot: int, position: int, group: int = 0) -> int:
        block = self.tables[slot][group][position // self.block_size]
        if self.copies.queue:
            assert block not in self.copies.loading(), "the block is not there yet"
        page = self.cache[block]
        assert isinstance(page, list), "the block has a state"
        stored = page[position % self.block_size]
        assert stored // VOCAB_SIZE == group, "the block is empty, or another group's"
        return stored % VOCAB_SIZE

    def _context(self, slot: int, end: int) -> list[int]:
        """Return the tokens that each group's layers see before `end`; all groups must see the same ones."""
        first = [max(0, end - (window or end)) for window in self.windows]
        seen = [[self._load(slot, p, group) for p in range(first[group], end)] for group in range(len(first))]
        longest = max(seen, key=len)
        assert all(longest[len(longest) - len(tokens) :] == tokens for tokens in seen)
        return [token for tokens in seen for token in tokens]

    def _advance(self, slot: int, start: int, token_ids: Sequence[int], kept_states: Sequence[KeptState] = ()) -> None:
        """Read the states of a slot, unless it begins, and overwrite them; keep some on the way."""
        kept = {state.num_tokens: iter(state.block_ids) for state in kept_states}
        for group, table in enumerate(self.tables[slot][len(self.windows) :]):
            for part, block in enumerate(table):
                self._check_no_copy(block)
                state = 0
                if start:
                    *kind, state = self.cache[block]
                    assert kind == [group, part, start], f"{kind} of {block}, not {[group, part, start]}"
                for end, others in kept.items():
                    assert start < end < start + len(token_ids)
                    self._check_no_copy(other := next(others))
                    self.cache[other] = group, part, end, state_after(state, token_ids[: end - start], part)
                self.cache[block] = group, part, start + len(token_ids), state_after(state, token_ids, part)

    def _states(self, slot: int) -> list[int]:
        tables, pending = self.tables[slot][len(self.windows) :], self.pending[slot]
        return [
            state_after(self.cache[block][-1], pending, part) % VOCAB_SIZE
            for table in tables
            for part, block in enumerate(table)
        ]

    def _sample(self, slot: int) -> int:
        context = self._context(slot, self.num_computed[slot])
        self.last_token[slot] = next_token([*context, *self._states(slot), *self.weights])
        return self.last_token[slot]


def make_engine(
    *,
    pipeline_depth: int,
    num_blocks: int = 16,
    block_size: int = 16,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 128,
    eos: frozenset[int] = frozenset(),
    enable_prefix_caching: bool = True,
    make_constraint: MakeConstraint = no_constraint,
    **runner_settings: Any,
) -> tuple[LLMEngine, MockRunner]:
    config = Config(
        "mock",
        kvcache_block_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
        seed=0,
    )
    # Small blocks make the interesting cases frequent; the engine itself does not need multiples of 16.
    object.__setattr__(config, "kvcache_block_size", block_size)
    runner = MockRunner(num_blocks, block_size, config.max_num_running, pipeline_depth, **runner_settings)
    engine = LLMEngine(
        config,
        runner,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=eos,
        num_layers=3,
        make_constraint=make_constraint,
    )
    return engine, runner


def make_request(token_ids: Sequence[int], params: SamplingParams | None = None, **fields: Any) -> Request:
    """A request as the gate would make it."""
    return Request(array("i", token_ids), params or SamplingParams(), **fields)


def make_sequence(seq_id: int, token_ids: Sequence[int], params: SamplingParams | None = None) -> EngineSequence:
    """The only output of a request."""
    return EngineSequence(seq_id, make_request(token_ids, params), 0)


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy parameters that always give `max_tokens` tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def num_cached(engine: LLMEngine, prompt: list[int], max_tokens: int = 1) -> int:
    """Return how many tokens of a prompt are found; the answer must be the mock model's."""
    request_id = engine.add_request(prompt, greedy(max_tokens))
    output = run(engine)[request_id]
    runner: Any = engine._runner
    states = [state.num_blocks for state in runner.states]
    want = complete(prompt, max_tokens, frozenset(), engine.limits.max_model_len, *runner.windows, states=states)
    assert output["token_ids"] == want
    return int(output["num_cached_tokens"])


def check_engine(engine: LLMEngine) -> None:
    """Assert what must hold between any two steps."""
    check_blocks(engine.block_manager, engine.scheduler.sequences)
    running, waiting = engine.scheduler.running, engine.scheduler.waiting
    for queue in (running, waiting):
        order = [seq.sort_key for seq in queue]
        assert order == sorted(order)
    last = {seq.sort_key[0]: seq.sort_key for seq in running}
    # A request of a higher priority may come at any time; of equal ones, the earlier ones run, but for those that wait
    # for a state.
    assert engine.block_manager.has_states or all(
        seq.sort_key > last.get(seq.sort_key[0], (seq.sort_key[0], -1)) for seq in waiting
    )
    manager = engine.block_manager
    for seq in waiting:
        if manager._num_gained < seq.fits_from:
            # It is not looked at again yet, and would not fit.
            matched = manager._match_prefix(seq)
            num_computed = min(len(matched[0]) * manager.block_size, seq.num_tokens - 1)
            needed = manager._needed(num_computed, seq.num_tokens)
            num_needed = sum(map(len, needed)) - sum(
                block is not None and block.ref_count > 0
                for blocks, own in zip(matched, needed, strict=False)
                for block in blocks[own.start :]
            )
            assert num_needed > manager.num_free_blocks
    slots = [seq.slot for seq in running]
    assert len(set(slots)) == len(slots) and -1 not in slots
    assert all(0 <= seq.num_unsure <= seq.num_in_flight for seq in running), "what is known is not unsure"
    assert all(not seq.block_tables for seq in waiting)


def run(engine: LLMEngine | LLM) -> dict[int, Any]:
    """Step until all requests are done; what the steps report as new tokens must join to the outputs."""
    outputs: dict[int, Any] = {}
    reported: dict[int, list[int]] = {}
    while not engine.is_finished():
        result = engine.step()
        for request_id, token_ids in result.new_token_ids.items():
            assert request_id not in outputs, "a token after an EOS is reported"
            reported.setdefault(request_id, []).extend(token_ids)
        for request_id, output in result.finished:
            # Steps of a `generate` before these may have begun it.
            new = reported.get(request_id, [])
            assert output["token_ids"][len(output["token_ids"]) - len(new) :] == new
            outputs[request_id] = output
        check_engine(engine.llm_engine if isinstance(engine, LLM) else engine)
    return outputs
