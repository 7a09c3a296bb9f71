"""Gates, computed in float32: of an MLP, SiLU(gate) * up (SwiGLU, Shazeer 2020, arXiv:2002.05202), and sigmoids.

These are beside a branch: of attention's output, a number for each element, or of a shared expert, one for each token.
"""

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
    assert gate_up.is_contiguous()
    num_rows, size, block = len(gate_up), gate_up.shape[1] // 2, 1024
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    _silu_and_mul_kernel[(num_rows, triton.cdiv(size, block))](
        gate_up, out, size, BLOCK=block, num_warps=4, **pdl_options(gate_up.device)
    )
    return out


def gate_heads_ref(x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Plain torch form of `gate_heads`."""
    gates = heads[:, 1 : 2 * x.shape[1] : 2]
    return (x.float() * gates.float().sigmoid()).to(x.dtype)


@jit
def _gate_heads_kernel(
    x_ptr, heads_ptr, out_ptr, row_stride,
    NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < NUM_HEADS * SIZE
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * (NUM_HEADS * SIZE) + offsets, mask=mask, other=0.0).to(tl.float32)
    # A head of gates comes after each head of queries.
    places = offsets + (offsets // SIZE + 1) * SIZE
    gate = tl.load(heads_ptr + token * row_stride + places, mask=mask, other=0.0).to(tl.float32)
    out = x / (1 + tl.exp(-gate))
    tl.store(out_ptr + token * (NUM_HEADS * SIZE) + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def gate_heads(x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return x times the sigmoids of its gates.

    Args:
        x: [num_tokens, num_heads, size], contiguous.
        heads: [num_tokens, at least 2 * num_heads, size], heads contiguous; each head of queries, then of gates.
    """
    if not uses_triton(x.device):
        return gate_heads_ref(x, heads)
    num_tokens, num_heads, size = x.shape
    assert x.is_contiguous() and heads.stride()[1:] == (size, 1)
    out, block = torch.empty_like(x), 1024
    _gate_heads_kernel[(num_tokens, triton.cdiv(num_heads * size, block))](
        x, heads, out, heads.stride(0), NUM_HEADS=num_heads, SIZE=size, BLOCK=block, num_warps=4,
        **pdl_options(x.device),
    )  # fmt: skip
    return out


def add_gated_ref(
    x: torch.Tensor, weight: torch.Tensor | None, branch: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Plain torch form of `add_gated`."""
    gate = 1 if weight is None else (x.float() @ weight.float().T).sigmoid()
    total = branch.float() * gate + (out.float().sum(0) if out.dim() == 3 else out.float())
    return total.to(x.dtype)


@jit
def _add_gated_kernel(
    x_ptr, weight_ptr, branch_ptr, out_ptr, total_ptr, size, out_stride, part_stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    wait_for_previous(PDL)
    total = tl.load(branch_ptr + row * size + offsets, mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * size + offsets, mask=mask, other=0.0).to(tl.float32)
        total *= 1 / (1 + tl.exp(-tl.sum(x * weight, axis=0)))
    for part in tl.static_range(PARTS):
        ptrs = out_ptr + part * part_stride + row * out_stride + offsets
        total += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(total_ptr + row * size + offsets, total.to(total_ptr.dtype.element_ty), mask=mask)


def add_gated(x: torch.Tensor, weight: torch.Tensor | None, branch: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return `sigmoid(x @ weight.T) * branch + out`, [num_rows, size].

    Args:
        x: [num_rows, size], contiguous.
        weight: [1, size]; None: `branch + out`.
        branch: [num_rows, size], contiguous.
        out: [num_rows, size], or the parts of a sum, [num_parts, num_rows, size].
    """
    if not uses_triton(x.device):
        return add_gated_ref(x, weight, branch, out)
    num_rows, size = x.shape
    assert x.is_contiguous() and branch.is_contiguous() and out.stride(-1) == 1
    total, block = torch.empty_like(x), triton.next_power_of_2(size)
    _add_gated_kernel[(num_rows,)](
        x, weight, branch, out, total, size, out.stride(-2), out.stride(0), PARTS=len(out) if out.dim() == 3 else 1,
        BLOCK=block, num_warps=min(8, max(1, block // 512)), **pdl_options(x.device),
    )  # fmt: skip
    return total
