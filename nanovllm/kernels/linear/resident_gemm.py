"""Linear layers of few rows and few inputs, in which a program requests all of its weights before `gdc_wait`.

A program holds whole rows of inputs, so it can add the residual and normalise first. Each warp multiplies its own part
of the inputs, which keeps many warps busy on narrow output tiles. It is in Gluon because Triton from 3.7 on chooses a
shared-memory layout with bank conflicts here (16.1 us instead of 8.2 on an H200).
"""

from __future__ import annotations

import torch

from nanovllm.kernels._gluon import async_copy, async_load, gl, gluon, kernel, mma_v2
from nanovllm.kernels._triton import device_limits, pdl_options, triton, wait_for_previous
from nanovllm.kernels.fast_math import round_to, rsqrt
from nanovllm.kernels.policy import MAX_RESIDENT_OUTS, MAX_SKINNY_ROWS, RESIDENT_CHUNK, resident_outs
from nanovllm.kernels.rms_norm import Norm

_WARPS = gl.constexpr(16)
_WARP_INS = gl.constexpr(RESIDENT_CHUNK // 16)
"""Inputs per warp and chunk."""
_ROWS = gl.constexpr(MAX_SKINNY_ROWS)
_LOAD = gl.constexpr(gl.BlockedLayout([1, 1, 8], [4, 1, 8], [4, 4, 1], [2, 0, 1]))
"""Layout of [warps, rows or outputs, inputs of a warp]."""
_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
"""Swizzled, so that the eight rows or outputs that a matrix instruction loads at once lie in different banks."""
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [_WARPS.value, 1, 1], [1, 16, 8]))


@gluon.jit
def _chunk_indices(NUMBER: gl.constexpr):
    """Return indices of a chunk's inputs, [warps, 1, inputs of a warp], and of its rows or outputs, [1, NUMBER, 1]."""
    warps = gl.arange(0, _WARPS, gl.SliceLayout(1, gl.SliceLayout(2, _LOAD)))
    rows = gl.arange(0, NUMBER, gl.SliceLayout(0, gl.SliceLayout(2, _LOAD)))
    ins = gl.arange(0, _WARP_INS, gl.SliceLayout(0, gl.SliceLayout(0, _LOAD)))
    parts = gl.expand_dims(gl.expand_dims(warps * _WARP_INS, 1), 2)
    return parts + gl.expand_dims(gl.expand_dims(ins, 0), 0), gl.expand_dims(gl.expand_dims(rows, 0), 2)


@gluon.jit
def _sum_of_warps(acc):
    ROWS: gl.constexpr = acc.shape[1]
    OUTS: gl.constexpr = acc.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, _WARPS], [32 // OUTS, OUTS, 1], [_WARPS, 1, 1], [2, 1, 0])
    parts = gl.convert_layout(gl.permute(acc, (1, 2, 0)), LAYOUT)
    for i in gl.static_range(4):
        even, odd = gl.split(gl.reshape(parts, [ROWS, OUTS, _WARPS >> (i + 1), 2]))
        parts = even + odd
    out = gl.reshape(parts, [ROWS, OUTS])
    return gl.convert_layout(out, gl.BlockedLayout([1, 1], [32 // OUTS, OUTS], [_WARPS, 1], [1, 0]))


@gluon.jit
def _begin_copies(
    weight_ptr, first_out, out_features,
    IN: gl.constexpr, CHUNKS: gl.constexpr, OUTS: gl.constexpr, BLOCK_OUT: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Start copying a program's weights into shared memory, [chunks or (gate, up), warps, outputs, warp's inputs]."""
    HALVES: gl.constexpr = 2 if GATED else 1
    shape: gl.constexpr = [CHUNKS * HALVES, _WARPS, BLOCK_OUT, _WARP_INS]
    weights = gl.allocate_shared_memory(weight_ptr.dtype.element_ty, shape, _SHARED)
    ins, own_outs = _chunk_indices(BLOCK_OUT)
    is_out = (own_outs < OUTS) & (first_out + own_outs < out_features)
    ptrs = weight_ptr + (first_out + own_outs).to(gl.int64) * IN + ins
    for chunk in gl.static_range(CHUNKS):
        mask = (chunk * _WARPS * _WARP_INS + ins < IN) & is_out
        async_load(weights.index(chunk * HALVES), ptrs + chunk * _WARPS * _WARP_INS, mask=mask)
        if GATED:
            async_load(weights.index(1), ptrs + gl.cast(out_features, gl.int64) * IN, mask=mask)
    async_copy.commit_group()
    return weights


@gluon.jit
def _normed(x, norm_weight, eps, IN: gl.constexpr):
    wide = x.to(gl.float32)
    scale = rsqrt(gl.sum(gl.sum(wide * wide, axis=2), axis=0) / IN + eps)
    return (wide * gl.expand_dims(gl.expand_dims(scale, 0), 2) * norm_weight).to(x.dtype)


@gluon.jit
def _operand(shared, INDEX: gl.constexpr):
    return shared.index(INDEX).permute((0, 2, 1)).load(gl.DotOperandLayout(1, _MMA, 2))


@kernel(do_not_specialize=["num_rows"])
def _resident_gemm_kernel(
    x_ptr, residual_ptr, norm_weight_ptr, weight_ptr, bias_ptr, out_ptr, total_ptr, eps, num_rows, out_features,
    IN: gl.constexpr, CHUNKS: gl.constexpr, OUTS: gl.constexpr, BLOCK_OUT: gl.constexpr, GATED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    first_out = gl.program_id(0) * OUTS
    weights = _begin_copies(weight_ptr, first_out, out_features, IN, CHUNKS, OUTS, BLOCK_OUT, GATED)
    ins, rows = _chunk_indices(_ROWS)
    if norm_weight_ptr is not None:
        norm_weight = gl.load(norm_weight_ptr + ins, mask=ins < IN, other=0.0).to(gl.float32)
    wait_for_previous(PDL)
    xs = gl.allocate_shared_memory(dtype, [CHUNKS, _WARPS, _ROWS, _WARP_INS], _SHARED)
    for chunk in gl.static_range(CHUNKS):
        chunk_ins = chunk * _WARPS * _WARP_INS + ins
        offsets = rows * IN + chunk_ins
        mask = (rows < num_rows) & (chunk_ins < IN)
        x = gl.load(x_ptr + offsets, mask=mask, other=0.0)
        if residual_ptr is not None:
            x = (x.to(gl.float32) + gl.load(residual_ptr + offsets, mask=mask, other=0.0).to(gl.float32)).to(dtype)
            gl.store(total_ptr + offsets, x, mask=mask & (rows % gl.num_programs(0) == gl.program_id(0)))
        if norm_weight_ptr is not None:
            x = _normed(x, norm_weight, eps, IN)
        xs.index(chunk).store(x)
    async_copy.wait_group(0)
    acc = gl.zeros([_WARPS, _ROWS, BLOCK_OUT], gl.float32, _MMA)
    up = gl.zeros([_WARPS, _ROWS, BLOCK_OUT], gl.float32, _MMA)
    for chunk in gl.static_range(CHUNKS):
        x = xs.index(chunk).load(gl.DotOperandLayout(0, _MMA, 2))
        acc = mma_v2(x, _operand(weights, 0 if GATED else chunk), acc)
        if GATED:
            up = mma_v2(x, _operand(weights, 1), up)
    # From here on, values are rounded as by separate ops.
    out = _sum_of_warps(acc)
    outs = gl.arange(0, BLOCK_OUT, gl.SliceLayout(0, out.type.layout))
    out_rows = gl.arange(0, _ROWS, gl.SliceLayout(1, out.type.layout))
    is_out = (outs < OUTS) & (first_out + outs < out_features)
    if bias_ptr is not None:
        out += gl.load(bias_ptr + first_out + outs, mask=is_out, other=0.0).to(gl.float32)[None, :]
    if GATED:
        out = round_to(out, dtype)
        out = out / (1 + gl.exp(-out)) * round_to(_sum_of_warps(up), dtype)
    ptrs = out_ptr + out_rows[:, None] * out_features + (first_out + outs)[None, :]
    gl.store(ptrs, out.to(dtype), mask=(out_rows < num_rows)[:, None] & is_out[None, :])


def resident_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, norm: Norm | None = None,
    residual: torch.Tensor | None = None, gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute `norm_linear` for up to MAX_SKINNY_ROWS rows; with a norm or a gate, for up to RESIDENT_CHUNK inputs."""
    num_rows, in_features = x.shape
    out_features = len(weight) // 2 if gated else len(weight)
    chunks = triton.cdiv(in_features, RESIDENT_CHUNK)
    assert x.is_contiguous() and weight.is_contiguous() and not (gated and bias is not None) and in_features % 8 == 0
    assert (norm is None and not gated) or chunks == 1
    assert residual is None or (norm is not None and residual.is_contiguous())
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(x)
    norm_weight, eps = norm or (None, 0.0)
    outs = min(MAX_RESIDENT_OUTS, resident_outs(out_features, device_limits(x.device)[0]))
    _resident_gemm_kernel[(triton.cdiv(out_features, outs),)](
        x, residual, norm_weight, weight, bias, out, total, eps, num_rows, out_features,
        IN=in_features, CHUNKS=chunks, OUTS=outs, BLOCK_OUT=triton.next_power_of_2(outs), GATED=gated,
        num_warps=_WARPS.value, **pdl_options(x.device),
    )  # fmt: skip
    return out, total
