"""Triton where it is installed; elsewhere what lets the kernels' files be imported.

Triton exists on Linux alone, and its kernels are launched for CUDA tensors alone, which no other platform here has.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

triton: Any
tl: Any

if find_spec("triton") is not None:
    triton, tl = import_module("triton"), import_module("triton.language")
else:
    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=int)

__all__ = ["tl", "triton"]
