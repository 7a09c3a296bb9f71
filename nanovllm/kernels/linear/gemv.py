"""A linear layer of one row, whose time goes to reading the weights; it does not use the tensor cores.

Each program requests its weights before `gdc_wait`, so that they arrive while the previous kernel still runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.e4m3 import Fp8Matrix, from_e4m3, kernel_arguments
from nanovllm.kernels.fast_math import round_to, rsqrt
from nanovllm.kernels.rms_norm import Norm, norm_dtype


@jit
def load_scales(
    scale_ptr, outs, out_mask,
    IN: tl.constexpr, BLOCK_IN: tl.constexpr, SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr,
    PART: tl.constexpr = 0,
):  # fmt: skip
    """Return the scales of outputs, [outs]; if blocks of inputs have one each, [outs, blocks] of part PART of these."""
    if SCALE_INS:
        num_blocks: tl.constexpr = (IN + SCALE_INS - 1) // SCALE_INS
        blocks = PART * (BLOCK_IN // SCALE_INS) + tl.arange(0, BLOCK_IN // SCALE_INS)[None, :]
        mask = out_mask[:, None] & (blocks < num_blocks)
        scales = tl.load(scale_ptr + (outs // SCALE_OUTS)[:, None] * num_blocks + blocks, mask=mask, other=0.0)
    else:
        scales = tl.load(scale_ptr + outs // SCALE_OUTS, mask=out_mask, other=0.0)
    return scales


@jit
def scaled_product(
    weight, x, scales,
    BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, SCALE_INS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Return the product of e4m3 bytes, [outs, ins], and float32 x, [ins]."""
    products = from_e4m3(weight, tl.float16, NATIVE).to(tl.float32) * x[None, :]
    if SCALE_INS:
        by_block = tl.sum(tl.reshape(products, [BLOCK_OUT, BLOCK_IN // SCALE_INS, SCALE_INS]), axis=2)
        out = tl.sum(by_block * scales, axis=1)
    else:
        out = tl.sum(products, axis=1) * scales
    return out


@jit
def _gemv_kernel(
    x_ptr, residual_ptr, norm_weight_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, eps, out_features,
    IN: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
    scale_ptr=None, SCALE_OUTS: tl.constexpr = 0, SCALE_INS: tl.constexpr = 0, NATIVE: tl.constexpr = False,
    normed_ptr=None, PARTS: tl.constexpr = 1, X_PARTS: tl.constexpr = 1,
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
    if SCALE_OUTS:
        scales = load_scales(scale_ptr, outs, out_mask, IN, BLOCK_IN, SCALE_OUTS, SCALE_INS)
        if GATED:
            up_scales = load_scales(scale_ptr, outs + out_features, out_mask, IN, BLOCK_IN, SCALE_OUTS, SCALE_INS)
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + ins, mask=in_mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    # Every intermediate value is rounded as by separate ops.
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + ins, mask=in_mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, X_PARTS):
        x += tl.load(x_ptr + part * IN + ins, mask=in_mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + ins, mask=in_mask, other=0.0).to(tl.float32)
    if residual_ptr is not None or X_PARTS > 1:
        x = round_to(x, dtype)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + ins, x.to(dtype), mask=in_mask)
    if norm_weight_ptr is not None:
        x = x * rsqrt(tl.sum(x * x, axis=0) / IN + eps) * norm_weight
        x = round_to(x, dtype)
        # Two conditions: `and` would need the pointer where it is None.
        if normed_ptr is not None:  # noqa: SIM102
            if tl.program_id(0) == 0:
                tl.store(normed_ptr + ins, x.to(dtype), mask=in_mask)
    if SCALE_OUTS:
        out = scaled_product(weight, x, scales, BLOCK_IN, BLOCK_OUT, SCALE_INS, NATIVE)
        for part in tl.static_range(1, PARTS):
            weight = tl.load(weight_ptr + offsets + part * BLOCK_IN, mask=out_mask[:, None], other=0)
            x = tl.load(x_ptr + part * BLOCK_IN + ins).to(tl.float32)
            scales = load_scales(scale_ptr, outs, out_mask, IN, BLOCK_IN, SCALE_OUTS, SCALE_INS, part)
            out += scaled_product(weight, x, scales, BLOCK_IN, BLOCK_OUT, SCALE_INS, NATIVE)
    else:
        out = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + outs, mask=out_mask, other=0.0).to(tl.float32)
    if GATED:
        if SCALE_OUTS:
            up = scaled_product(up_weight, x, up_scales, BLOCK_IN, BLOCK_OUT, SCALE_INS, NATIVE)
        else:
            up = tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1)
        out = round_to(out, dtype)
        out = out / (1 + tl.exp(-out)) * round_to(up, dtype)
    tl.store(out_ptr + outs, out.to(dtype), mask=out_mask)


class _GemvTile(NamedTuple):
    """A program's weights: `block_out` outputs, `parts` times `block_in` inputs of each."""

    parts: int
    block_in: int
    block_out: int
    num_warps: int


def _tile(in_features: int, gated: bool) -> _GemvTile:
    block_in = triton.next_power_of_2(in_features)
    # Weights per program: enough loads in flight, few enough for the registers.
    wide = block_in > 4096 or (gated and block_in == 4096)
    size = 32768 if wide else 8192 if block_in <= 1024 else 16384
    num_warps = 16 if block_in > 8192 else 8 if wide else 4
    return _GemvTile(1, block_in, min(16, max(1, size // block_in // (2 if gated else 1))), num_warps)


def _fp8_tile(in_features: int, gated: bool, has_norm: bool) -> _GemvTile:
    """Return the tile of weights in e4m3; tuned on an H200 with the shapes of Qwen3-8B."""
    if in_features > 4096 and in_features % 4096 == 0 and not has_norm and not gated:
        return _GemvTile(in_features // 4096, 4096, 8, 4)
    tile = _tile(in_features, gated)
    if tile.block_in == 4096:
        return tile._replace(block_out=4 if gated else 8, num_warps=8 if has_norm and not gated else 4)
    # Normalising the inputs, which each program does, would bound the kernel: more outputs share it.
    return tile._replace(block_out=min(16, tile.block_out * 2)) if has_norm else tile


def gemv(
    x: torch.Tensor, weight: torch.Tensor | Fp8Matrix, bias: torch.Tensor | None = None, norm: Norm | None = None,
    residual: torch.Tensor | None = None, gated: bool = False, normed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute `norm_linear` of one row, or of its parts where there is a norm; gated layers must not have a bias.

    `normed`: [1, in_features], or None; filled with the normalised row, if there is a norm.
    """
    (rows, in_features), x_parts = x.shape[-2:], x.numel() // x.shape[-1]
    weight, scaling = kernel_arguments(weight)
    out_features = len(weight) // 2 if gated else len(weight)
    assert rows == 1 and x.is_contiguous() and weight.is_contiguous() and not (gated and bias is not None)
    assert residual is None or (norm is not None and residual.is_contiguous())
    dtype = x.dtype if norm is None else norm_dtype(x, norm, residual)
    out = torch.empty(rows, out_features, dtype=dtype, device=x.device)
    total = x if residual is None and x_parts == 1 else out.new_empty(rows, in_features)
    norm_weight, eps = norm or (None, 0.0)
    tile = _tile(in_features, gated) if not scaling else _fp8_tile(in_features, gated, norm is not None)
    parts, block_in, block_out, num_warps = tile
    _gemv_kernel[(triton.cdiv(out_features, block_out),)](
        x, residual, norm_weight, weight, bias, out, total, eps, out_features,
        IN=in_features, BLOCK_IN=block_in, BLOCK_OUT=block_out, GATED=gated, num_warps=num_warps, normed_ptr=normed,
        PARTS=parts, X_PARTS=x_parts, **pdl_options(x.device), **scaling,
    )  # fmt: skip
    return out, total
