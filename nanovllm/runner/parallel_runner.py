"""A runner over several devices: rank 0 runs in this process and broadcasts every step to the other ranks.

An error on any rank ends all ranks and is raised to the caller; the engine is then closed.
"""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from nanovllm.config import Config
from nanovllm.configs.model import ModelConfig
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.distributed_communicator import open_store
from nanovllm.parallel.shard import shard_of
from nanovllm.parallel.symmetric_communicator import connect
from nanovllm.runner.batch import DeviceStep
from nanovllm.runner.messages import NO_ROWS, ScheduledBatch, StepOutput
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.step_outputs import PendingStep
from nanovllm.runner.worker import CallOrder, StepOrder, WorkerPlan, step_limits
from nanovllm.runner.worker_processes import START_SECONDS, WorkerError, WorkerProcesses
from nanovllm.utils.device import resolve_device
from nanovllm.weights.model_weights import ModelWeights, WeightsLoader
from nanovllm.weights.report import MissingWeights

_CHECK_SECONDS = 0.1
_STEP_SECONDS = 300.0
"""Longer than any step takes; detects ranks that are alive but stuck."""


@contextmanager
def start_ranks(config: Config) -> Iterator[WorkerProcesses | None]:
    """Start the worker processes, which import while the `with` block runs; end them if it raises. None for one rank.

    Raises:
        ValueError: more ranks than GPUs.
        RuntimeError: the system is Windows.
    """
    size = config.tensor_parallel_size
    if size == 1:
        yield None
        return
    resolve_device(config.device, 0, size)
    if platform.system() == "Windows":
        raise RuntimeError(f"tensor_parallel_size={size} needs Linux or macOS, not Windows")
    ranks = WorkerProcesses(size)
    try:
        yield ranks
    except BaseException:
        ranks.stop()
        raise


class ParallelRunner:
    """Runs the steps of one engine on several devices, by `ranks` from `start_ranks`; a RuntimeError if one fails."""

    def __init__(
        self, ranks: WorkerProcesses, config: Config, model_config: ModelConfig, folder: str, *, max_model_len: int
    ) -> None:
        size = ranks.size
        shard_of(model_config, 0, size)
        device = resolve_device(config.device, 0, size)
        self._communicator: Communicator | None = None
        self._runner: ModelRunner | None = None
        self._ended_by: BaseException | None = None
        self._ranks, self._rows = ranks, NO_ROWS
        with self.one_fails_all_fail():
            store = open_store(size)
            self._ranks.send(WorkerPlan(config, model_config, folder, max_model_len, store.port))
            self._ranks.replies(START_SECONDS)
            join = partial(connect, 0, size, device, store, step_limits(config, model_config))
            # The group waits up to its timeout for a rank that has died.
            self._communicator = communicator = self._ranks.call_watched(join)
            # While this thread waits for a GPU, nothing else would notice the death of a rank.
            self._ranks.watch(communicator.interrupt)
            self._runner = runner = ModelRunner(
                config, model_config, folder, max_model_len=max_model_len, communicator=communicator
            )
            self._ranks.replies(START_SECONDS)
        self.pipeline_depth = runner.pipeline_depth
        self.num_drafts, self.draft_costs = runner.num_drafts, runner.draft_costs
        self.num_kvcache_blocks, self.cache_kinds = runner.num_kvcache_blocks, runner.cache_kinds
        self.host_memory = runner.host_memory

    def forward(self, batch: ScheduledBatch) -> DeviceStep:
        """Queue a step's forward pass on every rank; see `Runner`."""
        runner = self._require_open()
        with self.one_fails_all_fail():
            # Most steps repeat the rows of the previous step, which are then not sent. Only rank 0 needs the ids.
            again, self._rows = batch.rows is self._rows, batch.rows
            sent = replace(batch, sampled_seq_ids=[], rows=NO_ROWS if again else batch.rows)
            self._ranks.send(StepOrder(sent, again))
            return runner.forward(batch)

    def sample(self, step: DeviceStep, masks: np.ndarray | None = None) -> ParallelHandle:
        """Queue a step's sampling on every rank; see `Runner`."""
        runner = self._require_open()
        with self.one_fails_all_fail():
            if masks is not None:
                self._ranks.send(masks)
            return ParallelHandle(runner.sample(step, masks), self)

    def call(self, function: Callable[..., Any], *args: Any, own: Callable[[], Any] | None = None) -> list[Any]:
        """Call a function with every rank's `ModelRunner`, or `own` on this rank; return the results in rank order."""
        runner = self._require_open()
        self._ranks.send(CallOrder(function, args))
        try:
            result = function(runner, *args) if own is None else own()
        finally:
            others = self._ranks.replies()
        return [result, *others]

    def weights_loader(self) -> WeightsLoader:
        """Return the loader of all ranks' weights."""
        call = partial(self.call, ModelRunner.on_weights)
        return WeightsLoader(lambda: self._require_open().weights, call, self.sleep, self.wake_up)

    def sleep(self, keep_weights: bool) -> MissingWeights:
        """Release memory on every rank; see `WeightsControl`."""
        missing: MissingWeights = self.call(ModelRunner.sleep, keep_weights)[0]
        return missing

    def wake_up(self, tags: list[str]) -> None:
        """Allocate memory again on every rank; see `WeightsControl`."""
        # Only the first rank knows which weights a failed load left incomplete; all ranks capture graphs, or none.
        missing = self._require_open().weights.missing
        self.call(ModelRunner.on_weights, ModelWeights.mark_missing, missing)
        self.call(ModelRunner.wake_up, tags)

    def synchronize(self) -> None:
        """Wait for all launched work on every rank; raises if it failed on one, or the ranks are gone."""
        self.call(ModelRunner.synchronize)

    def exit(self) -> None:
        """Free every device and end the worker processes; a second call does nothing."""
        runner = self._runner
        if runner is None:
            return
        try:
            self._ranks.send(None)
            self._runner = None
            runner.exit()
            self._ranks.unwatch()
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                communicator.close()
            self._ranks.join()
            if communicator is not None:
                communicator.release()
        except WorkerError as error:
            warnings.warn(f"while the engine was idle, {error}", stacklevel=2)
        finally:
            self._abandon()

    @contextmanager
    def one_fails_all_fail(self) -> Iterator[None]:
        """If the `with` block raises, end every rank and raise the original failure, which may be another rank's."""
        try:
            yield
        except BaseException as error:
            cause = None if isinstance(error, WorkerError) else self._ranks.cause_of(error)
            self._ended_by = cause or error
            self._abandon()
            if cause is not None:
                raise cause from error
            raise

    def wait(self, handle: PendingStep) -> StepOutput:
        """Wait for a step and return its tokens; raise if a rank dies meanwhile."""
        # The engine still asks for the tokens of a step that was in flight when a later one failed.
        if self._ended_by is not None:
            raise self._ended_by
        with self.one_fails_all_fail():
            started = checked = time.monotonic()
            while handle.copied is not None and not handle.copied.query():
                now = time.monotonic()
                if now - started > _STEP_SECONDS:
                    raise RuntimeError(f"a step has not ended within {_STEP_SECONDS:.0f} s, on some rank or on all")
                if now - checked > _CHECK_SECONDS:
                    self._ranks.check()
                    checked = now
                os.sched_yield()
            # If a rank has died, the other devices stop waiting for it and their results are undefined.
            self._ranks.check()
            return handle.result()

    def _require_open(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("its ranks have ended")
        return self._runner

    def _abandon(self) -> None:
        """End the remaining ranks and free rank 0's device."""
        communicator, self._communicator = self._communicator, None
        runner, self._runner = self._runner, None
        try:
            if communicator is not None:
                # Before the release, which waits for the device, which may wait for a dead rank.
                communicator.interrupt()
            if runner is not None:
                runner.release()
        finally:
            self._ranks.stop()
            if communicator is not None:
                communicator.abort()


@dataclass
class ParallelHandle:
    """A step in flight on every rank."""

    handle: PendingStep
    runner: ParallelRunner

    def result(self) -> StepOutput:
        """Wait for the step and return its tokens."""
        return self.runner.wait(self.handle)
