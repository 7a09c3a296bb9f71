"""Processes that compile kernels into Triton's cache on disk.

They are forked from one that is forked before CUDA and any thread begin: a fork copies locks that other threads hold,
and nobody in the copy releases them.
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
"""How long no kernel may be done until the processes are taken to stand still."""
_INDEX_BYTES = 2
_PR_SET_PDEATHSIG = 1
_COMPILES_LAUNCHERS = getattr(triton, "__version__", "").startswith("3.6.")
"""Triton 3.6 has the C compiler make a launcher of each kernel."""


@jit
def empty_kernel():
    """Do nothing."""


class Compilers:
    """Processes that compile kernels without CUDA, for one engine.

    It forks one process now, and that one forks the others when there is something to compile. It must be made before
    whatever makes threads. Where there are other threads already, or a CUDA context, or no GPU, nothing is forked.

    Args:
        device: the engine's setting.
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

    def compile(self, jobs: list[Job], num_processes: int) -> None:
        """Compile what can be compiled so into Triton's cache, for the current device; the processes end with it."""
        if self._server is None:
            return
        pickled = []
        for job in jobs:
            with suppress(Exception):
                pickled.append(pickle.dumps(job))
        # The end of file comes when all processes have ended.
        with self, suppress(EOFError, OSError):
            self._connection.send((triton.runtime.driver.active.get_current_target(), pickled, num_processes))
            while self._connection.poll(_PATIENCE_SECONDS):
                self._connection.recv_bytes()

    def close(self) -> None:
        """End the processes; a second call does nothing."""
        server, self._server = self._server, None
        if server is not None:
            self._connection.close()
            # Where SIGCHLD is ignored, one that has ended is gone. Its workers end with it.
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
    """Compile all that the kernel's first launch would."""
    kernel = job()
    if _COMPILES_LAUNCHERS:
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


def _can_fork(device: str) -> bool:
    """Whether processes can be forked safely, and a GPU may need them; CUDA does not begin here."""
    return (
        sys.platform == "linux"
        and HAS_TRITON
        and device != "cpu"
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()
        # `is_available` would have CUDA's driver begin; this asks NVML.
        and torch.cuda.device_count() > 0
    )


def _fork(runs: Callable[[], None]) -> int:
    """Start a process that does this alone and exits, and return its number."""
    with warnings.catch_warnings():
        # Python 3.12 and later warn of any threads, among them those that OpenBLAS makes when numpy is imported. They
        # wait for work and hold no locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            # What the engine holds is not finalised here, nor do its handlers of signals run.
            gc.disable()
            # The engine, which looks for the same kernels, gives the same warnings.
            warnings.simplefilter("ignore")
            # It does not outlive the process that forked it.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for number in (signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            runs()
        finally:
            os._exit(0)
    return child


class _Target(NamedTuple):
    """Triton's driver, as far as it takes to compile: there is no device, but what to compile for."""

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
    """Wait for kernels, have workers compile them, and wait for the workers' end."""
    # Else this process would not see the end of the engine's.
    engine_connection.close()
    driver = triton.runtime.driver
    # What Triton does before its first kernel, for any target, is done when kernels come.
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
    # Where no more can be had, those that are there do it all, or nobody does.
    with suppress(OSError):
        for _ in range(min(num_workers, len(jobs))):
            _fork(partial(_work, jobs, to_do, connection))
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _work(jobs: list[Job], to_do: int, connection: Connection) -> None:
    """Compile the kernels whose indices come from a pipe, and tell the engine of each."""
    while index := os.read(to_do, _INDEX_BYTES):
        # Of what fails, the engine will find out.
        with suppress(Exception):
            compile_kernel(jobs[int.from_bytes(index, "big")])
        connection.send_bytes(b".")
