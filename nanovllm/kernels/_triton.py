"""Triton where it is installed; elsewhere what lets the kernels' files be imported.

Triton exists on Linux alone, and its kernels are launched for CUDA tensors alone, which no other platform here has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch

triton: Any
tl: Any
gdc_wait: Any
gdc_launch_dependents: Any

# Kernels that are compiled instead of launched; None where they are launched.
_compiled: ContextVar[list[Any] | None] = ContextVar("compiled", default=None)

if find_spec("triton") is not None:
    triton, tl = import_module("triton"), import_module("triton.language")
    _cuda = import_module("triton.language.extra.cuda")
    gdc_wait, gdc_launch_dependents = _cuda.gdc_wait, _cuda.gdc_launch_dependents

    def recorded(base: Any) -> Any:
        """Return the class of kernels `base`, but such that `compile_ahead` can compile them."""

        class Kernel(base):
            def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
                compiled = _compiled.get()
                kernel = super().run(*args, grid=grid, warmup=warmup or compiled is not None, **kwargs)
                if compiled is not None:
                    compiled.append(kernel)
                return kernel

        return Kernel

    _Kernel = recorded(triton.JITFunction)

    def jit(function: Any = None, *, do_not_specialize: Sequence[str] = (), unaligned: Sequence[str] = ()) -> Any:
        """Make a kernel that `compile_ahead` can compile; `triton.jit` otherwise.

        It is compiled once for all values of the arguments in `do_not_specialize`, and for pointers in `unaligned`
        whether they are aligned or not.
        """
        if function is None:
            return partial(jit, do_not_specialize=do_not_specialize, unaligned=unaligned)
        make = triton.jit if triton.knobs.runtime.interpret else _Kernel
        options = {"do_not_specialize_on_alignment": list(unaligned)} if unaligned else {}
        return make(function, do_not_specialize=list(do_not_specialize), **options)

else:
    triton = SimpleNamespace()
    tl = SimpleNamespace(constexpr=int)
    gdc_wait = gdc_launch_dependents = None

    def jit(function: Any = None, *, do_not_specialize: Sequence[str] = (), unaligned: Sequence[str] = ()) -> Any:
        """Leave a kernel as it is."""
        return function or jit


def compile_ahead(device: torch.device, runs: Iterable[Callable[[], None]]) -> None:
    """Compile and load, in threads, the kernels that `runs` launch, which are not launched.

    One after the other, as they would be at their first launches, they take several times as long.
    """
    kernels: list[Any] = []
    locks: dict[Any, Lock] = {}

    def load(kernel: Any) -> Any:
        # A thread has a device of its own.
        torch.cuda.set_device(device)
        # What launches a kernel is compiled too, by the C compiler, and then found by others with the same arguments.
        with locks.setdefault(kernel.src.fn, Lock()):
            _ = kernel.run
        return kernel

    def record() -> None:
        _compiled.set(kernels)
        # Each is loaded as soon as it is compiled, while others still are.
        loading = SimpleNamespace(submit=lambda compiled: executor.submit(lambda: load(compiled())))
        with triton.AsyncCompileMode(loading):
            for run in runs:
                run()

    with ThreadPoolExecutor() as executor:
        # In a context of its own, where nothing is left behind, an exception or not.
        copy_context().run(record)
        done = [kernel.result() if isinstance(kernel, triton.FutureKernel) else kernel for kernel in kernels]
        # Those that had been compiled before.
        list(executor.map(load, {id(kernel): kernel for kernel in done}.values()))


@cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel with a `PDL` flag: programmatic dependent launch where the device has it (Hopper).

    Such a kernel may start before the one ahead of it has ended. Each of them waits (`gdc_wait`) before it reads what
    the one ahead wrote, or writes at all, and lets the next one start (`gdc_launch_dependents`) no sooner than that. So
    what comes before the one ahead has ended too, and may be read before waiting: a step of Qwen3-0.6B takes 0.64 ms at
    1 row on an H200 with what is looked up so, and 0.70 if all kernels wait first.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """How many programs the device runs at once, one a multiprocessor, and the shared bytes that one can have."""
    if device.type != "cuda":
        return 0, 0
    properties = torch.cuda.get_device_properties(device)
    # torch's stubs lack it.
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return int(properties.multi_processor_count), int(shared_bytes)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has Hopper's matrix instructions, which no later one has."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


__all__ = [
    "compile_ahead",
    "device_limits",
    "gdc_launch_dependents",
    "gdc_wait",
    "is_hopper",
    "jit",
    "pdl_options",
    "recorded",
    "tl",
    "triton",
]
