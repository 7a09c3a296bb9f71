"""Processes that compile kernels into Triton's cache on disk.

A server process is forked before CUDA and any thread start, and forks the workers later. A process forked beside
other threads could inherit locks that they hold, which nothing in the copy would release.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch

from nanovllm.kernels._triton import HAS_TRITON, jit, triton
from nanovllm.utils.interrupt import deferred_signals

Self = TypeVar("Self", bound="Compilers")
Job = Callable[[], Any]
"""Compiles one kernel, or reads it from Triton's cache, and returns it."""

_PATIENCE_SECONDS = 60.0
"""If no kernel is finished for this long, the processes are considered stuck."""
_INDEX_BYTES = 2
_PR_SET_PDEATHSIG = 1
_COMPILES_LAUNCHERS = getattr(triton, "__version__", "").startswith("3.6.")
"""Whether Triton compiles a C launcher for each kernel; 3.6 does."""


@jit
def empty_kernel():
    """Do nothing; compiled to initialise Triton."""


class Compilers:
    """Processes that compile one engine's kernels without CUDA.

    The constructor forks the server, so it must run before anything starts threads. If there are other threads, a CUDA
    context, or no GPU, it forks nothing, and `compile` does nothing.

    Args:
        device: the engine's `device` setting.
    """

    def __init__(self, device: str = "auto") -> None:
        self._server: int | None = None
        if not _can_fork(device):
            return
        self._connection, server_connection = Pipe()
        try:
            with server_connection, deferred_signals(), suppress(OSError):
                self._server = _fork(partial(_serve, server_connection, self._connection))
        except BaseException:
            self.close()
            raise

    def compile(self, jobs: list[Job], num_processes: int, on_done: Callable[[], object]) -> None:
        """Compile jobs for the current device into Triton's cache, ignoring failures; then end the processes.

        `on_done` is called after each job.
        """
        if self._server is None:
            return
        pickled = []
        for job in jobs:
            with suppress(Exception):
                pickled.append(pickle.dumps(job))
        # EOFError is raised when all processes have ended.
        with self, suppress(EOFError, OSError):
            self._connection.send((triton.runtime.driver.active.get_current_target(), pickled, num_processes))
            while self._connection.poll(_PATIENCE_SECONDS):
                self._connection.recv_bytes()
                on_done()

    def close(self) -> None:
        """End the processes; a second call does nothing."""
        server, self._server = self._server, None
        if server is not None:
            self._connection.close()
            # If SIGCHLD is ignored, the system has reaped a process that has ended. The workers die with the server.
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(server, signal.SIGKILL)
                os.waitpid(server, 0)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def compile_kernel(job: Job) -> None:
    """Compile everything that the kernel's first launch would compile."""
    kernel = job()
    if _COMPILES_LAUNCHERS:
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


def _can_fork(device: str) -> bool:
    """Return whether forking is safe and a GPU may need the kernels; does not initialise CUDA."""
    return (
        sys.platform == "linux"
        and HAS_TRITON
        and device != "cpu"
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()
        # `is_available` would initialise CUDA's driver; `device_count` asks NVML.
        and torch.cuda.device_count() > 0
    )


def _fork(runs: Callable[[], None]) -> int:
    """Fork a process that calls `runs` and exits; return its id."""
    with warnings.catch_warnings():
        # Python 3.12 and later warn of any threads, including OpenBLAS's, which are idle and hold no locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            # The engine's objects must not be finalised in this copy, nor its signal handlers run.
            gc.disable()
            # The engine's process gives the same warnings.
            warnings.simplefilter("ignore")
            # The system kills this process when the one that forked it ends.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            runs()
        finally:
            os._exit(0)
    return child


class _Target(NamedTuple):
    """A driver for Triton that only knows the target to compile for, and has no device."""

    target: Any

    @property
    def launcher_cls(self) -> Any:
        return import_module("triton.backends.nvidia.driver").CudaLauncher

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _serve(connection: Connection, engine_connection: Connection) -> None:
    """Run the server: receive jobs, fork workers that compile them, and wait until the workers have ended."""
    # Otherwise `recv` would not raise when the engine's process ends.
    engine_connection.close()
    driver = triton.runtime.driver
    # Initialises Triton, for an arbitrary target, before the jobs arrive.
    driver.set_active(_Target(import_module("triton.backends.compiler").GPUTarget("cuda", 80, 32)))
    empty_kernel.warmup(grid=(1,))
    target, pickled, num_workers = connection.recv()
    driver.set_active(_Target(target))
    jobs = []
    for job in pickled:
        with suppress(Exception):
            jobs.append(pickle.loads(job))
    to_do, write_end = os.pipe()
    os.write(write_end, b"".join(index.to_bytes(_INDEX_BYTES, "big") for index in range(len(jobs))))
    os.close(write_end)
    # If a fork fails, the workers forked so far compile everything; without any, the engine compiles in threads.
    with suppress(OSError):
        for _ in range(min(num_workers, len(jobs))):
            _fork(partial(_work, jobs, to_do, connection))
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _work(jobs: list[Job], to_do: int, connection: Connection) -> None:
    """Run a worker: compile the jobs whose indices it reads from the pipe `to_do`, and report each to the engine."""
    while index := os.read(to_do, _INDEX_BYTES):
        # The engine compiles again what failed, and raises its error.
        with suppress(Exception):
            compile_kernel(jobs[int.from_bytes(index, "big")])
        connection.send_bytes(b".")
