"""The gated activation of the MLP, SiLU(gate) * up (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous


def silu_and_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """Plain torch form of `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype == torch.float32:
        return functional.silu(gate) * up
    return (functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


@jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    wait_for_previous(PDL)
    gate = tl.load(gate_up_ptr + row * 2 * size + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + offsets, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return SiLU(gate) * up, [num_rows, size], computed in float32.

    gate_up: [num_rows, 2 * size], contiguous; the gate's columns first.
    """
    if not uses_triton(gate_up.device):
        return silu_and_mul_ref(gate_up)
    num_rows, double = gate_up.shape
    size = double // 2
    assert gate_up.is_contiguous()
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    grid = (num_rows, triton.cdiv(size, block))
    _silu_and_mul_kernel[grid](gate_up, out, size, BLOCK=block, num_warps=4, **pdl_options(gate_up.device))
    return out
