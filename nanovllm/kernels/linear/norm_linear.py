"""Linear layers fused with their neighbours in a decoder: residual and RMSNorm before, the SwiGLU gate after.

The dispatcher, `norm_linear`, chooses by the number of rows. The Triton kernel here is for 1 row, where the time goes
to reading the weights: each program requests its weights before `gdc_wait`, so that they arrive while the previous
kernel still runs. It does not use the tensor cores. `one_shot_linear` and `skinny_linear` are for up to 16 rows of
two-byte elements, `hopper_batch_linear` for up to 256 rows and small weights, `hopper_linear` for gated layers of many
rows, and cuBLAS for everything else. Figures: kernels/README.md.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm.kernels._triton import (
    device_limits,
    is_hopper,
    jit,
    pdl_options,
    tl,
    triton,
    uses_triton,
    wait_for_previous,
)
from nanovllm.kernels.fast_math import round_to, rsqrt
from nanovllm.kernels.linear.skinny_linear import MAX_SKINNY_ROWS, Norm, should_use_one_shot, skinny_linear
from nanovllm.kernels.rms_norm import rms_norm, rms_norm_ref
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
        x, total = rms_norm_ref(x, *norm, residual)
    out = functional.linear(x, weight, bias)
    return (silu_and_mul_ref(out) if gated else out), total


@jit
def _thin_linear_kernel(
    x_ptr, residual_ptr, norm_weight_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, eps, out_features,
    IN: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    ins = tl.arange(0, BLOCK_IN)
    in_mask = ins < IN
    out_mask = outs < out_features
    mask = out_mask[:, None] & in_mask[None, :]
    offsets = outs.to(tl.int64)[:, None] * IN + ins[None, :]
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    if GATED:
        up_weight = tl.load(weight_ptr + tl.cast(out_features, tl.int64) * IN + offsets, mask=mask, other=0.0)
    if HAS_NORM:
        norm_weight = tl.load(norm_weight_ptr + ins, mask=in_mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    # Every intermediate value is rounded as by separate ops.
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + ins, mask=in_mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + ins, mask=in_mask, other=0.0).to(tl.float32)
        x = round_to(x, dtype)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + ins, x.to(dtype), mask=in_mask)
    if HAS_NORM:
        x = x * rsqrt(tl.sum(x * x, axis=0) / IN + eps) * norm_weight
        x = round_to(x, dtype)
    out = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
    if HAS_BIAS:
        out += tl.load(bias_ptr + outs, mask=out_mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1)
        out = round_to(out, dtype)
        out = out / (1 + tl.exp(-out)) * round_to(up, dtype)
    tl.store(out_ptr + outs, out.to(dtype), mask=out_mask)


def norm_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton form of `norm_linear` for one row; gated layers must not have a bias."""
    rows, in_features = x.shape
    out_features = len(weight) // 2 if gated else len(weight)
    assert rows == 1 and x.is_contiguous() and weight.is_contiguous() and not (gated and bias is not None)
    assert residual is None or (norm is not None and residual.is_contiguous())
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    norm_weight, eps = norm if norm is not None else (weight, 0.0)
    block_in = triton.next_power_of_2(in_features)
    # Weights per program: enough loads in flight, few enough for the registers.
    wide = block_in > 4096 or (gated and block_in == 4096)
    size = 32768 if wide else 8192 if block_in <= 1024 else 16384
    block_out = min(16, max(1, size // block_in // (2 if gated else 1)))
    _thin_linear_kernel[(triton.cdiv(out_features, block_out),)](
        x, residual, norm_weight, weight, bias, out, total, eps, out_features,
        IN=in_features, BLOCK_IN=block_in, BLOCK_OUT=block_out,
        HAS_NORM=norm is not None, HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None, GATED=gated,
        num_warps=8 if wide else 4, **pdl_options(x.device),
    )  # fmt: skip
    return out, total


def norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `gate(norm(x + residual) @ weight.T + bias)` and `x + residual`.

    Args:
        x: [num_rows, in_features], contiguous; with a norm also the parts of a sum, as `linear_into` returns them.
        weight: [out_features, in_features]; of a gated layer the gate's rows, then as many of up.
        bias: [out_features], or None.
        norm: RMSNorm before the product, or None.
        residual: [num_rows, in_features], or None for zero; only with a norm.
        gated: return SiLU(gate) * up, half as wide.

    Returns:
        The result, and `x + residual`, which may be x itself.
    """
    num_rows, has_kernels = x.shape[-2], uses_triton(x.device)
    if has_kernels and num_rows == 1:
        return norm_linear_triton(x, weight, bias, norm, residual, gated)
    skinny = has_kernels and num_rows <= MAX_SKINNY_ROWS and x.element_size() == 2
    if skinny and should_use_one_shot(x, weight, norm is not None, gated):
        from nanovllm.kernels.linear.one_shot_linear import one_shot_linear  # noqa: PLC0415

        return one_shot_linear(x, weight, bias, norm, residual, gated)
    total = x
    if norm is not None:
        x, total = rms_norm(x, *norm, residual)
    if skinny:
        return skinny_linear(x, weight, bias, gated), total
    if bias is None and is_hopper(x.device):
        from nanovllm.kernels.linear import hopper_batch_linear, hopper_linear  # noqa: PLC0415

        if hopper_batch_linear.should_use(x, weight, gated):
            return hopper_batch_linear.batch_linear(x, weight, gated), total
        num_programs = device_limits(x.device)[0]
        if gated and hopper_linear.should_use(x, weight, num_programs):
            return hopper_linear.hopper_gated_linear(x, weight, num_programs), total
    out = functional.linear(x, weight, bias)
    return (silu_and_mul(out) if gated else out), total


def linear_into(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `x @ weight.T + residual`, or leave the addition to the next `norm_linear`, whichever is faster.

    With many rows cuBLAS adds the residual in its epilogue, which halves what the next norm reads and writes.

    Args:
        x: [num_rows, in_features], contiguous.
        weight: [out_features, in_features].
        residual: [num_rows, out_features]; may be overwritten.

    Returns:
        The x and residual of the next `norm_linear`: either the sum and None, or the product, [num_rows, out_features]
        or its parts, and the residual that is still to be added.
    """
    if not uses_triton(x.device) or x.element_size() != 2 or len(x) <= MAX_SKINNY_ROWS:
        return norm_linear(x, weight)[0], residual
    if is_hopper(x.device):
        from nanovllm.kernels.linear import hopper_batch_linear as batch  # noqa: PLC0415

        if batch.should_use(x, weight, parts=batch.PARTS):
            return batch.batch_linear(x, weight, parts=batch.PARTS), residual
    return residual.addmm_(x, weight.T), None
