"""The engine: token ids in, token ids out, one step at a time. It knows neither tokenizers nor devices.

It is an `Engine`, and can be driven directly with requests of token ids (`add_request`, `step`).

A step plans the next batch while the device runs the previous one (`pipeline_depth` 1, on CUDA), or plans and runs one
batch (0, on the CPU). Decisions that need token values, such as EOS, wait for the step's result; see `Scheduler`.

Requests and aborts may come from any thread, through an inbox that the next step empties. Results are kept until a
caller collects them. Weights, pauses and sleep change the engine between two steps; see `LLM`.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from typing import Any

import numpy as np
from typing_extensions import Unpack, override

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.engine import SLEEP_TAGS, Engine, EngineOutputs, EngineState, NewTokens, PauseMode, T, Ts
from nanovllm.engine.host_cache import HostCache
from nanovllm.engine.request import (
    GOLDEN_RATIO_64,
    Abort,
    MakeConstraint,
    Request,
    RequestLimits,
    RequestSeeds,
    TokenConstraint,
    check_request_ids,
    fill_rows,
    no_constraint,
)
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceGroup, SequenceStatus
from nanovllm.engine.stats import BlockUsage, StepHistograms
from nanovllm.outputs import StepError, StepResult
from nanovllm.runner.messages import Runner, ScheduledBatch, StateCache, StepHandle
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int
from nanovllm.utils.interrupt import deferred_signals
from nanovllm.weights.report import LoadedWeights, LoadFailedError, WeightsControl

_REST_SECONDS = 0.002
"""Duration of an idle step of a paused engine."""


class LLMEngine(Engine):
    """Requests, their scheduling, and the runner that computes them.

    Args:
        config, runner: the engine's settings, and the runner of its batches.
        vocab_size, max_model_len, num_layers: see `RequestLimits`.
        eos_token_ids: tokens that end a request.
        make_constraint: makes the constraints of requests as they are queued.
        weights: changes the model's weights and memory; None if they cannot change.
    """

    is_in_process = True

    def __init__(
        self, config: Config, runner: Runner,
        *, vocab_size: int, max_model_len: int, eos_token_ids: frozenset[int] = frozenset(),
        num_layers: int | None = None, make_constraint: MakeConstraint = no_constraint,
        weights: WeightsControl | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = config
        self._runner: Runner | None = runner
        self._weights_control = weights
        self._state = EngineState()
        memory = runner.host_memory
        states = [kind.num_blocks for kind in runner.cache_kinds if isinstance(kind, StateCache)]
        num_growing = len(runner.cache_kinds) - len(states)
        self.block_manager = BlockManager(
            runner.num_kvcache_blocks,
            config.kvcache_block_size,
            config.enable_prefix_caching,
            kinds=runner.cache_kinds,
            max_chunk=config.max_num_batched_tokens,
            host=None if memory is None else HostCache(memory),
            # With states, twice the number: for new ones, and what prompts keep.
            num_clean_blocks=-(-4 * config.max_num_batched_tokens // config.kvcache_block_size) * (2 if states else 1),
            num_drafts=runner.num_drafts,
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_running=config.max_num_running,
            max_num_batched_tokens=config.max_num_batched_tokens,
            eos_token_ids=eos_token_ids,
            num_drafts=runner.num_drafts,
            draft_costs=runner.draft_costs,
        )
        self.limits = RequestLimits(
            vocab_size,
            max_model_len,
            # Tokens that fit in all groups of attention layers, beside one state, before any is released.
            num_kv_slots=(runner.num_kvcache_blocks - sum(states)) // num_growing * config.kvcache_block_size,
            max_stored_tokens=self.block_manager.max_tokens(max_model_len),
            max_logprobs=config.most_logprobs(vocab_size),
            num_layers=num_layers,
        )
        self.seeds = RequestSeeds(config.seed)
        self._request_ids, self._arrivals = count(), count()
        self._in_flight: deque[tuple[ScheduledBatch, StepHandle]] = deque()
        # Unfinished requests, by the id of each of their sequences.
        self._groups: dict[int, SequenceGroup] = {}
        self._inbox: deque[Sequence | Abort] = deque()
        self._make_constraint = make_constraint
        # Tokens of the steps that the last `run_step` collected.
        self._step_tokens = NewTokens()
        self.histograms = StepHistograms()

    def add_request(
        self, prompt: list[int] | array[int], sampling_params: SamplingParams | None = None, priority: int = 0
    ) -> int:
        """Queue a request and return its id; lower `priority` runs first. A ValueError names what is out of bounds."""
        params = self.limits.check_params(SamplingParams() if sampling_params is None else sampling_params)
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name):
                raise ValueError(f"{name} needs text: give the request to an LLM, not to its engine")
        token_ids = self.limits.check_prompt(prompt, params)
        priority, seed = check_int("priority", priority), self.seeds.of(self.seeds.reserve(params.n))
        return self.enqueue(Request(token_ids, params, priority=priority, seed=seed))

    @override
    def enqueue(self, request: Request, request_id: int | None = None) -> int:
        # An id that the caller has chosen is free, and so are the `n - 1` after it, of further outputs.
        self.require_open()
        params = request.params
        make = self._make_constraint if request.is_constrained else lambda _: None
        constraints = [make(request) for _ in range(params.n)]
        seed = request.seed if params.seed is None else params.seed
        ids = self._request_ids if request_id is None else count(request_id)
        group = SequenceGroup(
            Sequence(next(ids), request, (seed + index * GOLDEN_RATIO_64) % 2**64, index, constraint)
            for index, constraint in enumerate(constraints)
        )
        most_tokens = len(request.token_ids) + self.limits.max_tokens(len(request.token_ids), params)
        for seq in group:
            seq.most_tokens, seq.request_id, seq.siblings = most_tokens, group.request_id, group if params.n > 1 else ()
            seq.sort_key = request.priority, next(self._arrivals)
        self._groups.update({seq.seq_id: group for seq in group})
        self._inbox.extend(group)
        return group.request_id

    @override
    def enqueue_all(self, requests: Iterable[Request]) -> list[int]:
        request_ids: list[int] = []
        try:
            for request in requests:
                request_ids.append(self.enqueue(request))
        except BaseException:
            self.abort(request_ids)
            raise
        return request_ids

    def step(self) -> StepResult:
        """Plan and launch one step, and collect the results of the previous one.

        Raises:
            StepError: the step failed, or a request in it; the requests that it names are dropped, the others stay.
                Their tokens from the step are in the next result.
            RuntimeError: the engine is closed, or is driven by another thread, or by a caller of this one.
        """
        with self.driving():
            # Results of earlier steps are still returned after a later step has lost the device.
            tokens = self.run_step() if self._runner is not None or not self._results else None
            return self._results.take_step(tokens)

    @override
    def run_step(self) -> NewTokens:
        # A signal within a step would leave the scheduler's state inconsistent.
        with deferred_signals():
            # Calls that wait for the gap between two steps come first.
            with self._turn:
                pass
            with self._alone():
                return self._step(self.require_open())

    def _step(self, runner: Runner) -> NewTokens:
        self._empty_inbox()
        tokens = self._step_tokens = NewTokens()
        self._history.sample_if_due(self.stats)
        if self.state.holds_steps and not self.is_draining():
            self._collect(0)
            # A paused engine must not spin.
            time.sleep(_REST_SECONDS)
            return tokens
        try:
            batch = self.scheduler.schedule()
            if batch is not None:
                step = runner.forward(batch)
                self._in_flight.append((batch, runner.sample(step, self._make_masks(batch))))
        except BaseException as error:
            # Steps before the failed one are valid.
            self._collect(0)
            self._fail(error)
            return tokens
        # With nothing launched the pipeline drains: an empty plan still collects the last result.
        self._collect(runner.pipeline_depth if batch is not None else 0)
        self._collect_last()
        tokens.num_prefill_tokens = batch.num_chunk_tokens if batch is not None else 0
        return tokens

    def _empty_inbox(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Sequence):
                # An abort may have come between adding the request and its sequences.
                if message.seq_id in self._groups:
                    self.scheduler.add(message)
                continue
            for request_id in message.request_ids:
                group = self._groups.get(request_id)
                if group is not None:
                    self._abort(group)
                    if message.keep_outputs:
                        self._results.finished.append((group.request_id, group.output()))
                    else:
                        self._results.dropped.append(group.request_id)

    def _make_masks(self, batch: ScheduledBatch) -> np.ndarray | None:
        """Return the masks of a batch whose forward pass is running, if it has any; see `Runner.sample`."""
        if not batch.masked:
            return None
        # Masks depend on the tokens of the previous step.
        if not self._collect(0):
            raise RuntimeError("the step before has failed, and the requests of this one with it")
        words = np.empty((len(batch.masked), -(-self.limits.vocab_size // 32)), dtype=np.int32)
        constrained: list[tuple[TokenConstraint, int]] = []
        for row, index in enumerate(batch.masked):
            seq = self.scheduler.find(batch.sampled_seq_ids[index])
            if seq is None or seq.constraint is None:
                # It has just finished; any token will do.
                words[row] = -1
            else:
                constrained.append((seq.constraint, row))
        fill_rows(constrained, words)
        return words

    def _collect(self, depth: int) -> bool:
        """Collect results until at most `depth` steps are under way; return whether all succeeded."""
        while len(self._in_flight) > depth:
            batch, handle = self._in_flight.popleft()
            try:
                output = handle.result()
            except BaseException as error:
                self._fail(error)
                return False
            changes = self.scheduler.postprocess(batch, output)
            num_tokens = batch.num_chunk_tokens + len(output.token_ids)
            self.histograms.observe(num_tokens, len(batch.rows), time.monotonic())
            self._step_tokens.sampled.append((changes.seq_ids, changes.token_ids, changes.dropped))
            self._results.new_tokens += changes.new_tokens
            for seq, cause in changes.failed:
                # A request with several outputs fails with any of them, and only once.
                if (group := self._groups.get(seq.seq_id)) is not None:
                    self._abort(group)
                    message = f"request {group.request_id} failed: {cause}"
                    self._results.fail(StepError(message, [group.request_id], cause))
            for seq in changes.finished:
                if (group := self._groups.get(seq.seq_id)) is not None:
                    self._finish(group)
        return True

    def _collect_last(self) -> None:
        """Collect the step under way if its tokens are not needed: they are past an EOS or a stop string."""
        if self.scheduler.is_finished():
            self._collect(0)

    def _finish(self, group: SequenceGroup) -> None:
        """Keep the output of a request once all its sequences are finished."""
        if group.is_finished:
            self._forget(group)
            self._results.finished.append((group.request_id, group.output()))

    def _abort(self, group: SequenceGroup) -> None:
        self._forget(group)
        self.scheduler.abort(seq.seq_id for seq in group)

    def _forget(self, group: SequenceGroup) -> None:
        for seq in group:
            del self._groups[seq.seq_id]

    def _fail(self, error: BaseException) -> None:
        """Drop every request in flight, and its cached blocks; close the engine if the device is lost."""
        self._in_flight.clear()
        # A request with several outputs fails with any of them.
        groups = {id(group): group for group in (self._groups[s.seq_id] for s in self.scheduler.fail_in_flight())}
        failed = [group.request_id for group in groups.values()]
        for group in groups.values():
            self._abort(group)
        message = f"a step failed: {type(error).__name__}: {error}"
        try:
            if self._runner is not None:
                self._runner.synchronize()
        except Exception as lost:
            self._runner = None
            message += "; the engine is closed" + ("" if str(lost) in message else f": {lost}")
        self._results.fail(StepError(message, failed, error))
        if not isinstance(error, Exception):
            raise error

    @override
    def abort(self, request_ids: Iterable[int], *, keep_outputs: bool = False) -> None:
        self._inbox.append(Abort(check_request_ids(request_ids), keep_outputs))
        with deferred_signals():
            # If two calls race, the first does both.
            while self._inbox and not self._is_busy and self._mutex.acquire(blocking=False):
                try:
                    with self._alone():
                        self._empty_inbox()
                        self._collect_last()
                finally:
                    self._mutex.release()

    @override
    def stop(self, outputs: list[tuple[int, int]]) -> None:
        with deferred_signals(), self._in_turn():
            self._empty_inbox()
            for request_id, index in outputs:
                group = self._groups.get(request_id)
                if group is not None and group[index].status is not SequenceStatus.FINISHED:
                    self.scheduler.finish(group[index], "stop")
                    self._finish(group)
            self._collect_last()

    @override
    def take_results(self) -> EngineOutputs:
        with self._in_turn():
            results, self._results = self._results, EngineOutputs()
        return results

    @override
    def is_finished(self) -> bool:
        return self.scheduler.is_finished() and not (self._in_flight or self._inbox or self._results)

    @property
    @override
    def request_ids(self) -> set[int]:
        # Another thread may add one meanwhile.
        return {group.request_id for group in list(self._groups.values())}

    @override
    def stats(self, *, now: bool = False) -> dict[str, int]:
        return self.scheduler.counters()

    def block_usage(self, most_cells: int) -> BlockUsage:
        """Return the state of the cache's blocks, in at most `most_cells` cells."""
        return self.block_manager.usage(most_cells)

    @property
    @override
    def is_open(self) -> bool:
        return self._runner is not None and not self._is_closing

    def require_open(self) -> Runner:
        """Return the runner, or raise a RuntimeError if the engine is closed."""
        if self._runner is None or self._is_closing:
            raise RuntimeError("the engine is closed")
        return self._runner

    @property
    @override
    def state(self) -> EngineState:
        return self._state

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Hold the engine between two steps inside the `with` block; waits for a step of another thread to end.

        Raises:
            RuntimeError: the engine is closed, or this thread is within a call that drives it.
        """
        if any(driver.thread == get_ident() for driver in self._drivers[:1]):
            raise RuntimeError("a generate or step of this thread has not ended")
        with self._in_turn():
            self.require_open()
            self._empty_inbox()
            try:
                yield
            finally:
                self._empty_inbox()

    @override
    def call(self, function: Callable[[Any, Unpack[Ts]], T], *args: Unpack[Ts]) -> list[T]:
        return [function(self, *args)]

    @override
    def load_weights(self, weights: Any, strict: bool) -> LoadedWeights:
        with self.between_steps(), self._changing_weights("load_weights"):
            return self._weights.load(weights, strict)

    def unload_adapter(self) -> bool:
        """Remove the adapter that `load_weights` has merged, and return whether there was one."""
        with self.between_steps(), self._changing_weights("unload_adapter"):
            return bool(self._weights.unload_adapter())

    @contextmanager
    def _changing_weights(self, name: str) -> Iterator[None]:
        """Record which weights are missing after the `with` block, even if it fails; name: of the call."""
        self._require_rest(name)
        if "weights" in self.state.asleep:
            raise RuntimeError("the weights are asleep: call wake_up(['weights'])")
        was_missing = self.state.missing
        try:
            yield
        except LoadFailedError as error:
            self.state.missing = error.missing
            raise
        self.state.missing = self._weights.missing
        if was_missing.count and not self.state.missing.count:
            # Graphs could not be captured before.
            self._weights.wake_up([])

    def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache, and return whether no request holds blocks."""
        with self.between_steps():
            return self.block_manager.reset()

    def pause(self, mode: PauseMode) -> None:
        """Stop running steps, except for requests that mode "wait" waits for; a later "keep" does not freeze these."""
        with self.between_steps():
            if mode == "keep" and self.is_draining():
                return
            self.state.pause_mode = mode
            if mode == "wait":
                self.scheduler.hold_new()
            elif mode == "abort":
                self.abort(self.request_ids, keep_outputs=True)

    def is_draining(self) -> bool:
        """Whether a pause still waits for requests."""
        if self.state.pause_mode != "wait" or self.state.cannot_run is not None:
            return False
        return bool(self._in_flight) or not self.scheduler.is_drained()

    def resume(self) -> None:
        """Continue after a pause."""
        with self.between_steps():
            self.scheduler.release_new()
            self.state.pause_mode = None

    def sleep(self, level: int) -> None:
        """Release the memory of weights, cache and CUDA graphs."""
        with self.between_steps():
            self._require_rest("sleep")
            self.scheduler.preempt_all()
            self.block_manager.reset()
            self.state.asleep = set(SLEEP_TAGS)
            self.state.missing = self._weights.sleep(level == 1)

    def wake_up(self, tags: list[str]) -> None:
        """Allocate memory again for some of `SLEEP_TAGS`."""
        with self.between_steps():
            if woken := sorted(self.state.asleep.intersection(tags)):
                self._weights.wake_up(woken)
                self.state.asleep = self.state.asleep.difference(woken)

    @property
    def _weights(self) -> WeightsControl:
        if self._weights_control is None:
            raise RuntimeError("this engine's runner does not change weights")
        return self._weights_control

    def _require_rest(self, name: str) -> None:
        self.state.require_no_requests(name, self.request_ids)
        if self.is_draining():
            raise RuntimeError(f"{name}: a pause still waits for requests to end")

    def replace_runner(self, runner: Runner) -> None:
        """Run steps by another runner, from the next one on; does nothing if the engine is closed."""
        if self._runner is not None:
            self._runner = runner

    @override
    def _close(self) -> None:
        with deferred_signals():
            runner, self._runner = self._runner, None
            if runner is not None:
                self._in_flight.clear()
                runner.exit()

    def __del__(self) -> None:
        # A constructor that raised leaves no runner behind.
        if getattr(self, "_runner", None) is not None:
            self.exit()
