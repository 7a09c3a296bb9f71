"""The processes of the ranks beside rank 0: what each runs, and how rank 0 watches over them.

A rank's process is spawned, takes its orders from the channel, and tells rank 0 over a pipe of its own how far its
start is, and of the exception that ends it. It never outlives rank 0's process, and Ctrl-C is not its business.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import current_process, get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import torch

from nanovllm.config import Config
from nanovllm.engine.channel import Channel
from nanovllm.engine.messages import ScheduledBatch
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.model_config import ModelConfig
from nanovllm.utils.communicator import find_store
from nanovllm.utils.device import resolve_device
from nanovllm.utils.symmetric import connect

STARTED, READY = "started", "ready"
"""Stages that a rank reports: it has its device and has met rank 0; it has model and cache."""
_PROCESS_NAME = "nanovllm rank"
_GUARD_HINT = "a script that makes an engine of several ranks must do it behind `if __name__ == '__main__':`"
_MOST_CHARACTERS = 16000  # of a traceback: the pipe takes as much without anybody reading
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 1.0
"""Within this time of an error that a rank's death caused, that death shows."""
_EXIT_SECONDS = 10.0


class RankError(RuntimeError):
    """A rank other than 0 failed or died; the message says which, and has its traceback or its signal."""


@dataclass(frozen=True)
class RankPlan:
    """What every rank is started with; `port` is where they meet, `parent` rank 0's process."""

    config: Config
    model_config: ModelConfig
    folder: str
    max_model_len: int
    port: int
    parent: int = field(default_factory=os.getpid)


class RankFailure(NamedTuple):
    """The exception that ended a rank, and when: the first is the cause of the others'."""

    seconds: float
    traceback: str


def run_rank(rank: int, plan: RankPlan, channel: Channel, reports: Connection) -> None:
    """Be a rank, from the start of its process to its end."""
    threading.Thread(target=_end_with_parent, args=(plan.parent,), daemon=True).start()
    try:
        _serve(rank, plan, channel, reports)
    except BaseException:
        # Where rank 0 is gone there is nobody to tell.
        with suppress(OSError):
            reports.send(RankFailure(time.monotonic(), traceback.format_exc()[-_MOST_CHARACTERS:]))
        # At once, whatever the device or another thread waits for: it also tells the ranks that wait for this one.
        os._exit(1)


def _serve(rank: int, plan: RankPlan, channel: Channel, reports: Connection) -> None:
    size = plan.config.tensor_parallel_size
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    device = resolve_device(plan.config.device, rank, size)
    if device.type == "cuda":
        # Pinned memory, for one, would make a context on the first device.
        torch.cuda.set_device(device)
    store = find_store(plan.port, size)
    # From here on the others may wait for this rank, and not look at reports.
    reports.send(STARTED)
    communicator = connect(rank, size, device, store, 2 * plan.config.max_num_running)
    runner = ModelRunner(
        plan.config, plan.model_config, plan.folder, max_model_len=plan.max_model_len, communicator=communicator
    )
    reports.send(READY)
    decode_slots: list[int] = []
    # While it waits, it asks the device whether the last step has failed.
    while (message := channel.receive(rank - 1, runner.check)) is not None:
        again, batch = message
        if again:
            batch.decode_slots = decode_slots
        decode_slots = batch.decode_slots
        runner.follow(batch)
    runner.exit()
    communicator.close()


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has, whatever the main thread is waiting for."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@dataclass
class RankProcess:
    """One rank, as rank 0 sees it."""

    rank: int
    process: BaseProcess
    reports: Connection
    stages: set[str] = field(default_factory=set)
    failure: RankFailure | None = None

    def read_reports(self, timeout: float = 0.0) -> None:
        """Take in what the rank has sent, or sends within `timeout` seconds."""
        try:
            while self.reports.poll(timeout):
                report = self.reports.recv()
                if isinstance(report, RankFailure):
                    self.failure = report
                else:
                    self.stages.add(report)
        except (EOFError, OSError):  # it has ended, perhaps within a report; its exit code says how
            time.sleep(timeout)

    @property
    def blame(self) -> float:
        """Sorts ended ranks, the likeliest cause first: killed ones, then by the time of their exception."""
        return self.failure.seconds if self.failure else 0.0

    def obituary(self) -> str:
        """Say how an ended rank ended."""
        code = self.process.exitcode
        if self.failure is not None:
            return f"rank {self.rank} failed:\n{self.failure.traceback}"
        if code is not None and code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"rank {self.rank} was killed by {names.get(-code, f'signal {-code}')}"
        hint = "" if STARTED in self.stages else f" before it had started; its own output says why ({_GUARD_HINT})"
        return f"rank {self.rank} exited with code {code}{hint}"


class Ranks:
    """All ranks but 0, from rank 0's side.

    Args:
        size: ranks, with rank 0.

    Raises:
        RuntimeError: this process is such a rank itself.
    """

    def __init__(self, size: int) -> None:
        if current_process().name.startswith(_PROCESS_NAME):
            raise RuntimeError(f"a rank of an engine cannot make another: {_GUARD_HINT}")
        self._size = size
        self._channel = Channel(size - 1)
        self._ranks: list[RankProcess] = []
        self._decode_slots: list[int] = []
        self._watcher: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self, plan: RankPlan) -> None:
        """Start their processes."""
        for rank in range(1, self._size):
            self._ranks.append(_start(rank, plan, self._channel))

    def order(self, batch: ScheduledBatch) -> None:
        """Tell every rank to run a batch.

        Raises:
            RankError: one has ended.
        """
        self.check()
        # Most steps decode what the one before did. The ids are for the way back, which is rank 0's.
        again = batch.decode_slots == self._decode_slots
        self._decode_slots = batch.decode_slots
        brief = replace(batch, sampled_seq_ids=[], decode_slots=[] if again else batch.decode_slots)
        self._channel.send((again, brief), self.check)

    def dismiss(self) -> None:
        """Tell every rank to end.

        Raises:
            RankError: one has ended before.
        """
        self.check()
        self._channel.send(None, self.check)

    def check(self) -> None:
        """Raise if a rank has ended.

        Raises:
            RankError: names it.
        """
        if self._any_ended():
            raise self._error()

    def watch(self, on_failure: Callable[[], None]) -> None:
        """From now on, until `unwatch`, call `on_failure` from another thread as soon as a rank fails."""

        def poll() -> None:
            while not self._stopping.wait(_POLL_SECONDS):
                # Code 0 is a rank that was told to end.
                if any(rank.process.exitcode for rank in self._ranks):
                    on_failure()
                    return

        self._watcher = threading.Thread(target=poll, daemon=True)
        self._watcher.start()

    def wait_for(self, stage: str) -> None:
        """Wait until every rank has reported `stage`.

        Raises:
            RankError: one ended before.
        """
        for rank in self._ranks:
            while stage not in rank.stages:
                rank.read_reports(_POLL_SECONDS)
                if stage not in rank.stages:
                    self.check()

    def cause_of(self, error: BaseException) -> RankError | None:
        """The end of a rank that made rank 0 fail with `error`; None if that is rank 0's own."""
        # A collective that lost its peer raises a RuntimeError.
        if not isinstance(error, RuntimeError):
            return None
        deadline = time.monotonic() + _GRACE_SECONDS
        while not (ended := self._any_ended()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self._error() if ended else None

    def join(self) -> None:
        """Wait until every rank has ended as it was told to, but not for ever."""
        deadline = time.monotonic() + _EXIT_SECONDS
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))

    def unwatch(self) -> None:
        """Watch no longer."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()

    def stop(self) -> None:
        """End every rank at once, and give back what they were told and watched with."""
        self.unwatch()
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.process.close()
            rank.reports.close()
        self._ranks = []
        self._channel.close()

    def _any_ended(self) -> bool:
        return any(rank.process.exitcode is not None for rank in self._ranks)

    def _error(self) -> RankError:
        # Let the others end too: the first to be seen need not be the first that failed.
        time.sleep(_POLL_SECONDS)
        ended = [rank for rank in self._ranks if rank.process.exitcode is not None]
        for rank in ended:
            rank.read_reports()
        return RankError(min(ended, key=lambda rank: rank.blame).obituary())


def _start(rank: int, plan: RankPlan, channel: Channel) -> RankProcess:
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=run_rank, args=(rank, plan, channel, sender), name=f"{_PROCESS_NAME} {rank}", daemon=True
    )
    with _blocked_sigint(), sender:
        process.start()
    return RankProcess(rank, process, receiver)


@contextmanager
def _blocked_sigint() -> Iterator[None]:
    """Block SIGINT in this thread, and for good in processes that are started meanwhile."""
    # Its own start would unblock what is blocked here.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
