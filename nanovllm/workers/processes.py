"""The ranks other than 0, as rank 0 sees them: their processes, what they are told, and how they ended.

A rank is a Python process of its own that imports this library and not the user's program. It is started by
`subprocess`: what `multiprocessing` starts, a forked copy of this process would end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable

from nanovllm.runner.messages import ScheduledBatch
from nanovllm.utils.interrupt import deferred_signals
from nanovllm.workers.channel import Channel
from nanovllm.workers.worker import STARTED, WorkerFailure, WorkerPlan

_PROGRAM = "import sys; sys.path[:] = {path}; from nanovllm.workers.worker import run_worker; run_worker({arguments})"
_START_SECONDS = 300.0
"""For a rank's imports, and for what its loading takes longer than rank 0's."""
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 1.0
"""Within this time of an error that a rank's death caused, that death shows."""
_EXIT_SECONDS = 5.0


class WorkerError(RuntimeError):
    """A rank other than 0 failed or died; the message says which, and has its traceback or its signal."""


@dataclass
class WorkerProcess:
    """One rank, as rank 0 sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    reports: Connection
    stages: set[str] = field(default_factory=set)
    failure: WorkerFailure | None = None

    def read_reports(self, timeout: float = 0.0) -> None:
        """Take in what the rank has sent, or sends within `timeout` seconds."""
        try:
            while self.reports.poll(timeout):
                report = self.reports.recv()
                if isinstance(report, WorkerFailure):
                    self.failure = report
                else:
                    self.stages.add(report)
        except (EOFError, OSError):  # it has ended, perhaps within a report; its exit code says how
            time.sleep(timeout)

    @property
    def has_ended(self) -> bool:
        """Whether its process has."""
        return self.process.poll() is not None

    @property
    def failure_time(self) -> float:
        """Sorts ended ranks, the likeliest cause first: killed ones, then by the time of their exception."""
        return self.failure.seconds if self.failure else 0.0

    def exit_message(self) -> str:
        """Say how an ended rank ended."""
        code = self.process.returncode
        if self.failure is not None:
            return f"rank {self.rank} failed:\n{self.failure.traceback}"
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"rank {self.rank} was killed by {names.get(-code, f'signal {-code}')}"
        hint = "" if STARTED in self.stages else " before it had started; its own output says why"
        return f"rank {self.rank} exited with code {code}{hint}"


class WorkerProcesses:
    """All ranks but 0, from rank 0's side. Their processes start at once, and wait for a plan.

    Args:
        size: ranks, with rank 0.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._channel = Channel(size - 1)
        self._ranks: list[WorkerProcess] = []
        self._decode_slots: list[int] = []
        self._watcher: threading.Thread | None = None
        self._stopping = threading.Event()
        self._stopped = False
        try:
            # A process that an interrupt kept from the list would be nobody's.
            with deferred_signals():
                for rank in range(1, size):
                    self._ranks.append(_start(rank, size, self._channel))
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> list[int]:
        """Their processes, in the order of the ranks, until they are stopped."""
        return [rank.process.pid for rank in self._ranks]

    def plan(self, plan: WorkerPlan) -> None:
        """Tell every rank what to load.

        Raises:
            WorkerError: one has ended.
        """
        self._send(plan)

    def broadcast(self, batch: ScheduledBatch) -> None:
        """Tell every rank to run a batch.

        Raises:
            WorkerError: one has ended.
        """
        # Most steps decode what the one before did. The ids are for the way back, which is rank 0's.
        again = batch.decode_slots == self._decode_slots
        self._decode_slots = batch.decode_slots
        self._send((again, replace(batch, sampled_seq_ids=[], decode_slots=[] if again else batch.decode_slots)))

    def shutdown(self) -> None:
        """Tell every rank to end.

        Raises:
            WorkerError: one has ended before.
        """
        self._send(None)

    def check(self) -> None:
        """Raise if a rank has ended.

        Raises:
            WorkerError: names it.
        """
        if self._any_ended():
            raise self._error()

    def watch(self, on_failure: Callable[[], None]) -> None:
        """From now on, until `unwatch`, call `on_failure` from another thread as soon as a rank fails."""

        def poll() -> None:
            while not self._stopping.wait(_POLL_SECONDS):
                # Code 0 is a rank that was told to end.
                if any(rank.process.poll() for rank in self._ranks):
                    on_failure()
                    return

        self._watcher = threading.Thread(target=poll, daemon=True)
        self._watcher.start()

    def wait_for(self, stage: str) -> None:
        """Wait until every rank has reported `stage`.

        Raises:
            WorkerError: one ended before, or does not get there.
        """
        deadline = time.monotonic() + _START_SECONDS
        for rank in self._ranks:
            while stage not in rank.stages:
                rank.read_reports(_POLL_SECONDS)
                if stage not in rank.stages:
                    self.check()
                    if time.monotonic() > deadline:
                        raise WorkerError(f"rank {rank.rank} is not {stage} after {_START_SECONDS:.0f} s")

    def cause_of(self, error: BaseException) -> WorkerError | None:
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
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))

    def unwatch(self) -> None:
        """Watch no longer."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()

    def stop(self) -> None:
        """End every rank at once, and give back what they were told and watched with; a second call does nothing."""
        with deferred_signals():
            if self._stopped:
                return
            self._stopped = True
            self._stopping.set()
            for rank in self._ranks:
                rank.process.kill()
            self.unwatch()
            for rank in self._ranks:
                rank.process.wait()
                rank.reports.close()
            self._ranks = []
            self._channel.close()

    def _send(self, message: object) -> None:
        self.check()
        self._channel.send(message, self.check)

    def _any_ended(self) -> bool:
        return any(rank.has_ended for rank in self._ranks)

    def _error(self) -> WorkerError:
        # Let the others end too: the first to be seen need not be the first that failed.
        time.sleep(_POLL_SECONDS)
        ended = [rank for rank in self._ranks if rank.has_ended]
        for rank in ended:
            rank.read_reports()
        return WorkerError(min(ended, key=lambda rank: rank.failure_time).exit_message())


def _start(rank: int, size: int, channel: Channel) -> WorkerProcess:
    receiver, sender = Pipe(duplex=False)
    descriptors = channel.descriptor, sender.fileno()
    arguments = ", ".join(map(str, (rank, size, os.getpid(), *descriptors)))
    # Python looks into strings alone.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    program = _PROGRAM.format(path=path, arguments=arguments)
    command = [os.fsdecode(get_executable()), "-c", program, f"nanovllm rank {rank}"]
    with _blocked_sigint(), sender:
        process = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL)
    return WorkerProcess(rank, process, receiver)


@contextmanager
def _blocked_sigint() -> Iterator[None]:
    """Block SIGINT in this thread, and for good in processes that are started meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
