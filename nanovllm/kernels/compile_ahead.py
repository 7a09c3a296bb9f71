"""Kernels compiled by several processes, and loaded, before their first launch.

A fifth of a compilation is Python, where one thread of a process can be at a time: with threads instead, which kept 6
of 16 cores busy, a first start of Qwen3-0.6B took 5.1 to 5.5 s, and takes 4.0.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import copy_context
from functools import cache, partial
from threading import Lock
from typing import Any

import torch

from nanovllm.kernels._triton import NotCompiledError, compiled_only, jit, to_compile, triton
from nanovllm.utils.interrupt import deferred_signals

# How long no kernel may be done until the processes are taken to stand still.
_PATIENCE_SECONDS = 60.0
_INDEX_BYTES = 2
_PR_SET_PDEATHSIG = 1

# Engines that are made in several threads would compile the same kernels.
_one_at_a_time = Lock()


@jit
def _empty_kernel():
    pass


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
        _empty_kernel.warmup(grid=(1,))

    executor = ThreadPoolExecutor(1)
    ready = executor.submit(compile_first)
    executor.shutdown(wait=False)
    return ready


def compile_ahead(device: torch.device, runs: Iterable[Callable[[], None]]) -> None:
    """Compile and load the kernels that `runs` launch, which are not launched.

    One after the other, as they would be at their first launches, they take many times as long. Processes compile them
    into Triton's cache on disk; those that are there from before are loaded at once. The device is the current one.
    """
    kernels: dict[Any, Callable[[], Any]] = {}
    with _one_at_a_time:
        # In a context of its own, where nothing is left behind, an exception or not.
        context = copy_context()
        context.run(to_compile.set, kernels)
        for run in runs:
            context.run(run)
        # It must not be where a lock is held when processes are forked. Should it have failed, the kernels will say so
        # themselves, or it no longer matters.
        wait([compiler_ready(device)])
        context.run(compiled_only.set, True)
        missing = [compiles for compiles in kernels.values() if not context.run(_loaded, compiles)]
        _compile_in_processes(missing)
        # Whatever a process has not compiled is compiled here, and says here what is wrong with it.
        for compiles in missing:
            _ = compiles().run


def _loaded(compiles: Callable[[], Any]) -> bool:
    try:
        _ = compiles().run
    except NotCompiledError:
        return False
    return True


def _compile_in_processes(compiles: list[Callable[[], Any]]) -> None:
    """Have processes compile what they can into Triton's cache, as many of them as there are cores.

    They are forked, which takes 12 ms each, so that they have all that was imported and found out. CUDA is not theirs
    to use, nor does a compilation. What another thread holds locked stays so in such a process, of which Python 3.12
    and later warn: should none get on, they are ended, and the rest is compiled here.
    """
    if not compiles:
        return
    left, to_do, done = len(compiles), os.pipe(), os.pipe()
    os.write(to_do[1], b"".join(index.to_bytes(_INDEX_BYTES, "big") for index in range(left)))
    os.close(to_do[1])
    children: list[int] = []
    try:
        try:
            # Where no more can be had, those that are there do it all, or nobody does.
            with deferred_signals(), suppress(OSError):
                for _ in range(min(len(os.sched_getaffinity(0)), left)):
                    children.append(_fork(partial(_compile_some, compiles, to_do[0], done[1])))
        finally:
            os.close(done[1])
        told = select.poll()
        told.register(done[0], select.POLLIN)
        # Nothing to read means that none of the processes is left.
        while left and told.poll(1000 * _PATIENCE_SECONDS) and (number := len(os.read(done[0], left))):
            left -= number
    finally:
        for child in children:
            # Where SIGCHLD is ignored, those that have ended are gone.
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        os.close(to_do[0])
        os.close(done[0])


def _fork(runs: Callable[[], None]) -> int:
    """Start a process that does this alone and exits, and return its number."""
    child = os.fork()
    if not child:
        try:
            gc.disable()
            # It does not outlive an engine that is killed, nor hold its GPU's memory; a handler of the engine's would
            # go on with the engine.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            runs()
        finally:
            os._exit(0)
    return child


def _compile_some(compiles: list[Callable[[], Any]], to_do: int, done: int) -> None:
    """Compile the kernels whose indices come from one pipe, and tell another of each."""
    while index := os.read(to_do, _INDEX_BYTES):
        kernel = compiles[int.from_bytes(index, "big")]()
        # Of Triton 3.6 this is compiled too, by the C compiler.
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
        os.write(done, b".")
