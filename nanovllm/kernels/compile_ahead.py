"""Kernels compiled in parallel, and loaded, before their first launch.

Processes compile them, or threads in a program that has other threads already, as a notebook has. A fifth of a
compilation is Python, which one thread of a process at a time runs: with threads, which kept 6 of 16 cores busy, a
first start of Qwen3-0.6B took 5.1 to 5.5 s, and 4.0 with processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import cache
from threading import Lock
from typing import Any, TypeVar

import torch

from nanovllm.kernels._triton import NotCompiledError, compiled_only, to_compile, triton
from nanovllm.kernels.compilers import Compilers, Job, compile_kernel, empty_kernel

T = TypeVar("T")

# Engines that are made in several threads would compile the same kernels.
_one_at_a_time = Lock()


@cache
def compiler_ready(device: torch.device) -> Future[None]:
    """Begin, in a thread, what Triton does before its first kernel, or return what began before.

    It hashes its library, asks its tools for their versions, and has the C compiler make a module. That takes 0.8 s,
    some of them while CUDA starts and the rest while kernels are found.
    """

    def compile_first() -> None:
        # Where the C compiler comes in, which need not wait until CUDA has started.
        _ = triton.runtime.driver.active
        # A thread has a device of its own.
        torch.cuda.set_device(device)
        empty_kernel.warmup(grid=(1,))

    executor = ThreadPoolExecutor(1)
    ready = executor.submit(compile_first)
    executor.shutdown(wait=False)
    return ready


def compile_ahead(
    device: torch.device,
    runs: Iterable[Callable[[], None]],
    compilers: Compilers | None = None,
    rank: int = 0,
    size: int = 1,
) -> None:
    """Compile and load the kernels that `runs` launch, which are not launched.

    One after the other, as they would be at their first launches, they take many times as long. Those that are in
    Triton's cache from before are loaded at once.

    Args:
        device: the current one.
        runs: each launches kernels; those that take the longest to compile should come first.
        compilers: processes that compile; None, or what they leave, is compiled in threads.
        rank, size: of `size` processes that compile the same kernels at the same time, this is number `rank`.
    """
    kernels: dict[Any, Job] = {}
    num_workers = max(1, len(os.sched_getaffinity(0)) // size)
    with _one_at_a_time:
        # In a context of its own, where nothing is left behind, an exception or not.
        context = copy_context()
        context.run(to_compile.set, kernels)
        for run in runs:
            context.run(run)
        # Should it have failed, the kernels will say so themselves, or it no longer matters.
        wait([compiler_ready(device)])
        context.run(compiled_only.set, True)
        missing = [job for job in _shared_out(list(kernels.values()), rank, size) if not context.run(_loaded, job)]
        if missing and compilers is not None:
            compilers.compile(missing, num_workers)
            missing = [job for job in missing if not context.run(_loaded, job)]
        _compile_in_threads(missing, num_workers)
        # Whatever could not be compiled says here what is wrong with it.
        for job in missing:
            _ = job().run


def _shared_out(jobs: list[T], rank: int, size: int) -> list[T]:
    """Return all jobs, those first that other ranks do last.

    A rank does its own, then the next rank's, and so on. Of others' it does the last ones first: where it meets their
    rank all are done, and found in Triton's cache, so few are done twice.
    """
    own, *others = [jobs[(rank + step) % size :: size] for step in range(size)]
    return own + [job for part in others for job in reversed(part)]


def _loaded(job: Job) -> bool:
    try:
        _ = job().run
    except NotCompiledError:
        return False
    return True


def _compile_in_threads(jobs: list[Job], num_threads: int) -> None:
    """Compile what can be compiled into Triton's cache."""
    if not jobs:
        return
    executor = ThreadPoolExecutor(min(num_threads, len(jobs)))
    try:
        wait([executor.submit(compile_kernel, job) for job in jobs])
    finally:
        # After an interrupt, too, none goes on.
        executor.shutdown(cancel_futures=True)
