"""Linear layers of e4m3 weights (W8A16): computed in 16 bits from weights that are exact there, with float32 sums.

A product of many rows gets its weights dequantised, some outputs at a time, and rounded to the dtype of the inputs.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm.kernels.e4m3 import Fp8Matrix, dequantize, dequantize_ref
from nanovllm.kernels.linear.choose import LinearKernel, choose_fp8
from nanovllm.kernels.linear.gemv import gemv
from nanovllm.kernels.linear.norm_linear import norm_linear_ref
from nanovllm.kernels.linear.skinny_gemm import skinny_gemm
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
    """Plain torch form of `fp8_linear`."""
    return norm_linear_ref(x, dequantize_ref(weight, x.dtype), bias, norm, residual, gated)


def fp8_linear(
    x: torch.Tensor,
    weight: Fp8Matrix,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `gate(norm(x + residual) @ weight.T + bias)` and `x + residual`; see `norm_linear`."""
    if x.dim() == 3:
        assert norm is not None
        x, total = rms_norm(x, norm.weight, norm.eps, residual)
        return fp8_linear(x, weight, bias, gated=gated)[0], total
    kernel = choose_fp8(x)
    if kernel is LinearKernel.GEMV:
        return gemv(x, weight, bias, norm, residual, gated)
    total = x
    if norm is not None:
        x, total = rms_norm(x, norm.weight, norm.eps, residual)
    if kernel is LinearKernel.SKINNY_GEMM:
        return skinny_gemm(x, weight, bias, gated), total
    out = _dequantized_linear(x, weight, bias)
    return (silu_and_mul(out) if gated else out), total


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
