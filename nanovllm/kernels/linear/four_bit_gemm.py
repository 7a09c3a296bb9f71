"""Linear layers with weights in four bits, which become 16-bit operands of the tensor cores in registers.

For few rows there is `skinny_four_bit_gemm`. More are bound by the tensor cores.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.four_bits import FourBitMatrix, multiply_four_bits
from nanovllm.kernels.policy import MAX_SKINNY_ROWS


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


def _tile(num_rows: int, out_features: int) -> tuple[int, int, int, int]:
    """Return rows, outputs and inputs per step of a program, and warps; not tuned."""
    if num_rows <= MAX_SKINNY_ROWS:
        return (16, 64, 128, 4) if out_features > 8192 else (16, 32, 256, 4)
    if num_rows <= 64:
        return 32 if num_rows <= 32 else 64, 64, 128, 4
    return 128, 128, 64, 8


def four_bit_gemm(x: torch.Tensor, weight: FourBitMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias`, [num_rows, out_features]; see `norm_linear_ref` for the plain torch form.

    x: [num_rows, in_features], contiguous; bias: [out_features], or None.
    """
    num_rows, in_features = x.shape
    out_features = len(weight.values)
    assert x.is_contiguous() and weight.values.is_contiguous() and weight.scales.is_contiguous()
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    rows, outs, ins, num_warps = _tile(num_rows, out_features)
    _tiled_kernel[(triton.cdiv(num_rows, rows) * triton.cdiv(out_features, outs),)](
        x, weight.values, bias, out, num_rows, in_features, out_features, ROWS=rows, OUTS=outs, INS=ins,
        num_warps=num_warps, num_stages=4, **pdl_options(x.device), **weight.scaling,
    )  # fmt: skip
    return out
