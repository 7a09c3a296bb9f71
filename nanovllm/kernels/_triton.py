"""Triton if it is installed, else stubs with which the kernels' files can be imported.

Ops launch Triton kernels on devices for which `triton_obstacle` returns None, and use plain torch on all others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

triton: Any
tl: Any
gdc_wait: Any
gdc_launch_dependents: Any

to_compile: ContextVar[dict[Any, Callable[[], Any]] | None] = ContextVar("to_compile", default=None)
"""If not None, launches do not run: they record here, by (kernel, key), a function that compiles the kernel."""
compiled_only: ContextVar[bool] = ContextVar("compiled_only", default=False)
"""If true, a kernel that is not in Triton's cache raises NotCompiledError instead of being compiled."""


class NotCompiledError(Exception):
    """A kernel is not in Triton's cache."""


HAS_TRITON = find_spec("triton") is not None
_PDL_SETTING = os.environ.get("NANOVLLM_PDL")
"""Switch for debugging: with "wait" no kernel starts before the previous one is done; see kernels/README.md."""
if _PDL_SETTING not in (None, "wait"):
    raise ValueError(f"NANOVLLM_PDL must be 'wait' or not set, not {_PDL_SETTING!r}")
_LEAST_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs with bfloat16 and asynchronous copies (Ampere)."""

if HAS_TRITON:
    triton, tl = import_module("triton"), import_module("triton.language")
    _cuda = import_module("triton.language.extra.cuda")
    gdc_wait, gdc_launch_dependents = _cuda.gdc_wait, _cuda.gdc_launch_dependents
    # Triton's interpreter cannot run inline assembly.
    INTERPRETED: Any = tl.constexpr(triton.knobs.runtime.interpret)

    def recorded(base: Any) -> Any:
        """Return a subclass of the kernel class `base` whose kernels `compile_ahead` can compile."""

        class Kernel(base):
            ASTSource: Any

            def create_binder(self) -> Any:
                binder = super().create_binder()
                self.ASTSource = _refusing(self.ASTSource)
                return binder

            def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
                # Kernels that must agree to the bit were written, and all figures measured, with products and sums
                # fused. From Triton 3.10 on that is off unless it is asked for; 3.9 warns where it is not.
                kwargs["enable_fp_fusion"] = True
                if _PDL_SETTING == "wait":
                    # The same code: `gdc_wait` and `gdc_launch_dependents` have no effect then.
                    kwargs["launch_pdl"] = False
                return super().run(*args, grid=grid, warmup=warmup or to_compile.get() is not None, **kwargs)

            def _do_compile(self, key: Any, *args: Any, **kwargs: Any) -> Any:
                compiles = partial(super()._do_compile, key, *args, **kwargs)
                kernels = to_compile.get()
                if kernels is None:
                    return compiles()
                kernels.setdefault((self, key), compiles)
                return None

        return Kernel

    @cache
    def _refusing(base: Any) -> Any:
        """Return a subclass of the kernel source class `base` that obeys `compiled_only`."""

        class Source(base):
            def make_ir(self, *args: Any) -> Any:
                if compiled_only.get():
                    raise NotCompiledError
                return super().make_ir(*args)

        return Source

    _Kernel = recorded(triton.JITFunction)

    def jit(function: Any = None, *, do_not_specialize: Sequence[str] = (), unaligned: Sequence[str] = ()) -> Any:
        """Like `triton.jit` for `compile_ahead`; pointers in `unaligned` are not specialised by alignment."""
        if function is None:
            return partial(jit, do_not_specialize=do_not_specialize, unaligned=unaligned)
        make = triton.jit if INTERPRETED.value else _Kernel
        options = {"do_not_specialize_on_alignment": list(unaligned)} if unaligned else {}
        return make(function, do_not_specialize=list(do_not_specialize), **options)

else:
    triton = SimpleNamespace()
    tl = SimpleNamespace(constexpr=lambda value: value)
    gdc_wait = gdc_launch_dependents = None
    INTERPRETED = False

    def jit(function: Any = None, *, do_not_specialize: Sequence[str] = (), unaligned: Sequence[str] = ()) -> Any:
        """Return the function unchanged."""
        return function or jit


@jit
def wait_for_previous(PDL: tl.constexpr, LAUNCHES: tl.constexpr = True):
    """Wait for the previous kernel's results, and by default let the next kernel start; see `pdl_options`."""
    if PDL:
        gdc_wait()
        if LAUNCHES:
            gdc_launch_dependents()


@jit
def launch_next(PDL: tl.constexpr):
    """Let the next kernel start, after `wait_for_previous`."""
    if PDL:
        gdc_launch_dependents()


@cache
def triton_obstacle(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on a device, or None if they can."""
    if device.type != "cuda":
        return f"they need a CUDA device, not {device.type!r}"
    if torch.version.hip is not None:
        # AMD GPUs report capabilities too: an MI250 reports Hopper's.
        return f"they need an NVIDIA GPU, and this PyTorch is built for ROCm {torch.version.hip}"
    if not HAS_TRITON:
        return "Triton, which PyTorch's CUDA builds for Linux bring along, is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, _LEAST_CAPABILITY))
        return f"they need compute capability {least} or more, and {device} has {found}"
    return None


def uses_triton(device: torch.device) -> bool:
    """Return whether ops on a device's tensors run as Triton kernels instead of plain torch."""
    return triton_obstacle(device) is None


@cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """Return launch arguments of kernels with a `PDL` flag: programmatic dependent launch from Hopper on.

    Such a kernel may start before the previous one is done. Each kernel waits (`gdc_wait`) before it writes, or reads
    results of the previous one, and lets the next one start (`gdc_launch_dependents`) only afterwards. All kernels
    before the previous one are therefore finished, and their results may be read before `gdc_wait`.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors, and the maximum shared memory of a program in bytes."""
    if device.type != "cuda":
        return 0, 0
    properties = torch.cuda.get_device_properties(device)
    # torch's stubs lack it.
    shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return int(properties.multi_processor_count), int(shared_bytes)


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether kernels with Hopper's matrix instructions, which no later GPU has, can run on the device."""
    return uses_triton(device) and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def converts_e4m3(device: torch.device) -> bool:
    """Return whether a GPU has instructions that convert between e4m3 and other floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
