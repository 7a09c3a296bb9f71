"""Linear layers of few rows on the tensor cores, which should be bound by reading the weights.

Each warp of a program multiplies its own part of the inputs, in a pipeline: warps that divided the 16 or 32 outputs
would repeat each other's work. The weights are the first operand, since only the second may have 8 rows instead of 16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.e4m3 import Fp8Matrix, from_e4m3, kernel_arguments
from nanovllm.kernels.fast_math import round_to
from nanovllm.kernels.policy import MAX_SKINNY_ROWS


@jit
def sum_of_parts(parts, WARPS: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr):
    """Sum [WARPS, OUT, ROWS] over the warps; `tl.sum` has 16-way bank conflicts there, at 1 to 2 us a sum."""
    parts = tl.permute(parts, (1, 2, 0))
    for i in tl.static_range(4):
        if WARPS >> i > 1:
            even, odd = tl.split(tl.reshape(parts, [OUT, ROWS, WARPS >> (i + 1), 2]))
            parts = even + odd
    return tl.reshape(parts, [OUT, ROWS])


@jit
def _scaled_dot(
    weight, x, scale_ptr, outs, blocks, in_features, out_mask,
    SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    offsets = (outs // SCALE_OUTS)[None, :, None] * tl.cdiv(in_features, SCALE_INS) + blocks
    mask = out_mask[None, :, None] & (blocks * SCALE_INS < in_features)
    scales = tl.load(scale_ptr + offsets, mask=mask, other=0.0)
    return tl.dot(from_e4m3(weight, x.dtype, NATIVE), x, input_precision="ieee") * scales


@jit(do_not_specialize=["num_rows"])
def _skinny_gemm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, in_features, out_features,
    EVEN: tl.constexpr, WARP_INS: tl.constexpr, WARPS: tl.constexpr, BLOCK_OUT: tl.constexpr, ROWS: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
    scale_ptr=None, SCALE_OUTS: tl.constexpr = 0, SCALE_INS: tl.constexpr = 0, NATIVE: tl.constexpr = False,
):  # fmt: skip
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    out_mask = outs < out_features
    rows = tl.arange(0, ROWS)[None, None, :]
    parts = tl.arange(0, WARPS)[:, None, None] * WARP_INS
    ins = parts + tl.arange(0, WARP_INS)[None, :, None]
    weight_ins = parts + tl.arange(0, WARP_INS)[None, None, :]
    weight_ptrs = weight_ptr + outs.to(tl.int64)[None, :, None] * in_features + weight_ins
    up_offset = tl.cast(out_features, tl.int64) * in_features
    acc = tl.zeros([WARPS, BLOCK_OUT, ROWS], dtype=tl.float32)
    up = tl.zeros([WARPS, BLOCK_OUT, ROWS], dtype=tl.float32)
    wait_for_previous(PDL)
    for start in range(0, in_features, WARPS * WARP_INS):
        mask = out_mask[None, :, None]
        x_mask = rows < num_rows
        if not EVEN:
            mask = mask & (start + weight_ins < in_features)
            x_mask = x_mask & (start + ins < in_features)
        weight = tl.load(weight_ptrs + start, mask=mask, other=0.0)
        x = tl.load(x_ptr + rows * in_features + (start + ins), mask=x_mask, other=0.0)
        if SCALE_INS:
            # What a warp multiplies in a step has one block of inputs.
            blocks = (start + parts) // SCALE_INS
            acc += _scaled_dot(weight, x, scale_ptr, outs, blocks, in_features, out_mask, SCALE_OUTS, SCALE_INS, NATIVE)
        elif SCALE_OUTS:
            acc = tl.dot(from_e4m3(weight, x.dtype, NATIVE), x, acc, input_precision="ieee")
        else:
            acc = tl.dot(weight, x, acc, input_precision="ieee")
        if GATED:
            up_weight = tl.load(weight_ptrs + up_offset + start, mask=mask, other=0.0)
            if SCALE_INS:
                up_outs = outs + out_features
                up += _scaled_dot(
                    up_weight, x, scale_ptr, up_outs, blocks, in_features, out_mask, SCALE_OUTS, SCALE_INS, NATIVE
                )
            elif SCALE_OUTS:
                up = tl.dot(from_e4m3(up_weight, x.dtype, NATIVE), x, up, input_precision="ieee")
            else:
                up = tl.dot(up_weight, x, up, input_precision="ieee")
    # From here on, values are rounded as by separate ops.
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = sum_of_parts(acc, WARPS, BLOCK_OUT, ROWS)
    if SCALE_OUTS and not SCALE_INS:
        out *= tl.load(scale_ptr + outs // SCALE_OUTS, mask=out_mask, other=0.0)[:, None]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + outs, mask=out_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        out = round_to(out, dtype)
        activated = out / (1 + tl.exp(-out))
        up_out = sum_of_parts(up, WARPS, BLOCK_OUT, ROWS)
        if SCALE_OUTS and not SCALE_INS:
            up_out *= tl.load(scale_ptr + (outs + out_features) // SCALE_OUTS, mask=out_mask, other=0.0)[:, None]
        out = activated * round_to(up_out, dtype)
    out_rows = tl.arange(0, ROWS)
    mask = out_mask[:, None] & (out_rows < num_rows)[None, :]
    tl.store(out_ptr + out_rows[None, :] * out_features + outs[:, None], out.to(dtype), mask=mask)


class _SkinnyTile(NamedTuple):
    """Outputs and rows per program, warps, inputs per warp and step, and pipeline stages."""

    outs: int
    rows: int
    num_warps: int
    warp_ins: int
    num_stages: int


def _tile(in_features: int, out_features: int, gated: bool) -> _SkinnyTile:
    """Return the tile of weights in 16 bits; tuned on an H200 with Qwen3-1.7B to 8B at 8 rows."""
    # Programs crowd on multiprocessors that the previous kernel leaves free, unevenly after attention. More stages
    # limit these to two or three programs: a step of Qwen3-8B takes 4.79 ms with four stages, and 4.36 with six.
    if gated:
        return _SkinnyTile(32, MAX_SKINNY_ROWS, 2, 64, 3)
    if out_features > 32768:
        return _SkinnyTile(32, MAX_SKINNY_ROWS, 2, 64, 4)
    if out_features > in_features:
        return _SkinnyTile(16, MAX_SKINNY_ROWS, 4, 64, 4)
    return _SkinnyTile(16, MAX_SKINNY_ROWS, 4, 64, 6 if out_features <= 4096 else 5)


def _fp8_tile(num_rows: int, in_features: int, out_features: int, gated: bool) -> _SkinnyTile:
    """Return the tile of weights in e4m3; tuned on an H200 with steps of Qwen3-8B at 8 rows."""
    # Up to 8 rows are not padded to 16, which leaves shared memory. A warp's inputs of a step lie in a block of scales.
    rows = MAX_SKINNY_ROWS // 2 if num_rows <= MAX_SKINNY_ROWS // 2 else MAX_SKINNY_ROWS
    if gated:
        return _SkinnyTile(16, rows, 2, 128, 4)
    if out_features > in_features:
        return _SkinnyTile(16, rows, 4, 128, 3)
    # With all rows six stages would not fit into 99 KiB.
    return _SkinnyTile(16, rows, 4, 128, 6 if in_features > out_features and rows < MAX_SKINNY_ROWS else 4)


def skinny_gemm(
    x: torch.Tensor, weight: torch.Tensor | Fp8Matrix, bias: torch.Tensor | None = None, gated: bool = False
) -> torch.Tensor:
    """Compute product, bias and gate of `norm_linear` for up to MAX_SKINNY_ROWS rows, in a pipeline."""
    num_rows, in_features = x.shape
    weight, scaling = kernel_arguments(weight)
    out_features = len(weight) // 2 if gated else len(weight)
    tile = _fp8_tile(num_rows, in_features, out_features, gated) if scaling else _tile(in_features, out_features, gated)
    assert x.is_contiguous() and weight.is_contiguous() and not (gated and bias is not None)
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    _skinny_gemm_kernel[(triton.cdiv(out_features, tile.outs),)](
        x, weight, bias, out, num_rows, in_features, out_features,
        EVEN=in_features % (tile.num_warps * tile.warp_ins) == 0, WARP_INS=tile.warp_ins, WARPS=tile.num_warps,
        BLOCK_OUT=tile.outs, ROWS=tile.rows, GATED=gated, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **pdl_options(x.device), **scaling,
    )  # fmt: skip
    return out
