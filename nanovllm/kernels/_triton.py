"""Triton where it is installed; elsewhere what lets the kernels' files be imported.

Triton exists on Linux alone, and its kernels are launched for CUDA tensors alone, which no other platform here has.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

triton: Any
tl: Any
gdc_wait: Any
gdc_launch_dependents: Any

if find_spec("triton") is not None:
    triton, tl = import_module("triton"), import_module("triton.language")
    _cuda = import_module("triton.language.extra.cuda")
    gdc_wait, gdc_launch_dependents = _cuda.gdc_wait, _cuda.gdc_launch_dependents
else:
    triton = SimpleNamespace(jit=lambda function=None, **_: function or (lambda wrapped: wrapped))
    tl = SimpleNamespace(constexpr=int)
    gdc_wait = gdc_launch_dependents = None


@cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel with a `PDL` flag: programmatic dependent launch where the device has it (Hopper).

    Such a kernel may start before the one ahead of it has ended. Each of them waits (`gdc_wait`) before it reads what
    another kernel wrote, or writes at all; so what comes before the one ahead has ended too.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


__all__ = ["gdc_launch_dependents", "gdc_wait", "pdl_options", "tl", "triton"]
