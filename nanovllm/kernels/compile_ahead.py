"""Kernels compiled and loaded in threads before their first launch.

Most of a compilation runs outside Python, but a fifth of it in Python, whose interpreter serves one thread at a time.
So threads take turns in that part (see `jit`), which then decides, with 46 kernels, how long it takes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from threading import Lock
from typing import Any

import torch

from nanovllm.kernels._triton import jit, to_compile, triton


@jit
def _empty_kernel():
    pass


@cache
def compiler_ready(device: torch.device) -> Future[None]:
    """Begin, in a thread, what Triton does before its first kernel, or return what began before.

    It hashes its library, asks its tools for their versions, and has the C compiler make a module, which takes 0.8 s:
    as long as CUDA needs to start. Kernels compiled at once would each find out all of that.
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

    One after the other, as they would be at their first launches, they take several times as long.
    """
    kernels: dict[Any, Callable[[], Any]] = {}
    locks: dict[Any, Lock] = {}

    def compile_and_load(compiles: Callable[[], Any]) -> None:
        torch.cuda.set_device(device)
        kernel = compiles()
        # What launches a kernel is compiled too, by the C compiler, and then found by others with the same arguments.
        with locks.setdefault(kernel.src.fn, Lock()):
            _ = kernel.run

    # In a context of its own, where nothing is left behind, an exception or not. All runs come first, because beside
    # threads that compile the interpreter takes several times as long.
    context = copy_context()
    context.run(to_compile.set, kernels)
    for run in runs:
        context.run(run)
    compiler_ready(device).result()
    with _threads_of_python(), ThreadPoolExecutor() as executor:
        list(executor.map(compile_and_load, kernels.values()))


@contextmanager
def _threads_of_python() -> Iterator[None]:
    """Let threads wait 1 ms for the interpreter, and not 5; nor for the garbage collector, which takes a tenth of it.

    The kernels of Qwen3-0.6B are compiled in some 0.6 s less so, of 5.
    """
    interval, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(0.001)
    gc.disable()
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if collects:
            gc.enable()
