"""Linear layers with weights in four bits, which become 16-bit operands of the tensor cores in registers.

Few rows are bound by reading the weights. As in `skinny_gemm`, a program's warps have parts of the inputs each; here a
part of a step has one scale, which multiplies its sum. More rows are bound by the tensor cores, and weights are scaled
before the product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.four_bits import (
    FourBitMatrix,
    add_pairs,
    dequantize_four_bits_ref,
    load_scales,
    multiply_four_bits,
    widen_values,
)
from nanovllm.kernels.linear.skinny_gemm import sum_of_parts
from nanovllm.kernels.policy import MAX_SKINNY_ROWS

_PART_INS = 128
"""Inputs of a part and step, at most; of a group with one scale otherwise."""


def four_bit_gemm_ref(x: torch.Tensor, weight: FourBitMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Plain torch form of `four_bit_gemm`."""
    return functional.linear(x, dequantize_four_bits_ref(weight, x.dtype), bias)


@jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x_ptr, values_ptr, bias_ptr, out_ptr, num_rows, in_features, out_features, scale_ptr, zero_ptr,
    PARTS: tl.constexpr, PART_INS: tl.constexpr, OUTS: tl.constexpr, ROWS: tl.constexpr,
    SCALE_INS: tl.constexpr, FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    out_mask = (outs < out_features)[None, :, None]
    out_rows, rows = outs.to(tl.int64)[None, :, None], tl.arange(0, ROWS)[None, None, :]
    # The first inputs of parts, [PARTS, 1, 1].
    parts = tl.arange(0, PARTS)[:, None, None] * PART_INS
    columns = tl.arange(0, PART_INS // 2)
    ins = parts + (columns // 16 * 32 + columns % 16)[None, :, None]
    bytes = parts // 2 + columns[None, None, :]
    row_ptrs = values_ptr + out_rows * (tl.cdiv(in_features, 32) * 16)
    groups = out_rows * tl.cdiv(in_features, SCALE_INS)
    acc = tl.zeros([PARTS, OUTS, ROWS], dtype=tl.float32)
    wait_for_previous(PDL)
    for start in range(0, in_features, PARTS * PART_INS):
        is_in = start + bytes // 16 * 32 < in_features
        weight = tl.load(row_ptrs + start // 2 + bytes, mask=out_mask & is_in, other=0)
        x_ptrs, is_row = x_ptr + rows * in_features + start + ins, rows < num_rows
        x_low = tl.load(x_ptrs, mask=is_row & (start + ins < in_features), other=0.0)
        x_high = tl.load(x_ptrs + 16, mask=is_row & (start + 16 + ins < in_features), other=0.0)
        low, high = widen_values(weight, dtype, FORMAT)
        own, is_part = groups + (start + parts) // SCALE_INS, out_mask & (start + parts < in_features)
        if zero_ptr is not None:
            zeros = (8 - tl.load(zero_ptr + own, mask=is_part, other=8).to(tl.int32)).to(dtype)
            low, high = add_pairs(low, zeros, dtype), add_pairs(high, zeros, dtype)
        scales = load_scales(scale_ptr + own, is_part, FORMAT)
        product = tl.dot(low, x_low, input_precision="ieee")
        acc += tl.dot(high, x_high, product, input_precision="ieee") * scales
    out = sum_of_parts(acc, PARTS, OUTS, ROWS)
    is_out = outs < out_features
    if bias_ptr is not None:
        out += tl.load(bias_ptr + outs, mask=is_out, other=0.0).to(tl.float32)[:, None]
    places = tl.arange(0, ROWS)[None, :]
    mask = is_out[:, None] & (places < num_rows)
    tl.store(out_ptr + places * out_features + outs[:, None], out.to(dtype), mask=mask)


@jit(do_not_specialize=["num_rows"])
def _tiled_kernel(
    x_ptr, values_ptr, bias_ptr, out_ptr, num_rows, in_features, out_features, scale_ptr, zero_ptr, factor_ptr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, SCALE_INS: tl.constexpr, FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Tiles of the same weights run one after the other.
    row_tiles = tl.cdiv(num_rows, ROWS)
    rows = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    outs = tl.program_id(0) // row_tiles * OUTS + tl.arange(0, OUTS)
    is_row, is_out = rows < num_rows, outs < out_features
    # What lies beyond the end is computed from what does not, and is not stored.
    own = tl.minimum(outs, out_features - 1).to(tl.int64)
    groups = own * tl.cdiv(in_features, SCALE_INS)
    zero_ptrs = None
    if zero_ptr is not None:
        zero_ptrs = zero_ptr + groups
    wait_for_previous(PDL)
    out = multiply_four_bits(
        tl.zeros([ROWS, OUTS], dtype=tl.float32), x_ptr + rows.to(tl.int64) * in_features, is_row,
        values_ptr + own * (tl.cdiv(in_features, 32) * 16), scale_ptr + groups, zero_ptrs, is_out, in_features,
        INS, SCALE_INS, FORMAT,
    )  # fmt: skip
    if factor_ptr is not None:
        out *= tl.load(factor_ptr + outs, mask=is_out, other=0.0)[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + outs, mask=is_out, other=0.0).to(tl.float32)[None, :]
    ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_features + outs[None, :]
    tl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


class _Tile(NamedTuple):
    """Rows, outputs and inputs per step of a program, warps, and pipeline stages."""

    rows: int
    outs: int
    ins: int
    num_warps: int
    num_stages: int


def _tile(num_rows: int, out_features: int) -> _Tile:
    """Return the tile of `_tiled_kernel`; not tuned."""
    if num_rows <= MAX_SKINNY_ROWS:
        return _Tile(16, 64, 128, 4, 4) if out_features > 8192 else _Tile(16, 32, 256, 4, 4)
    if num_rows <= 32:
        return _Tile(32, 64, 128, 4, 4)
    if num_rows <= 64:
        return _Tile(64, 64, 128, 4, 4)
    return _Tile(128, 128, 64, 8, 4)


def four_bit_gemm(x: torch.Tensor, weight: FourBitMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias`, [num_rows, out_features].

    x: [num_rows, in_features], contiguous; bias: [out_features], or None.
    """
    if not uses_triton(weight.values.device):
        return four_bit_gemm_ref(x, weight, bias)
    num_rows, in_features = x.shape
    out_features, scaling = len(weight.values), weight.scaling
    assert x.is_contiguous() and weight.values.is_contiguous() and weight.scales.is_contiguous()
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    # Sums of 32 inputs would take 10.9 instructions a weight (Hopper, nvdisasm); of 128 3.3, and a tile of MXFP4 7.2.
    if num_rows <= MAX_SKINNY_ROWS and weight.format == "int4":
        assert scaling.pop("factor_ptr") is None
        part_ins = min(_PART_INS, scaling["SCALE_INS"])
        rows = MAX_SKINNY_ROWS // 2 if num_rows <= MAX_SKINNY_ROWS // 2 else MAX_SKINNY_ROWS
        _skinny_kernel[(triton.cdiv(out_features, 16),)](
            x, weight.values, bias, out, num_rows, in_features, out_features, PARTS=4 * _PART_INS // part_ins,
            PART_INS=part_ins, OUTS=16, ROWS=rows, num_warps=4, num_stages=4, **pdl_options(x.device), **scaling,
        )  # fmt: skip
        return out
    tile = _tile(num_rows, out_features)
    _tiled_kernel[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(out_features, tile.outs),)](
        x, weight.values, bias, out, num_rows, in_features, out_features, ROWS=tile.rows, OUTS=tile.outs, INS=tile.ins,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl_options(x.device), **scaling,
    )  # fmt: skip
    return out
