"""One worker process, from its start to its exit code.

A worker is a Python process that imports this library but not the user's program. It is started by `subprocess`,
because a fork of this process would, at its exit, end the processes that `multiprocessing` started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable

from nanovllm.workers.channel import Sender
from nanovllm.workers.orders import Reply
from nanovllm.workers.worker import STARTED, WorkerFailure

_PROGRAM = "import sys; sys.path[:] = {path}; from nanovllm.workers.worker import run_worker; run_worker({arguments})"


@dataclass
class WorkerProcess:
    """One rank's process, the reports it has sent, and its failure if it sent one."""

    rank: int
    process: subprocess.Popen[bytes]
    reports: Connection
    stages: set[str] = field(default_factory=set)
    failure: WorkerFailure | None = None
    reply: Reply | None = None
    # Reentrant: a signal handler may end the engine.
    _polling: threading.RLock = field(default_factory=threading.RLock)

    def read_reports(self, timeout: float = 0.0) -> None:
        """Receive what the rank has sent, or sends within `timeout` seconds."""
        try:
            while self.reports.poll(timeout):
                report = self.reports.recv()
                if isinstance(report, WorkerFailure):
                    self.failure = report
                elif isinstance(report, Reply):
                    self.reply = report
                else:
                    self.stages.add(report)
                # Most often it is the one that is waited for.
                timeout = 0.0
        except (EOFError, OSError):  # it has ended, perhaps within a report; its exit code says how
            time.sleep(timeout)

    def exit_code(self) -> int | None:
        """Return its process's exit code, or None while it runs."""
        # While one thread is in `Popen.poll`, another one gets None even if the process has ended.
        with self._polling:
            return self.process.poll()

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended."""
        return self.exit_code() is not None

    @property
    def failure_time(self) -> float:
        """Sort key of ended ranks, likeliest cause first: killed ranks (0), then by the time of their exception."""
        return self.failure.seconds if self.failure else 0.0

    def exit_message(self) -> str:
        """Describe how the rank's process, which has ended, ended."""
        code = self.process.returncode
        if self.failure is not None:
            return f"rank {self.rank} failed:\n{self.failure.traceback}"
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"rank {self.rank} was killed by {names.get(-code, f'signal {-code}')}"
        hint = "" if STARTED in self.stages else " before it had started; its own output says why"
        return f"rank {self.rank} exited with code {code}{hint}"


def start_worker(rank: int, size: int, channel: Sender) -> WorkerProcess:
    """Start the process of a rank, which then waits for a plan."""
    receiver, sender = Pipe(duplex=False)
    descriptors = channel.receivers[rank - 1], sender.fileno()
    arguments = ", ".join(map(str, (rank, size, os.getpid(), *descriptors)))
    # The import system ignores other entries, which need not have a valid repr.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    program = _PROGRAM.format(path=path, arguments=arguments)
    command = [os.fsdecode(get_executable()), "-c", program, f"nanovllm rank {rank}"]
    with _blocked_sigint(), sender:
        process = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL)
    return WorkerProcess(rank, process, receiver)


@contextmanager
def _blocked_sigint() -> Iterator[None]:
    """Block SIGINT in this thread inside the `with` block; processes started there inherit the mask and keep it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
