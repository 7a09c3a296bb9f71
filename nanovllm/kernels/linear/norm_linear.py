"""Linear layers fused with their neighbours in a decoder: residual and RMSNorm before, the SwiGLU gate after.

A `KernelPolicy` chooses the kernel, whose file is imported when it is first chosen. Beside e4m3 weights more than 16
rows are rounded to e4m3, too (W8A8), where the GPU multiplies these; elsewhere weights are dequantised, some at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from nanovllm.kernels._triton import device_limits
from nanovllm.kernels.e4m3 import Fp8Matrix, dequantize, dequantize_ref
from nanovllm.kernels.four_bits import FourBitMatrix, dequantize_four_bits, dequantize_four_bits_ref
from nanovllm.kernels.gates import silu_and_mul, silu_and_mul_ref
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding, quantize_rows
from nanovllm.kernels.policy import FASTEST, MAX_GATED_ROWS, SPLITK_PARTS, KernelPolicy, LinearKernel
from nanovllm.kernels.rms_norm import Norm, norm_dtype, rms_norm, rms_norm_ref

WeightMatrix = torch.Tensor | Fp8Matrix | FourBitMatrix
_CHUNK_WEIGHTS = 2**25
"""Weights that are dequantised at a time: 64 MiB in 16 bits."""
_CHUNK_UNIT = 128
"""Outputs of a chunk are a multiple of this."""


def norm_linear_ref(
    x: torch.Tensor, weight: WeightMatrix, bias: torch.Tensor | None = None, norm: Norm | None = None,
    residual: torch.Tensor | None = None, gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Plain torch form of `norm_linear` where rows are not rounded to e4m3."""
    total = x
    if norm is not None:
        x, total = rms_norm_ref(x, norm.weight, norm.eps, residual)
    if isinstance(weight, Fp8Matrix):
        weight = dequantize_ref(weight, x.dtype)
    elif isinstance(weight, FourBitMatrix):
        weight = dequantize_four_bits_ref(weight, x.dtype)
    out = functional.linear(x, weight, bias)
    return (silu_and_mul_ref(out) if gated else out), total


def norm_linear(
    x: torch.Tensor, weight: WeightMatrix, bias: torch.Tensor | None = None, norm: Norm | None = None,
    residual: torch.Tensor | None = None, gated: bool = False,
    *, policy: KernelPolicy = FASTEST,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `gate(norm(x + residual) @ weight.T + bias)` and `x + residual`, which may be x itself.

    Args:
        x: [num_rows, in_features], contiguous; with a norm also the parts of a sum, as `linear_into` returns them; if
            `KernelPolicy.rounds_gate_up` also gate and up, [num_rows, 2 * in_features], for SiLU(gate) * up.
        weight: [out_features, in_features]; of a gated layer the gate's rows, then up's.
        bias: [out_features].
        norm, residual: of an RMSNorm before the product, see `rms_norm`.
        gated: return SiLU(gate) * up, half as wide.
    """
    num_rows, dtype = x.shape[-2], x.dtype if norm is None else norm_dtype(x, norm, residual)
    if isinstance(weight, Fp8Matrix) and (rounding := row_rounding(num_rows, dtype, weight, policy)) is not None:
        rows, total = quantize_rows(x, rounding, norm, residual, gated=x.shape[-1] > weight.values.shape[1])
        return multiply_rounded(rows, weight, bias, gated, policy), total
    if norm is not None and x.dim() == 3 and not (num_rows == 1 and isinstance(weight, torch.Tensor)):
        # Of kernels that normalise, only `gemv` of weights in 16 bits adds up parts.
        normed, total = rms_norm(x, norm.weight, norm.eps, residual)
        return norm_linear(normed, weight, bias, gated=gated, policy=policy)[0], total
    if isinstance(weight, Fp8Matrix):
        kernel = policy.fp8_linear(num_rows, dtype, weight)
    elif isinstance(weight, FourBitMatrix):
        kernel = policy.four_bit_linear(num_rows, dtype, weight)
    else:
        kernel = policy.linear(num_rows, weight, biased=bias is not None, normed=norm is not None, gated=gated)
    if kernel in (LinearKernel.GEMV, LinearKernel.RESIDENT_GEMM, LinearKernel.SKINNY_FOUR_BIT_GEMM):
        return _function(kernel)(x, weight, bias, norm, residual, gated)
    total = x
    if norm is not None:
        x, total = rms_norm(x, norm.weight, norm.eps, residual)
    return _multiply(kernel, x, weight, bias, gated, policy), total


def _multiply(
    kernel: LinearKernel, x: torch.Tensor, weight: WeightMatrix, bias: torch.Tensor | None, gated: bool,
    policy: KernelPolicy,
) -> torch.Tensor:  # fmt: skip
    """Return the product of `norm_linear` without a norm by a kernel that has none."""
    if kernel in (LinearKernel.SKINNY_GEMM, LinearKernel.HOPPER_FOUR_BIT_GEMM):
        return _function(kernel)(x, weight, bias, gated)
    if kernel is LinearKernel.SPLITK_GEMM:
        return _function(kernel)(x, weight, gated, policy=policy)
    if kernel is LinearKernel.PERSISTENT_GATED_GEMM:
        return _function(kernel)(x, weight, device_limits(x.device)[0])
    if kernel is LinearKernel.FOUR_BIT_GEMM:
        out = _function(kernel)(x, weight, bias)
    elif isinstance(weight, torch.Tensor):
        out = functional.linear(x, weight, bias)
    else:
        out = _dequantized_linear(x, weight, bias)
    return silu_and_mul(out) if gated else out


def _function(kernel: LinearKernel) -> Callable[..., Any]:
    """Import the function of a kernel's name from its file."""
    return getattr(import_module(f"nanovllm.kernels.linear.{kernel.value}"), kernel.name.lower())


def linear_into(  # noqa: PLR0911 - one for each kind of weight and kernel
    x: torch.Tensor, weight: WeightMatrix, residual: torch.Tensor, policy: KernelPolicy = FASTEST
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `x @ weight.T + residual`, or leave the addition to the next `norm_linear`, whichever is faster.

    x: of `norm_linear` without a norm; weight: [out_features, in_features];
    residual: [num_rows, out_features], may be overwritten. Returns x and residual of the next `norm_linear`: the sum
    and None, or the product, [num_rows, out_features] or its parts, and the residual that is still to be added.
    """
    if isinstance(weight, Fp8Matrix):
        rounding = row_rounding(len(x), x.dtype, weight, policy)
        if rounding is None:
            return norm_linear(x, weight, policy=policy)[0], residual
        rows, _ = quantize_rows(x, rounding, gated=x.shape[-1] > weight.values.shape[1])
        parts = policy.fp8_parts(len(x), x.dtype, weight)
        if parts == 1:
            return multiply_rounded(rows, weight, policy=policy), residual
        rows = rows.part(slice(len(x)))
        return _function(LinearKernel.SCALED_GEMM)(rows, weight, x.dtype, parts=parts), residual
    if isinstance(weight, FourBitMatrix):
        parts = policy.four_bit_parts(len(x), x.dtype, weight)
        if parts == 1:
            return norm_linear(x, weight, policy=policy)[0], residual
        kernel = policy.four_bit_linear(len(x), x.dtype, weight)
        out = _function(kernel)(x, weight, parts=parts)
        # This one can normalise, and returns what it has normalised, too.
        return out[0] if kernel is LinearKernel.SKINNY_FOUR_BIT_GEMM else out, residual
    if (end := policy.branch_end(len(x), weight)) is None:
        return norm_linear(x, weight, policy=policy)[0], residual
    if end is LinearKernel.SPLITK_GEMM:
        return _function(end)(x, weight, parts=SPLITK_PARTS, policy=policy), residual
    return residual.addmm_(x, weight.T), None


def row_rounding(
    num_rows: int, dtype: torch.dtype, weight: Fp8Matrix, policy: KernelPolicy = FASTEST
) -> Rounding | None:
    """Return how rows of a dtype are rounded for `multiply_rounded`; None if they are not."""
    kernel = policy.fp8_linear(num_rows, dtype, weight)
    if kernel in (LinearKernel.SCALED_MM, LinearKernel.SCALED_GEMM):
        return Rounding(weight.block_ins, for_scaled_mm=kernel is LinearKernel.SCALED_MM)
    return None


def multiply_rounded(
    rows: Fp8Rows, weight: Fp8Matrix, bias: torch.Tensor | None = None, gated: bool = False,
    policy: KernelPolicy = FASTEST,
) -> torch.Tensor:  # fmt: skip
    """Return the product of `norm_linear` without a norm, of rows that are rounded as `row_rounding` says."""
    kernel = policy.fp8_linear(rows.num_rows, rows.dtype, weight)
    if kernel is LinearKernel.SCALED_GEMM:
        has_gate = gated and len(rows.values) <= MAX_GATED_ROWS
        out = _function(kernel)(rows, weight, rows.dtype, bias, has_gate)
        if has_gate:
            return out
    else:
        out = _scaled_mm(rows, weight, rows.dtype, bias)[: rows.num_rows]
    return silu_and_mul(out) if gated else out


def _scaled_mm(rows: Fp8Rows, weight: Fp8Matrix, dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    # The scales' shapes say which values share one. Fast accumulation is the tensor cores' own,
    # which keep about 14 bits.
    return torch._scaled_mm(
        rows.values, weight.values.T, rows.scales, weight.scales.T, bias=bias, out_dtype=dtype, use_fast_accum=False
    )


def _dequantized_linear(x: torch.Tensor, weight: Fp8Matrix | FourBitMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    out_features, in_features = len(weight.values), x.shape[1]
    step = max(1, _CHUNK_WEIGHTS // (in_features * _CHUNK_UNIT)) * _CHUNK_UNIT
    if step >= out_features:
        return functional.linear(x, _dequantized(weight, x.dtype), bias)
    out = torch.empty(len(x), out_features, dtype=x.dtype, device=x.device)
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        chunk = _dequantized(weight.outputs(start, stop), x.dtype).T
        if bias is None:
            torch.mm(x, chunk, out=out[:, start:stop])
        else:
            torch.addmm(bias[start:stop], x, chunk, out=out[:, start:stop])
    return out


def _dequantized(weight: Fp8Matrix | FourBitMatrix, dtype: torch.dtype) -> torch.Tensor:
    return dequantize(weight, dtype) if isinstance(weight, Fp8Matrix) else dequantize_four_bits(weight, dtype)
