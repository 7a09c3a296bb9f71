"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) with the residual addition before it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.fast_math import rsqrt


class Norm(NamedTuple):
    """An RMS norm's weight, [size], and epsilon."""

    weight: torch.Tensor
    eps: float


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `rms_norm`."""
    dtype = weight.dtype if x.dim() == 3 else x.dtype
    branch = x.sum(0) if x.dim() == 3 else x
    total = (branch if residual is None else branch + residual).to(dtype)
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(dtype), total


@jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, size, x_stride, part_stride,
    PARTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    total = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x_ptr + part * part_stride + row * x_stride + offsets, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + row * size + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL or PARTS > 1:
        # The norm reads the rounded sum, which is what the next layer adds to.
        rounded = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * size + offsets, rounded, mask=mask)
        total = rounded.to(tl.float32)
    scale = rsqrt(tl.sum(total * total, axis=0) / size + eps)
    tl.store(out_ptr + row * size + offsets, (total * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RMSNorm(x + residual) and `x + residual`, computed in float32, in x's dtype; of parts in the weight's.

    Args:
        x: [num_rows, size], or the parts of a sum, [num_parts, num_rows, size], in any float.
        weight: [size].
        eps: added to the mean square.
        residual: [num_rows, size], or None for zero.

    Returns:
        Two tensors [num_rows, size]; the second is x itself if there is nothing to add.
    """
    if not uses_triton(x.device):
        return rms_norm_ref(x, weight, eps, residual)
    num_rows, size = x.shape[-2:]
    parts, dtype = (len(x), weight.dtype) if x.dim() == 3 else (1, x.dtype)
    assert x.stride(-1) == 1 and (residual is None or residual.is_contiguous())
    out = torch.empty(num_rows, size, dtype=dtype, device=x.device)
    total = x if residual is None and parts == 1 else torch.empty_like(out)
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        x, residual, weight, out, total, eps, size, x.stride(-2), x.stride(0),
        PARTS=parts, HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=min(8, max(1, block // 512)),
        **pdl_options(x.device),
    )  # fmt: skip
    return out, total
