"""Rounding of two floats by one instruction is torch's, also of ties, subnormals, infinity and NaN."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from nanovllm.kernels._triton import jit, tl
from nanovllm.kernels.fast_math import pack_pair, round_to
from tests.test_kernels import DEVICE, DTYPES


@jit
def _round_kernel(x_ptr, rounded_ptr, packed_ptr, like_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    dtype: tl.constexpr = like_ptr.dtype.element_ty
    offsets = tl.arange(0, SIZE)
    x = tl.load(x_ptr + offsets)
    tl.store(rounded_ptr + offsets, round_to(x, dtype))
    tl.store(packed_ptr + offsets, pack_pair(x, -x, dtype))


@pytest.mark.parametrize("size", [1, 16, 1024])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rounding(dtype: torch.dtype, size: int) -> None:
    largest, spacing = torch.finfo(dtype).max, torch.finfo(dtype).eps
    # Halfway to the next of an even and of an odd value, and beyond what is finite, for float16.
    awkward = [1 + spacing / 2, 1 + 1.5 * spacing, -(1 + spacing / 2), torch.finfo(dtype).tiny / 3, 70_000.0]
    awkward += [float("nan"), float("inf"), -float("inf"), largest, -largest, -0.0, 3e38, 1e-40, 1e-7, 0.1, -2.5]
    x = torch.cat((torch.tensor(awkward), torch.randn(1008)))[:size].to(DEVICE)
    rounded, packed = torch.empty_like(x), torch.empty(size, dtype=torch.int32, device=DEVICE)
    _round_kernel[(1,)](x, rounded, packed, torch.empty(1, dtype=dtype, device=DEVICE), SIZE=size)
    wanted = x.to(dtype)
    assert torch.equal(rounded.nan_to_num(7.0), wanted.float().nan_to_num(7.0))
    assert torch.equal(rounded.isnan(), x.isnan()) and torch.equal(rounded.signbit(), wanted.float().signbit())
    pairs = packed.view(torch.int16).view(dtype).view(size, 2)
    assert torch.equal(pairs.nan_to_num(7.0), torch.stack((wanted, -wanted), 1).nan_to_num(7.0))


@pytest.mark.compat
def test_one_element_compiles_too() -> None:
    # Compiling needs no GPU, and the interpreter sees nothing of it.
    program = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.test_fast_math import _round_kernel
for kind in ("bf16", "fp16"):
    signature = {"x_ptr": "*fp32", "rounded_ptr": "*fp32", "packed_ptr": "*i32", "like_ptr": f"*{kind}"}
    source = ASTSource(_round_kernel, {**signature, "SIZE": "constexpr"}, {(4,): 1})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
