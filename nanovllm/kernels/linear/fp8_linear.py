"""Linear layers of e4m3 weights: 1 to 16 rows stay in 16 bits (W8A16), more are rounded to e4m3 (W8A8).

Where the GPU has no products in e4m3, and on the CPU, rows are never rounded: a product of many gets its weights
dequantised, some outputs at a time, in the dtype of the inputs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm.kernels.e4m3 import Fp8Matrix, dequantize, dequantize_ref
from nanovllm.kernels.linear.norm_linear import norm_linear_ref
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding, quantize_rows
from nanovllm.kernels.policy import FASTEST, MAX_GATED_ROWS, KernelPolicy, LinearKernel
from nanovllm.kernels.rms_norm import Norm, rms_norm
from nanovllm.kernels.silu_and_mul import silu_and_mul

_CHUNK_WEIGHTS = 2**25
"""Weights that are dequantised at a time: 64 MiB in 16 bits."""
_CHUNK_UNIT = 128
"""Outputs of a chunk are a multiple of this."""


def fp8_linear_ref(
    x: torch.Tensor,
    weight: Fp8Matrix,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `fp8_linear` where rows are not rounded to e4m3."""
    return norm_linear_ref(x, dequantize_ref(weight, x.dtype), bias, norm, residual, gated)


def fp8_linear(
    x: torch.Tensor,
    weight: Fp8Matrix,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    *,
    policy: KernelPolicy = FASTEST,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `gate(norm(x + residual) @ weight.T + bias)` and `x + residual`; see `norm_linear`.

    Args:
        x: [num_rows, in_features]; or, with a norm, [parts, num_rows, in_features] float32, whose sum is meant; or, if
            `KernelPolicy.rounds_gate_up`, [num_rows, 2 * in_features], gate and up, standing for SiLU(gate) * up.
        weight: [out_features, in_features] in e4m3; gate and up, one after the other, if `gated`.
        bias, norm, residual: of the layer, before it, and [num_rows, in_features] to add before the norm.
        gated: return `silu(gate) * up`, which has half the features.
        policy: chooses the kernel.

    Returns:
        [num_rows, out_features] in the dtype of x, or of the norm's weight, and [num_rows, in_features].
    """
    dtype = x.dtype if norm is None else norm.weight.dtype
    num_rows, kernel = x.shape[-2], policy.fp8_linear(x.shape[-2], dtype, weight)
    if (rounding := row_rounding(num_rows, dtype, weight, policy)) is not None:
        rows, total = quantize_rows(x, rounding, norm, residual, gated=x.shape[-1] > weight.values.shape[1])
        return multiply_rounded(rows, weight, bias, gated, policy), total
    if x.dim() == 3:
        assert norm is not None
        x, total = rms_norm(x, norm.weight, norm.eps, residual)
        return fp8_linear(x, weight, bias, gated=gated, policy=policy)[0], total
    if kernel is LinearKernel.GEMV:
        from nanovllm.kernels.linear.gemv import gemv  # noqa: PLC0415

        return gemv(x, weight, bias, norm, residual, gated)
    total = x
    if norm is not None:
        x, total = rms_norm(x, norm.weight, norm.eps, residual)
    if kernel is LinearKernel.SKINNY_GEMM:
        from nanovllm.kernels.linear.skinny_gemm import skinny_gemm  # noqa: PLC0415

        return skinny_gemm(x, weight, bias, gated), total
    out = _dequantized_linear(x, weight, bias)
    return (silu_and_mul(out) if gated else out), total


def fp8_linear_into(
    x: torch.Tensor, weight: Fp8Matrix, residual: torch.Tensor, policy: KernelPolicy = FASTEST
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x and residual for the norm that follows the layer, x maybe in parts to be summed; see `linear_into`."""
    if (rounding := row_rounding(len(x), x.dtype, weight, policy)) is not None:
        rows, _ = quantize_rows(x, rounding, gated=x.shape[-1] > weight.values.shape[1])
        return multiply_rounded_into(rows, weight, residual, policy)
    return fp8_linear(x, weight, policy=policy)[0], residual


def row_rounding(
    num_rows: int, dtype: torch.dtype, weight: Fp8Matrix, policy: KernelPolicy = FASTEST
) -> Rounding | None:
    """Return how rows of a dtype are rounded for `multiply_rounded`; None if they are not."""
    kernel = policy.fp8_linear(num_rows, dtype, weight)
    if kernel in (LinearKernel.SCALED_MM, LinearKernel.SCALED_GEMM):
        return Rounding(weight.block_ins, for_scaled_mm=kernel is LinearKernel.SCALED_MM)
    return None


def multiply_rounded(
    rows: Fp8Rows,
    weight: Fp8Matrix,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    policy: KernelPolicy = FASTEST,
) -> torch.Tensor:
    """Return the product of `fp8_linear`, [num_rows, out_features], with rows rounded as `row_rounding` says."""
    if policy.fp8_linear(rows.num_rows, rows.dtype, weight) is LinearKernel.SCALED_GEMM:
        return _scaled_linear(rows, weight, rows.dtype, bias, gated)
    out = _scaled_mm(rows, weight, rows.dtype, bias)[: rows.num_rows]
    return silu_and_mul(out) if gated else out


def multiply_rounded_into(
    rows: Fp8Rows, weight: Fp8Matrix, residual: torch.Tensor, policy: KernelPolicy = FASTEST
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what `fp8_linear_into` does, with rows rounded as `row_rounding` says."""
    parts = policy.fp8_parts(rows.num_rows, rows.dtype, weight)
    if parts > 1:
        from nanovllm.kernels.linear.scaled_gemm import scaled_gemm  # noqa: PLC0415

        return scaled_gemm(rows.part(slice(rows.num_rows)), weight, rows.dtype, parts=parts), residual
    return multiply_rounded(rows, weight, policy=policy), residual


def _scaled_mm(rows: Fp8Rows, weight: Fp8Matrix, dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    # The scales' shapes say which values share one. Fast accumulation is the tensor cores' own,
    # which keep about 14 bits.
    return torch._scaled_mm(
        rows.values, weight.values.T, rows.scales, weight.scales.T, bias=bias, out_dtype=dtype, use_fast_accum=False
    )


def _scaled_linear(
    rows: Fp8Rows, weight: Fp8Matrix, dtype: torch.dtype, bias: torch.Tensor | None, gated: bool
) -> torch.Tensor:
    from nanovllm.kernels.linear.scaled_gemm import scaled_gemm  # noqa: PLC0415

    if len(rows.values) <= MAX_GATED_ROWS:
        return scaled_gemm(rows, weight, dtype, bias, gated)
    out = scaled_gemm(rows, weight, dtype, bias)
    return silu_and_mul(out) if gated else out


def _dequantized_linear(x: torch.Tensor, weight: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    out_features, in_features = weight.values.shape
    step = max(1, _CHUNK_WEIGHTS // (in_features * _CHUNK_UNIT)) * _CHUNK_UNIT
    if step >= out_features:
        return functional.linear(x, dequantize(weight, x.dtype), bias)
    out = torch.empty(len(x), out_features, dtype=x.dtype, device=x.device)
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        chunk = dequantize(weight.outputs(start, stop), x.dtype).T
        if bias is None:
            torch.mm(x, chunk, out=out[:, start:stop])
        else:
            torch.addmm(bias[start:stop], x, chunk, out=out[:, start:stop])
    return out
