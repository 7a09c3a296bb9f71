"""Kernels compiled and loaded in threads before their first launch.

Most of a compilation runs outside Python, but a fifth of it inside, where one thread at a time can be. With the 42
kernels of Qwen3-0.6B that fifth decides how long all of them take, which is why threads take turns in what is Python
alone (`_triton.recorded`), and nothing else is done meanwhile.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from threading import Lock
from typing import Any

import torch

from nanovllm.kernels._triton import jit, to_compile, triton

# Engines that are made in several threads would compile the same kernels.
_one_at_a_time = Lock()


@jit
def _empty_kernel():
    pass


@cache
def compiler_ready(device: torch.device) -> Future[None]:
    """Begin, in a thread, what Triton does before its first kernel, or return what began before.

    It hashes its library, asks its tools for their versions, and has the C compiler make a module. That takes 0.8 s,
    some of them while CUDA starts and the rest while kernels are found. Without it each of the kernels that are
    compiled at once would find out all of that.
    """

    def compile_first() -> None:
        # Where the C compiler comes in, which need not wait until CUDA has started.
        _ = triton.runtime.driver.active
        # A thread has a device of its own.
        torch.cuda.set_device(device)
        _empty_kernel.warmup(grid=(1,))

    executor = ThreadPoolExecutor(1)
    ready = executor.submit(compile_first)
    executor.shutdown(wait=False)
    return ready


def compile_ahead(device: torch.device, runs: Iterable[Callable[[], None]]) -> None:
    """Compile and load, in threads, the kernels that `runs` launch, which are not launched.

    One after the other, as they would be at their first launches, they take several times as long. Those that had been
    compiled before are left as they are.
    """
    kernels: dict[Any, Callable[[], Any]] = {}
    locks: dict[Any, Lock] = {}

    def compile_and_load(compiles: Callable[[], Any]) -> None:
        torch.cuda.set_device(device)
        kernel = compiles()
        # What launches a kernel is compiled too, by the C compiler, and then found by others with the same arguments.
        with locks.setdefault(kernel.src.fn, Lock()):
            _ = kernel.run

    with _one_at_a_time:
        # In a context of its own, where nothing is left behind, an exception or not. All runs come first, because
        # beside threads that compile the interpreter takes several times as long.
        context = copy_context()
        context.run(to_compile.set, kernels)
        for run in runs:
            context.run(run)
        # Should it have failed, the kernels will say so themselves, or it no longer matters.
        wait([compiler_ready(device)])
        with _quick_turns(), ThreadPoolExecutor() as executor:
            list(executor.map(compile_and_load, kernels.values()))


@contextmanager
def _quick_turns() -> Iterator[None]:
    """Let threads ask for the interpreter after 1 ms, not 5, and have no garbage collected, a tenth of the parsing.

    A first start of Qwen3-0.6B takes 5.5 s so on a busy host, and 6.2 without.
    """
    interval, collects = sys.getswitchinterval(), gc.isenabled()
    try:
        sys.setswitchinterval(0.001)
        gc.disable()
        yield
    finally:
        sys.setswitchinterval(interval)
        if collects:
            gc.enable()
