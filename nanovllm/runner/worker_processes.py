"""Rank 0's handle on the worker processes: starts them, sends them orders, and reports how they exited."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from nanovllm.parallel.channel import Sender
from nanovllm.runner.worker import Reply, WorkerFailure
from nanovllm.utils.interrupt import deferred_signals
from nanovllm.utils.processes import PythonProcess, describe_exit, start_python

_T = TypeVar("_T")
START_SECONDS = 300.0
"""Limit for a rank's imports, and for the excess of its loading time over rank 0's."""
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 1.0
"""Time after an error on rank 0 in which the exit of the rank that caused it becomes visible."""
_EXIT_SECONDS = 5.0


@dataclass
class WorkerProcess:
    """One rank's process, its reply if one has come, and its failure if it sent one; has_started: it ever replied."""

    rank: int
    process: PythonProcess
    reports: Connection
    has_started: bool = False
    failure: WorkerFailure | None = None
    reply: Reply | None = None

    def read_reports(self, timeout: float = 0.0) -> None:
        """Receive the reports of the rank, including reports sent within `timeout` seconds."""
        try:
            while self.reports.poll(timeout):
                report = self.reports.recv()
                if isinstance(report, WorkerFailure):
                    self.failure = report
                else:
                    self.reply, self.has_started = report, True
                # Usually this is the awaited report.
                timeout = 0.0
        except (EOFError, OSError):  # it exited, perhaps within a report; its exit code tells more
            time.sleep(timeout)

    def exit_message(self) -> str:
        """Describe how the rank's process exited."""
        if self.failure is not None:
            return f"rank {self.rank} failed:\n{self.failure.traceback}"
        code = self.process.exit_code or 0
        hint = "" if code < 0 or self.has_started else " before it had started; its own output says why"
        return f"rank {self.rank} {describe_exit(code)}{hint}"


def start_worker(rank: int, size: int, channel: Sender) -> WorkerProcess:
    """Start the process of a rank, which then waits for a plan."""
    receiver, sender = Pipe(duplex=False)
    descriptors = channel.receivers[rank - 1], sender.fileno()
    with sender:
        arguments = rank, size, os.getpid(), *descriptors
        title = f"nanovllm rank {rank}"
        process = start_python("nanovllm.runner.worker", "run_worker", arguments, title, descriptors)
    return WorkerProcess(rank, PythonProcess(process), receiver)


class WorkerError(RuntimeError):
    """A rank other than 0 failed or died; the message has its number and its traceback, signal or exit code."""


class WorkerProcesses:
    """The processes of all ranks but 0 of `size`. The constructor starts them; they then wait for a `WorkerPlan`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._channel = Sender(size - 1)
        self._ranks: list[WorkerProcess] = []
        self._watcher: threading.Thread | None = None
        self._stopping = threading.Event()
        try:
            # An interrupt between start and append would leave a process that nothing ends.
            with deferred_signals():
                for rank in range(1, size):
                    self._ranks.append(start_worker(rank, size, self._channel))
        except BaseException:
            self.stop()
            raise

    def send(self, order: object) -> None:
        """Send every rank an order of `runner.worker`, unless `check` raises; `replies` must follow a `CallOrder`."""
        self.check()
        self._channel.send(order, self.check)

    def replies(self, seconds: float = math.inf) -> list[Any]:
        """Wait for every rank's next reply, and return the results of their calls in rank order.

        A `WorkerError` if a call failed, or a rank has exited, or does not reply in time.
        """
        deadline = time.monotonic() + seconds
        replies: list[Reply] = []
        for rank in self._ranks:
            while rank.reply is None:
                rank.read_reports(_POLL_SECONDS)
                if rank.reply is None:
                    self.check()
                    if time.monotonic() > deadline:
                        stage = "ready" if rank.has_started else "started"
                        raise WorkerError(f"rank {rank.rank} is not {stage} after {seconds:.0f} s")
            replies.append(rank.reply)
            rank.reply = None
        for number, reply in enumerate(replies, 1):
            if reply.traceback is not None:
                raise WorkerError(f"a call failed on rank {number}:\n{reply.traceback}")
        return [reply.result for reply in replies]

    def check(self) -> None:
        """Raise a `WorkerError` if a rank has exited."""
        if self._ended():
            raise self._error()

    def watch(self, on_failure: Callable[[], None]) -> None:
        """Call `on_failure` from another thread, once, when a rank fails; watches until `unwatch`."""

        def poll() -> None:
            while not self._stopping.wait(_POLL_SECONDS):
                # A rank that was told to end exits with code 0.
                if any(rank.process.exit_code for rank in self._ranks):
                    on_failure()
                    return

        self._watcher = threading.Thread(target=poll, daemon=True)
        self._watcher.start()

    def call_watched(self, call: Callable[[], _T]) -> _T:
        """Return the result of a function that waits for the other ranks, in a thread that is left if one exits."""
        # Not an executor, whose threads the interpreter waits for at its exit.
        future: futures.Future[_T] = futures.Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not future.done():
            futures.wait([future], _POLL_SECONDS)
            self.check()
        return future.result()

    def cause_of(self, error: BaseException) -> WorkerError | None:
        """Return the failure of another rank that caused rank 0's `error`, or None if all ranks are alive."""
        # A collective whose peer has died raises a RuntimeError.
        if not isinstance(error, RuntimeError):
            return None
        deadline = time.monotonic() + _GRACE_SECONDS
        while not (ended := self._ended()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self._error() if ended else None

    def join(self) -> None:
        """Wait, at most `_EXIT_SECONDS`, until every rank has exited."""
        deadline = time.monotonic() + _EXIT_SECONDS
        for rank in self._ranks:
            rank.process.wait(deadline - time.monotonic())

    def unwatch(self) -> None:
        """Stop watching."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()

    def stop(self) -> None:
        """Kill every rank, end the watching thread, and close channel and pipes; a second call does nothing."""
        with deferred_signals():
            # First, so that no rank that is killed here counts as one that failed.
            self._stopping.set()
            for rank in self._ranks:
                rank.process.kill()
            self.unwatch()
            for rank in self._ranks:
                rank.process.stop()
                rank.reports.close()
            self._ranks = []
            self._channel.close()

    def _ended(self) -> list[WorkerProcess]:
        return [rank for rank in self._ranks if rank.process.exit_code is not None]

    def _error(self) -> WorkerError:
        # Wait for other ranks to exit too: the rank seen first need not be the one that failed first.
        time.sleep(_POLL_SECONDS)
        ended = self._ended()
        for rank in ended:
            rank.read_reports()
        # The likeliest cause is a rank that was killed, then the one with the earliest exception.
        first = min(ended, key=lambda rank: rank.failure.seconds if rank.failure else 0.0)
        return WorkerError(first.exit_message())
