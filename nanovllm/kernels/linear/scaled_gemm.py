"""Products of e4m3 rows and e4m3 weights in the tensor cores (W8A8), with float32 sums and scales after them.

Tensor cores keep about 14 bits of a sum of e4m3 products, so sums of 128 inputs are added up in float32 (two-level
accumulation, as DeepGEMM does). Beside up to 256 rows weights are the operand of 64 rows, so that few waste nothing.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm.kernels._triton import device_limits, jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.e4m3 import Fp8Matrix, dequantize_ref
from nanovllm.kernels.fast_math import round_to
from nanovllm.kernels.gates import silu_and_mul_ref
from nanovllm.kernels.linear.quantize_rows import Fp8Rows
from nanovllm.kernels.policy import FP8_INS, MAX_GATED_ROWS, MAX_SPLITK_ROWS

_GROUP = 8
"""Row tiles that go through the same weights one after the other, so that these stay in the L2 cache."""


def scaled_gemm_ref(
    x: Fp8Rows, weight: Fp8Matrix, dtype: torch.dtype, bias: torch.Tensor | None = None, gated: bool = False,
    parts: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Plain torch form of `scaled_gemm`."""
    rows = dequantize_ref(Fp8Matrix(x.values, x.scales, 1, x.group), torch.float32)
    wide = dequantize_ref(weight, torch.float32)
    if parts > 1:
        pairs = zip(rows.chunk(parts, 1), wide.chunk(parts, 1), strict=True)
        return torch.stack([functional.linear(part, weights) for part, weights in pairs])
    out = functional.linear(rows, wide)
    out = (out if bias is None else out + bias.float()).to(dtype)
    return silu_and_mul_ref(out) if gated else out


@jit
def _outer(of_outs, of_rows, WEIGHTS_FIRST: tl.constexpr):
    return of_outs[:, None] * of_rows[None, :] if WEIGHTS_FIRST else of_rows[:, None] * of_outs[None, :]


@jit
def _add_step(
    acc, weight_ptrs, x, scale_ptrs, x_scales, step, in_mask,
    EVEN: tl.constexpr, HAS_BLOCKS: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
):  # fmt: skip
    INS: tl.constexpr = x.shape[0]
    if HAS_BLOCKS:
        # Before the product, which takes as long as the scales take to come.
        OUTS: tl.constexpr = weight_ptrs.shape[0]
        scales = _outer(tl.broadcast_to(tl.load(scale_ptrs + step), [OUTS]), x_scales, WEIGHTS_FIRST)
    if EVEN:
        weight = tl.load(weight_ptrs + step * INS)
    else:
        weight = tl.load(weight_ptrs + step * INS, mask=in_mask[None, :], other=0.0)
    part = tl.dot(weight, x) if WEIGHTS_FIRST else tl.dot(tl.trans(x), tl.trans(weight))
    return acc + part * scales if HAS_BLOCKS else acc + part


@jit
def multiply_scaled(
    x_ptrs, x_scale_ptrs, x_scale_stride, weight_ptrs, scale_ptrs, up_ptrs, up_scale_ptrs, first_step, num_steps,
    in_features, EVEN: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, HAS_BLOCKS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return the product of some steps, scaled, and if gated that with up's weights, too.

    x_ptrs: [INS, ROWS], of the first step of all; weight_ptrs, up_ptrs: [OUTS, INS]; the scales' of the first blocks,
    the scales of a row `x_scale_stride` apart.
    The products are [OUTS, ROWS] float32 with `WEIGHTS_FIRST`, otherwise [ROWS, OUTS].
    """
    INS: tl.constexpr = x_ptrs.shape[0]
    OUTS: tl.constexpr = weight_ptrs.shape[0]
    ROWS: tl.constexpr = x_ptrs.shape[1]
    ins = tl.arange(0, INS)
    all_steps = tl.cdiv(in_features, INS)
    acc = tl.zeros([OUTS, ROWS] if WEIGHTS_FIRST else [ROWS, OUTS], dtype=tl.float32)
    up = acc
    x_scales = tl.load(x_scale_ptrs + (first_step * x_scale_stride if HAS_BLOCKS else 0))
    for step in range(first_step, first_step + num_steps):
        in_mask = step * INS + ins < in_features
        x = tl.load(x_ptrs + step * INS) if EVEN else tl.load(x_ptrs + step * INS, mask=in_mask[:, None], other=0.0)
        next_scales = x_scales
        if HAS_BLOCKS:
            next_scales = tl.load(x_scale_ptrs + tl.minimum(step + 1, all_steps - 1) * x_scale_stride)
        acc = _add_step(acc, weight_ptrs, x, scale_ptrs, x_scales, step, in_mask, EVEN, HAS_BLOCKS, WEIGHTS_FIRST)
        if GATED:
            up = _add_step(up, up_ptrs, x, up_scale_ptrs, x_scales, step, in_mask, EVEN, HAS_BLOCKS, WEIGHTS_FIRST)
        x_scales = next_scales
    if not HAS_BLOCKS:
        acc *= _outer(tl.load(scale_ptrs), x_scales, WEIGHTS_FIRST)
        if GATED:
            up *= _outer(tl.load(up_scale_ptrs), x_scales, WEIGHTS_FIRST)
    return acc, up


@jit(do_not_specialize=["num_rows", "x_scale_row_stride", "x_scale_stride"])
def _scaled_gemm_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, num_rows, in_features, out_features, num_steps,
    x_scale_row_stride, x_scale_stride,
    EVEN: tl.constexpr, OUTS: tl.constexpr, ROWS: tl.constexpr, INS: tl.constexpr, GROUP: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr, SCALE_OUTS: tl.constexpr, ONE_SCALE: tl.constexpr, HAS_BLOCKS: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    out_tiles, row_tiles = tl.cdiv(out_features, OUTS), tl.cdiv(num_rows, ROWS)
    first_row_tile = tl.program_id(0) // (GROUP * out_tiles) * GROUP
    group_tiles = tl.minimum(row_tiles - first_row_tile, GROUP)
    index = tl.program_id(0) % (GROUP * out_tiles)
    rows = (first_row_tile + index % group_tiles) * ROWS + tl.arange(0, ROWS)
    outs = index // group_tiles * OUTS + tl.arange(0, OUTS)
    ins = tl.arange(0, INS)
    # What lies beyond the end is computed from what does not, and is not stored. Rows begin again with the first one:
    # all programs would wait for the last one's part of the L2 cache if tiles repeated it.
    known_rows, known_outs = (rows % num_rows).to(tl.int64), tl.minimum(outs, out_features - 1)
    first_step, all_steps = tl.program_id(1) * num_steps, tl.cdiv(in_features, INS)
    x_ptrs = x_ptr + known_rows[None, :] * in_features + ins[:, None]
    weight_ptrs = weight_ptr + known_outs.to(tl.int64)[:, None] * in_features + ins[None, :]
    up_ptrs = weight_ptrs + tl.cast(out_features, tl.int64) * in_features
    x_scale_ptrs = x_scale_ptr + known_rows * x_scale_row_stride
    # All outputs of a tile may be in one block.
    scaled_outs = index // group_tiles * OUTS if ONE_SCALE else known_outs
    scale_ptrs = scale_ptr + scaled_outs // SCALE_OUTS * (all_steps if HAS_BLOCKS else 1)
    up_scale_ptrs = scale_ptr + (scaled_outs + out_features) // SCALE_OUTS * (all_steps if HAS_BLOCKS else 1)
    wait_for_previous(PDL)
    acc, up = multiply_scaled(
        x_ptrs, x_scale_ptrs, x_scale_stride, weight_ptrs, scale_ptrs, up_ptrs, up_scale_ptrs, first_step, num_steps,
        in_features, EVEN, WEIGHTS_FIRST, HAS_BLOCKS, GATED,
    )  # fmt: skip
    acc = acc if WEIGHTS_FIRST else tl.trans(acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + known_outs).to(tl.float32)[:, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        # Rounds like a separate product.
        gate = round_to(acc, dtype)
        acc = gate / (1 + tl.exp(-gate)) * round_to(up if WEIGHTS_FIRST else tl.trans(up), dtype)
    out_ptr += tl.program_id(1).to(tl.int64) * num_rows * out_features
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * out_features + outs[:, None]
    tl.store(out_ptrs, acc.to(dtype), mask=(outs < out_features)[:, None] & (rows < num_rows)[None, :])


def _tile(num_rows: int) -> tuple[int, int, int, int]:
    if num_rows <= 64:
        return 64, 32 if num_rows <= 32 else 64, 4, 5
    return (64, 128, 4, 4) if num_rows <= MAX_SPLITK_ROWS else (128, 128, 8, 4)


def scaled_gemm(
    x: Fp8Rows, weight: Fp8Matrix, dtype: torch.dtype, bias: torch.Tensor | None = None, gated: bool = False,
    parts: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Return the product of `norm_linear`, [num_rows, out_features], gated only for up to MAX_GATED_ROWS rows.

    Rows are in groups of 128 if the weight has blocks of inputs, else with one scale each. With `parts` programs per
    output tile, each for some of the inputs (split-K), the result is [parts, num_rows, out_features] float32, to be
    summed; without a gate or a bias.
    """
    if not uses_triton(x.values.device):
        return scaled_gemm_ref(x, weight, dtype, bias, gated, parts)
    num_rows, in_features = x.values.shape
    has_blocks = weight.scales.shape[1] > 1
    assert not (gated and num_rows > MAX_GATED_ROWS)
    assert not has_blocks or weight.block_ins == x.group == FP8_INS
    assert (
        x.values.is_contiguous() and weight.values.is_contiguous() and not (parts > 1 and (gated or bias is not None))
    )
    out_features = len(weight.values) // 2 if gated else len(weight.values)
    num_steps = triton.cdiv(in_features, FP8_INS)
    assert num_steps % parts == 0
    shape = (num_rows, out_features) if parts == 1 else (parts, num_rows, out_features)
    can_share = has_blocks and weight.block_outs == FP8_INS and (not gated or out_features % FP8_INS == 0)
    out = torch.empty(shape, dtype=dtype if parts == 1 else torch.float32, device=x.values.device)
    outs, rows, num_warps, num_stages = _tile(num_rows)
    shared_bytes = device_limits(x.values.device)[1]
    if shared_bytes:
        stage_bytes = FP8_INS * (rows + outs * (2 if gated else 1))
        num_stages = min(num_stages, shared_bytes // stage_bytes - 1)
    _scaled_gemm_kernel[(triton.cdiv(out_features, outs) * triton.cdiv(num_rows, rows), parts)](
        x.values, x.scales, weight.values, weight.scales, bias, out, num_rows, in_features, out_features,
        num_steps // parts, x.scales.stride(0), x.scales.stride(1),
        EVEN=in_features % FP8_INS == 0, OUTS=outs, ROWS=rows, INS=FP8_INS, GROUP=_GROUP,
        WEIGHTS_FIRST=num_rows <= MAX_SPLITK_ROWS, SCALE_OUTS=weight.block_outs, ONE_SCALE=can_share,
        HAS_BLOCKS=has_blocks, GATED=gated, num_warps=num_warps, num_stages=num_stages,
        **pdl_options(x.values.device),
    )  # fmt: skip
    return out
