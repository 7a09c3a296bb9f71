"""Linear layers fused with their neighbours in a decoder: residual and RMSNorm before, the SwiGLU gate after.

A `KernelPolicy` chooses the kernel; each has a file of its own, which is imported when it is first chosen.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm.kernels._triton import device_limits
from nanovllm.kernels.policy import FASTEST, SPLITK_PARTS, KernelPolicy, LinearKernel
from nanovllm.kernels.rms_norm import Norm, rms_norm, rms_norm_ref
from nanovllm.kernels.silu_and_mul import silu_and_mul, silu_and_mul_ref


def norm_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `norm_linear`."""
    total = x
    if norm is not None:
        x, total = rms_norm_ref(x, norm.weight, norm.eps, residual)
    out = functional.linear(x, weight, bias)
    return (silu_and_mul_ref(out) if gated else out), total


def norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    *,
    policy: KernelPolicy = FASTEST,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `gate(norm(x + residual) @ weight.T + bias)` and `x + residual`.

    Args:
        x: [num_rows, in_features], contiguous; with a norm also the parts of a sum, as `linear_into` returns them.
        weight: [out_features, in_features]; of a gated layer the gate's rows, then up's.
        bias: [out_features], or None.
        norm: RMSNorm before the product, or None.
        residual: [num_rows, in_features], or None for zero; only with a norm.
        gated: return SiLU(gate) * up, half as wide.
        policy: chooses the kernel.

    Returns:
        The result, and `x + residual`, which may be x itself.
    """
    num_rows = x.shape[-2]
    kernel = policy.linear(num_rows, weight, biased=bias is not None, normed=norm is not None, gated=gated)
    if kernel is LinearKernel.GEMV:
        from nanovllm.kernels.linear.gemv import gemv  # noqa: PLC0415

        return gemv(x, weight, bias, norm, residual, gated)
    if kernel is LinearKernel.RESIDENT_GEMM:
        from nanovllm.kernels.linear.resident_gemm import resident_gemm  # noqa: PLC0415

        return resident_gemm(x, weight, bias, norm, residual, gated)
    total = x
    if norm is not None:
        x, total = rms_norm(x, norm.weight, norm.eps, residual)
    if kernel is LinearKernel.SKINNY_GEMM:
        from nanovllm.kernels.linear.skinny_gemm import skinny_gemm  # noqa: PLC0415

        return skinny_gemm(x, weight, bias, gated), total
    if kernel is LinearKernel.SPLITK_GEMM:
        from nanovllm.kernels.linear.splitk_gemm import splitk_gemm  # noqa: PLC0415

        return splitk_gemm(x, weight, gated), total
    if kernel is LinearKernel.PERSISTENT_GEMM:
        from nanovllm.kernels.linear.persistent_gemm import persistent_gated_gemm  # noqa: PLC0415

        return persistent_gated_gemm(x, weight, device_limits(x.device)[0]), total
    out = functional.linear(x, weight, bias)
    return (silu_and_mul(out) if gated else out), total


def linear_into(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, policy: KernelPolicy = FASTEST
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `x @ weight.T + residual`, or leave the addition to the next `norm_linear`, whichever is faster.

    With many rows cuBLAS adds the residual in its epilogue, which halves what the next norm reads and writes.

    Args:
        x: [num_rows, in_features], contiguous.
        weight: [out_features, in_features].
        residual: [num_rows, out_features]; may be overwritten.
        policy: chooses the kernel.

    Returns:
        The x and residual of the next `norm_linear`: either the sum and None, or the product, [num_rows, out_features]
        or its parts, and the residual that is still to be added.
    """
    kernel = policy.branch_end(len(x), weight)
    if kernel is None:
        return norm_linear(x, weight, policy=policy)[0], residual
    if kernel is LinearKernel.SPLITK_GEMM:
        from nanovllm.kernels.linear.splitk_gemm import splitk_gemm  # noqa: PLC0415

        return splitk_gemm(x, weight, parts=SPLITK_PARTS), residual
    return residual.addmm_(x, weight.T), None
