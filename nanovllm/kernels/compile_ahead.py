"""Compile kernels in threads, and load them, before their first launch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextvars import copy_context
from functools import cache
from threading import Lock
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from nanovllm.kernels._triton import NotCompiledError, compiled_only, jit, to_compile, triton
from nanovllm.utils.display import loading_bar

T = TypeVar("T")
Job = Callable[[], Any]
"""Compiles one kernel, or reads it from Triton's cache, and returns it."""

_COMPILES_LAUNCHERS = getattr(triton, "__version__", "").startswith("3.6.")
"""Whether Triton compiles a C launcher for each kernel; 3.6 does."""
# Engines created in several threads at once would compile the same kernels.
_one_at_a_time = Lock()


_aten = torch.ops.aten
_ALLOCATORS = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip


class _ZeroedMemory(TorchDispatchMode):
    """Zeroes new tensors, since torch's and flash-attn's own kernels read at indices that no kernel has written."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in _ALLOCATORS else out


@jit
def empty_kernel():
    """Do nothing; compiled to initialise Triton."""


@cache
def compiler_ready(device: torch.device) -> Future[None]:
    """Start Triton's initialisation in a thread, once per device; the future is done when it is finished.

    Triton hashes its library, queries its tools' versions, and compiles a C module, which takes 0.8 s. That overlaps
    with the start of CUDA and with the search for the kernels to compile.
    """

    def compile_first() -> None:
        # Compiles the C module; before `set_device`, so that it does not wait for CUDA to start.
        _ = triton.runtime.driver.active
        # torch's current device is per thread.
        torch.cuda.set_device(device)
        empty_kernel.warmup(grid=(1,))

    executor = ThreadPoolExecutor(1)
    ready = executor.submit(compile_first)
    executor.shutdown(wait=False)
    return ready


def compile_ahead(device: torch.device, runs: Iterable[Callable[[], None]], rank: int = 0, size: int = 1) -> None:
    """Compile and load, without launching them, the kernels that `runs` would launch, the slowest to compile first.

    Their outputs are zeros if they are new. Kernels in Triton's cache are only loaded. `rank`, `size`: this process is
    number `rank` of `size` that compile the same kernels at the same time.
    """
    kernels: dict[Any, Job] = {}
    num_workers = max(1, len(os.sched_getaffinity(0)) // size)
    with _one_at_a_time:
        # A copy, so that the context variables set here end with this call.
        context = copy_context()
        context.run(to_compile.set, kernels)
        with _ZeroedMemory():
            for run in runs:
                context.run(run)
        # Its exception is ignored: if it matters, the kernels raise it again.
        wait([compiler_ready(device)])
        context.run(compiled_only.set, True)
        missing = [job for job in _shared_out(list(kernels.values()), rank, size) if not context.run(_loaded, job)]
        with loading_bar("Compiling kernels", len(missing), "kernel", rank) as bar:
            _compile_in_threads(missing, num_workers, bar.update)
        # Raises the error of any kernel that could not be compiled.
        for job in missing:
            _ = job().run


def _shared_out(jobs: list[T], rank: int, size: int) -> list[T]:
    """Return all jobs in an order in which ranks rarely compile the same kernel twice: own ones, r, r + size, ...; then
    other ranks', in reverse order: where two ranks meet, the remaining ones are already in Triton's cache."""
    own, *others = [jobs[(rank + step) % size :: size] for step in range(size)]
    return own + [job for part in others for job in reversed(part)]


def _loaded(job: Job) -> bool:
    try:
        _ = job().run
    except NotCompiledError:
        return False
    return True


def compile_kernel(job: Job) -> None:
    """Compile everything that the kernel's first launch would compile."""
    kernel = job()
    if _COMPILES_LAUNCHERS:
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


def _compile_in_threads(jobs: list[Job], num_threads: int, on_done: Callable[[], object]) -> None:
    """Compile jobs into Triton's cache, ignoring failures; `on_done` is called after each."""
    if not jobs:
        return
    executor = ThreadPoolExecutor(min(num_threads, len(jobs)))
    try:
        for _ in as_completed([executor.submit(compile_kernel, job) for job in jobs]):
            on_done()
    finally:
        # After an interrupt the remaining jobs are cancelled.
        executor.shutdown(cancel_futures=True)
