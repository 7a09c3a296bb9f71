"""One worker process, from its start to its exit code."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from nanovllm.utils.python_process import describe_exit, start_python
from nanovllm.workers.channel import Sender
from nanovllm.workers.orders import Reply
from nanovllm.workers.worker import STARTED, WorkerFailure


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
        if self.failure is not None:
            return f"rank {self.rank} failed:\n{self.failure.traceback}"
        code = self.process.returncode
        is_explained = code < 0 or STARTED in self.stages
        hint = "" if is_explained else " before it had started; its own output says why"
        return f"rank {self.rank} {describe_exit(code)}{hint}"


def start_worker(rank: int, size: int, channel: Sender) -> WorkerProcess:
    """Start the process of a rank, which then waits for a plan."""
    receiver, sender = Pipe(duplex=False)
    descriptors = channel.receivers[rank - 1], sender.fileno()
    with sender:
        arguments = rank, size, os.getpid(), *descriptors
        title = f"nanovllm rank {rank}"
        process = start_python("nanovllm.workers.worker", "run_worker", arguments, title, descriptors)
    return WorkerProcess(rank, process, receiver)
