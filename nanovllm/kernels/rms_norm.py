"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467): after the residual addition; of all queries and all keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels._triton import jit, launch_next, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.fast_math import rsqrt


class Norm(NamedTuple):
    """An RMS norm's weight, [size], and epsilon."""

    weight: torch.Tensor
    eps: float


def norm_dtype(x: torch.Tensor, norm: Norm, residual: torch.Tensor | None = None) -> torch.dtype:
    """Return the dtype of what `rms_norm` returns; the weight may be kept in float32."""
    if x.dim() != 3:
        return x.dtype
    return norm.weight.dtype if residual is None else residual.dtype


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `rms_norm`."""
    dtype = norm_dtype(x, Norm(weight, eps), residual)
    branch = x.sum(0) if x.dim() == 3 else x
    total = (branch if residual is None else branch + residual).to(dtype)
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(dtype), total


@jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, size, x_stride, part_stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL, LAUNCHES=False)
    total = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x_ptr + part * part_stride + row * x_stride + offsets, mask=mask, other=0.0)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + row * size + offsets, mask=mask, other=0.0).to(tl.float32)
    # The next kernel's weights would come before these few rows.
    launch_next(PDL)
    if residual_ptr is not None or PARTS > 1:
        # The norm reads the rounded sum, which is what the next layer adds to.
        rounded = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * size + offsets, rounded, mask=mask)
        total = rounded.to(tl.float32)
    scale = rsqrt(tl.sum(total * total, axis=0) / size + eps)
    tl.store(out_ptr + row * size + offsets, (total * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RMSNorm(x + residual) and `x + residual`, computed in float32, in the dtype of `norm_dtype`.

    `x`: [num_rows, size], or the parts of a sum, [num_parts, num_rows, size], in any float; `residual`: [num_rows,
    size], or None for zero. The second result is x itself if there is nothing to add.
    """
    if not uses_triton(x.device):
        return rms_norm_ref(x, weight, eps, residual)
    num_rows, size = x.shape[-2:]
    parts, dtype = len(x) if x.dim() == 3 else 1, norm_dtype(x, Norm(weight, eps), residual)
    assert x.stride(-1) == 1 and (residual is None or residual.is_contiguous())
    out = torch.empty(num_rows, size, dtype=dtype, device=x.device)
    total = x if residual is None and parts == 1 else torch.empty_like(out)
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        x, residual, weight, out, total, eps, size, x.stride(-2), x.stride(0),
        PARTS=parts, BLOCK=block, num_warps=min(8, max(1, block // 512)), **pdl_options(x.device),
    )  # fmt: skip
    return out, total


class QKNorms(NamedTuple):
    """Norms over all heads of queries and over all of keys, at once and in place (OLMo 2, arXiv:2501.00656).

    Of several ranks each has some heads: their `sum_squares` are added up before `normalize_qk`.

    Attributes:
        q_weight, k_weight: [q_size] and [k_size], of this rank's heads.
        q_width, k_width: elements of the heads of all ranks.
        eps: added to the mean square.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    q_width: int
    k_width: int
    eps: float


def _qk(qkv: torch.Tensor, norms: QKNorms) -> tuple[torch.Tensor, torch.Tensor]:
    q_size, k_size = len(norms.q_weight), len(norms.k_weight)
    return qkv[:, :q_size], qkv[:, q_size : q_size + k_size]


def sum_squares_ref(qkv: torch.Tensor, norms: QKNorms) -> torch.Tensor:
    """Plain torch form of `sum_squares`."""
    return torch.stack([part.float().square().sum(1) for part in _qk(qkv, norms)], dim=1)


def normalize_qk_ref(qkv: torch.Tensor, norms: QKNorms, squares: torch.Tensor | None = None) -> None:
    """Plain torch form of `normalize_qk`."""
    squares = sum_squares_ref(qkv, norms) if squares is None else squares
    scales = torch.rsqrt(squares / squares.new_tensor([norms.q_width, norms.k_width]) + norms.eps)
    query, key = _qk(qkv, norms)
    query.copy_(query.float() * scales[:, :1] * norms.q_weight.float())
    key.copy_(key.float() * scales[:, 1:] * norms.k_weight.float())


@jit
def _qk_norm_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, squares_ptr, eps, q_width, k_width, row_stride,
    Q_SIZE: tl.constexpr, K_SIZE: tl.constexpr, BLOCK: tl.constexpr, ONLY_SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    # Of queries if the part is 0, of keys if it is 1.
    q_mask, k_mask = offsets < Q_SIZE * (1 - part), offsets < K_SIZE * part
    mask, width = q_mask | k_mask, q_width * (1 - part) + k_width * part
    weight = tl.load(q_weight_ptr + offsets, mask=q_mask, other=0.0)
    weight += tl.load(k_weight_ptr + offsets, mask=k_mask, other=0.0)
    wait_for_previous(PDL)
    ptrs = qkv_ptr + row * row_stride + part * Q_SIZE + offsets
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if ONLY_SUMS:
        tl.store(squares_ptr + 2 * row + part, tl.sum(x * x, axis=0))
    else:
        square = tl.sum(x * x, axis=0) if squares_ptr is None else tl.load(squares_ptr + 2 * row + part)
        scale = rsqrt(square / width + eps)
        tl.store(ptrs, (x * scale * weight.to(tl.float32)).to(qkv_ptr.dtype.element_ty), mask=mask)


def _normalize_qk(qkv: torch.Tensor, norms: QKNorms, squares: torch.Tensor | None, only_sums: bool) -> None:
    q_size, k_size = len(norms.q_weight), len(norms.k_weight)
    assert qkv.stride(1) == 1
    block = triton.next_power_of_2(max(q_size, k_size))
    _qk_norm_kernel[(len(qkv), 2)](
        qkv, norms.q_weight, norms.k_weight, squares, norms.eps, norms.q_width, norms.k_width, qkv.stride(0),
        Q_SIZE=q_size, K_SIZE=k_size, BLOCK=block, ONLY_SUMS=only_sums, num_warps=min(8, max(1, block // 512)),
        **pdl_options(qkv.device),
    )  # fmt: skip


def sum_squares(qkv: torch.Tensor, norms: QKNorms) -> torch.Tensor:
    """Return the sums of squares of this rank's queries and keys, [num_rows, 2] float32; see `normalize_qk`."""
    if not uses_triton(qkv.device):
        return sum_squares_ref(qkv, norms)
    squares = torch.empty(len(qkv), 2, dtype=torch.float32, device=qkv.device)
    _normalize_qk(qkv, norms, squares, only_sums=True)
    return squares


def normalize_qk(qkv: torch.Tensor, norms: QKNorms, squares: torch.Tensor | None = None) -> None:
    """Normalise queries and keys in place, computed in float32.

    `qkv`: [num_rows, q_size + k_size + elements of values], rows contiguous; `squares`: [num_rows, 2] float32, the sums
    of all ranks' `sum_squares`; None of one rank alone.
    """
    if not uses_triton(qkv.device):
        normalize_qk_ref(qkv, norms, squares)
    else:
        _normalize_qk(qkv, norms, squares, only_sums=False)
