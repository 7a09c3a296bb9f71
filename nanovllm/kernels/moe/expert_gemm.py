"""The experts of few rows: each that some row has is read once, and no other one.

Of one row the time goes to reading weights: as in `gemv`, a program requests all its weights at once, and does not use
the tensor cores. Of more rows there is a program for each tile of outputs and each (row, choice); the first of an
expert's computes all its rows, and the others end at once. So nothing is sorted, and nothing waits for the host.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.e4m3 import Fp8Matrix, from_e4m3, kernel_arguments
from nanovllm.kernels.four_bits import FourBitMatrix, multiply_four_bits
from nanovllm.kernels.linear.gemv import load_scales, scaled_product
from nanovllm.kernels.moe.activation import Activation, activate, is_gated
from nanovllm.kernels.moe.route import Routing, SharedExpert
from nanovllm.kernels.policy import MAX_EXPERT_ROWS

_OUTS = 64
"""Rows of a weight per program; if gated, half of them the gate's."""
_STEP_BYTES = 256
"""Inputs per step, in bytes."""
_GEMV_WEIGHTS = 4096
"""Weights per program of one row, or all of an output's: small programs, since there are many and they start late, once
the experts are known. Qwen3-30B-A3B on an H100: 21.1 -> 18.4 us for gate and up, 12.0 -> 11.1 for down."""
_MOST_BY_FEW_WARPS = 16384


@jit
def _add_product(
    acc, x, weight_ptrs, mask, scale_ptrs, out_mask, start,
    SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    weight = tl.load(weight_ptrs, mask=mask, other=0.0)
    if SCALE_OUTS:
        # e4m3 becomes float32 by way of float16.
        narrow: tl.constexpr = tl.float16 if x.dtype == tl.float32 else x.dtype
        weight = from_e4m3(weight, narrow, NATIVE).to(x.dtype)
    if SCALE_INS:
        scales = tl.load(scale_ptrs + start // SCALE_INS, mask=out_mask, other=0.0)
        acc += tl.dot(x, weight, input_precision="ieee") * scales[None, :]
    else:
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    return acc


@jit
def _multiply(
    x_ptrs, x_mask, weight_ptrs, up_offset, out_mask, in_features, scale_ptrs, up_scale_ptrs,
    EVEN: tl.constexpr, INS: tl.constexpr, GATED: tl.constexpr,
    SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    ins = tl.arange(0, INS)
    acc = tl.zeros([x_mask.shape[0], out_mask.shape[0]], dtype=tl.float32)
    up = acc
    for start in range(0, in_features, INS):
        row_mask, mask = x_mask[:, None], out_mask[None, :]
        if not EVEN:
            row_mask = row_mask & (start + ins < in_features)[None, :]
            mask = mask & (start + ins < in_features)[:, None]
        x = tl.load(x_ptrs[:, None] + (start + ins)[None, :], mask=row_mask, other=0.0)
        ptrs = weight_ptrs[None, :] + (start + ins)[:, None]
        acc = _add_product(acc, x, ptrs, mask, scale_ptrs, out_mask, start, SCALE_OUTS, SCALE_INS, NATIVE)
        if GATED:
            ptrs = weight_ptrs[None, :] + up_offset + (start + ins)[:, None]
            up = _add_product(up, x, ptrs, mask, up_scale_ptrs, out_mask, start, SCALE_OUTS, SCALE_INS, NATIVE)
    if SCALE_OUTS and not SCALE_INS:
        acc *= tl.load(scale_ptrs, mask=out_mask, other=0.0)[None, :]
        if GATED:
            up *= tl.load(up_scale_ptrs, mask=out_mask, other=0.0)[None, :]
    return acc, up


@jit
def find_scales(
    scale_ptr, expert, outs, in_features, out_features,
    SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return pointers to the scales of one expert's outputs, of their first inputs; if gated, and of up's."""
    num_blocks = tl.cdiv(in_features, SCALE_INS) if SCALE_INS else 1
    first = expert * tl.cdiv(out_features * (2 if GATED else 1), SCALE_OUTS)
    ptrs = scale_ptr + (first + outs // SCALE_OUTS) * num_blocks
    return ptrs, scale_ptr + (first + (outs + out_features) // SCALE_OUTS) * num_blocks if GATED else ptrs


@jit
def _multiply_four_bits(
    x_ptrs, row_mask, values_ptr, expert, outs, in_features, out_features, scale_ptr, zero_ptr, factor_ptr,
    INS: tl.constexpr, GATED: tl.constexpr, SCALE_INS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Compute `_multiply` of weights in four bits; up's are columns of the same tile."""
    HALVES: tl.constexpr = 2 if GATED else 1
    COLUMNS: tl.constexpr = HALVES * outs.shape[0]
    # What lies beyond the end is computed from what does not, and is not stored.
    own = tl.minimum(outs, out_features - 1)[None, :] + tl.arange(0, HALVES)[:, None] * out_features
    own = tl.reshape(own, [COLUMNS]).to(tl.int64) + tl.cast(expert, tl.int64) * out_features * HALVES
    groups = own * tl.cdiv(in_features, SCALE_INS)
    zero_ptrs = None
    if zero_ptr is not None:
        zero_ptrs = zero_ptr + groups
    out = multiply_four_bits(
        tl.zeros([row_mask.shape[0], COLUMNS], dtype=tl.float32), x_ptrs, row_mask,
        values_ptr + own * (tl.cdiv(in_features, 32) * 16), scale_ptr + groups, zero_ptrs, own >= 0, in_features,
        INS, SCALE_INS, FORMAT,
    )  # fmt: skip
    if factor_ptr is not None:
        out *= tl.load(factor_ptr + own)[None, :]
    up = out
    if GATED:
        out, up = tl.split(tl.permute(tl.reshape(out, [row_mask.shape[0], 2, outs.shape[0]]), (0, 2, 1)))
    return out, up


@jit
def multiply_expert(
    x_ptrs, row_mask, weight_ptr, expert, outs, in_features, out_features, dtype: tl.constexpr,
    EVEN: tl.constexpr, INS: tl.constexpr, ACTIVATION: tl.constexpr,
    scale_ptr, SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr, NATIVE: tl.constexpr,
    zero_ptr, factor_ptr, FORMAT: tl.constexpr, bias_ptr,
):  # fmt: skip
    """Return the activation of rows times one expert's weights, [rows, outs] float32.

    x_ptrs: of the rows; weight_ptr: of the weights of all experts; scale_ptr and what follows: see `Fp8Matrix.scaling`
    and `FourBitMatrix.scaling`; bias_ptr: of the biases of all experts.
    """
    GATED: tl.constexpr = ACTIVATION is not None and ACTIVATION != "relu2"
    if FORMAT is not None:
        out, up = _multiply_four_bits(
            x_ptrs, row_mask, weight_ptr, expert, outs, in_features, out_features, scale_ptr, zero_ptr, factor_ptr,
            INS, GATED, SCALE_INS, FORMAT,
        )  # fmt: skip
    else:
        size = tl.cast(out_features, tl.int64) * in_features
        weight_ptrs = weight_ptr + expert * size * (2 if GATED else 1) + outs.to(tl.int64) * in_features
        scale_ptrs, up_scale_ptrs = scale_ptr, scale_ptr
        if SCALE_OUTS:
            scale_ptrs, up_scale_ptrs = find_scales(
                scale_ptr, expert, outs, in_features, out_features, SCALE_OUTS, SCALE_INS, GATED
            )
        out, up = _multiply(
            x_ptrs, row_mask, weight_ptrs, size, outs < out_features, in_features, scale_ptrs, up_scale_ptrs,
            EVEN, INS, GATED, SCALE_OUTS, SCALE_INS, NATIVE,
        )  # fmt: skip
    if bias_ptr is not None:
        bias_ptr += expert * out_features * (2 if GATED else 1)
        out += tl.load(bias_ptr + outs, mask=outs < out_features, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + out_features + outs, mask=outs < out_features, other=0.0).to(tl.float32)[None, :]
    return activate(out, up, dtype, ACTIVATION)


@jit(do_not_specialize=["num_rows", "first_expert"])
def _expert_gemm_kernel(
    x_ptr, experts_ptr, scales_ptr, weight_ptr, out_ptr, num_rows, first_expert, num_experts, in_features, out_features,
    EVEN: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, OUTS: tl.constexpr,
    INS: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
    scale_ptr=None, SCALE_OUTS: tl.constexpr = 0, SCALE_INS: tl.constexpr = 0, NATIVE: tl.constexpr = False,
    zero_ptr=None, factor_ptr=None, FORMAT: tl.constexpr = None, bias_ptr=None,
):  # fmt: skip
    IS_FIRST: tl.constexpr = ACTIVATION is not None
    slot = tl.program_id(1)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    rows, choices = tl.arange(0, ROWS)[:, None], tl.arange(0, CHOICES)[None, :]
    slots = rows * TOP_K + choices
    if IS_FIRST:
        wait_for_previous(PDL)
    chosen = tl.load(experts_ptr + slots, mask=(rows < num_rows) & (choices < TOP_K), other=-1)
    expert = tl.load(experts_ptr + slot)
    if not IS_FIRST:
        wait_for_previous(PDL)
    has_expert = chosen == expert
    num_earlier = tl.sum(tl.sum((has_expert & (slots < slot)).to(tl.int32), axis=1), axis=0)
    expert -= first_expert
    if (num_earlier == 0) & (expert >= 0) & (expert < num_experts):
        # Where a row has the expert, if it has: at most once, but in rows that are not numbers.
        row_slots = tl.max(tl.where(has_expert, slots, -1), axis=1)
        row_mask = row_slots >= 0
        row_slots = tl.maximum(row_slots, 0).to(tl.int64)
        x_ptrs = x_ptr + (tl.arange(0, ROWS) if IS_FIRST else row_slots) * in_features
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        out = multiply_expert(
            x_ptrs, row_mask, weight_ptr, expert, outs, in_features, out_features, dtype, EVEN, INS, ACTIVATION,
            scale_ptr, SCALE_OUTS, SCALE_INS, NATIVE, zero_ptr, factor_ptr, FORMAT, bias_ptr,
        )  # fmt: skip
        if not IS_FIRST:
            out *= tl.load(scales_ptr + row_slots, mask=row_mask, other=0.0)[:, None]
        mask = row_mask[:, None] & (outs < out_features)[None, :]
        tl.store(out_ptr + row_slots[:, None] * out_features + outs[None, :], out.to(dtype), mask=mask)


def expert_gemm(
    x: torch.Tensor, routing: Routing, weight: torch.Tensor | Fp8Matrix | FourBitMatrix, out: torch.Tensor,
    first_expert: int, activation: Activation | None, bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Multiply up to MAX_EXPERT_ROWS rows with the weights of their experts: the first ones, or down.

    x: [num_tokens, in_features], or for down [num_tokens, top_k, in_features], contiguous; routing: for down from an
    older kernel than the one ahead; weight, first_expert: see `fused_experts`; out: [num_tokens, top_k, out_features],
    filled where the expert is here, and for down weighted; activation: None for down; bias: of all experts.
    """
    num_rows, top_k = routing.experts.shape
    in_features, out_features = x.shape[-1], out.shape[-1]
    weight, scaling = kernel_arguments(weight)
    assert num_rows <= MAX_EXPERT_ROWS and x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    outs, ins = _OUTS // 2 if is_gated(activation) else _OUTS, _STEP_BYTES // x.element_size()
    if x.element_size() == 4 and weight.element_size() == 1:
        ins //= 2
    _expert_gemm_kernel[(triton.cdiv(out_features, outs), num_rows * top_k)](
        x, routing.experts, routing.weights, weight, out, num_rows, first_expert, len(weight), in_features,
        out_features, EVEN=in_features % ins == 0, ROWS=MAX_EXPERT_ROWS, TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k), OUTS=outs, INS=ins, ACTIVATION=activation, bias_ptr=bias,
        num_warps=4, num_stages=4, **pdl_options(x.device), **scaling,
    )  # fmt: skip


@jit(do_not_specialize=["first_expert"])
def _up_gemv_kernel(
    x_ptr, experts_ptr, weight_ptr, shared_ptr, gate_ptr, out_ptr, first_expert, num_experts, out_features,
    IN: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    scale_ptr=None, SCALE_OUTS: tl.constexpr = 0, SCALE_INS: tl.constexpr = 0, NATIVE: tl.constexpr = False,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION == "silu"
    choice = tl.program_id(1)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    ins = tl.arange(0, BLOCK_IN)
    size = tl.cast(out_features, tl.int64) * IN
    wait_for_previous(PDL)
    expert = tl.load(experts_ptr + choice, mask=choice < TOP_K, other=first_expert) - first_expert
    # Of an expert that is not here, no output is computed.
    is_out = outs < tl.where((expert >= 0) & (expert < num_experts), out_features, 0)
    first_ptr = weight_ptr + (2 if GATED else 1) * expert * size
    if shared_ptr is not None:  # noqa: SIM102 - known when compiled
        if choice == TOP_K:
            first_ptr = shared_ptr
    mask = is_out[:, None] & (ins < IN)[None, :]
    ptrs = first_ptr + outs.to(tl.int64)[:, None] * IN + ins[None, :]
    weight = tl.load(ptrs, mask=mask, other=0.0)
    up_weight = tl.load(ptrs + size, mask=mask, other=0.0) if GATED else weight
    x = tl.load(x_ptr + ins, mask=ins < IN, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if SCALE_OUTS:
        num_blocks: tl.constexpr = (IN + SCALE_INS - 1) // SCALE_INS if SCALE_INS else 1
        scale_ptr += expert * tl.cdiv((2 if GATED else 1) * out_features, SCALE_OUTS) * num_blocks
        scales = load_scales(scale_ptr, outs, is_out, IN, BLOCK_IN, SCALE_OUTS, SCALE_INS)
        out = scaled_product(weight, x, scales, BLOCK_IN, BLOCK_OUT, SCALE_INS, NATIVE)
        up = out
        if GATED:
            up_scales = load_scales(scale_ptr, outs + out_features, is_out, IN, BLOCK_IN, SCALE_OUTS, SCALE_INS)
            up = scaled_product(up_weight, x, up_scales, BLOCK_IN, BLOCK_OUT, SCALE_INS, NATIVE)
    else:
        out = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
        up = tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1) if GATED else out
    out = activate(out, up, dtype, ACTIVATION)
    if gate_ptr is not None:  # noqa: SIM102 - known when compiled
        if choice == TOP_K:
            gate = tl.sum(x * tl.load(gate_ptr + ins, mask=ins < IN, other=0.0).to(tl.float32), axis=0)
            out *= 1 / (1 + tl.exp(-gate))
    tl.store(out_ptr + choice * out_features + outs, out.to(dtype), mask=outs < out_features)


@jit
def _load_expert_scales(
    scale_ptr, experts, is_here, outs, out_features,
    IN: tl.constexpr, BLOCK_IN: tl.constexpr, SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr,
):  # fmt: skip
    NUM_BLOCKS: tl.constexpr = (IN + SCALE_INS - 1) // SCALE_INS if SCALE_INS else 1
    blocks = tl.arange(0, BLOCK_IN // SCALE_INS if SCALE_INS else 1)[None, None, :]
    ptrs, _ = find_scales(
        scale_ptr, experts[:, None, None], outs[None, :, None], IN, out_features, SCALE_OUTS, SCALE_INS, False
    )
    mask = is_here[:, None, None] & (outs < out_features)[None, :, None] & (blocks < NUM_BLOCKS)
    return tl.load(ptrs + blocks, mask=mask, other=0.0)


@jit(do_not_specialize=["first_expert"])
def _down_gemv_kernel(
    x_ptr, experts_ptr, scales_ptr, weight_ptr, shared_ptr, out_ptr, first_expert, num_experts, out_features,
    IN: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    PDL: tl.constexpr,
    scale_ptr=None, SCALE_OUTS: tl.constexpr = 0, SCALE_INS: tl.constexpr = 0, NATIVE: tl.constexpr = False,
):  # fmt: skip
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    ins = tl.arange(0, BLOCK_IN)
    choices = tl.arange(0, CHOICES)
    experts = tl.load(experts_ptr + choices, mask=choices < TOP_K, other=0) - first_expert
    is_here = (experts >= 0) & (experts < num_experts) & (choices < TOP_K)
    scales = tl.load(scales_ptr + choices, mask=is_here, other=0.0)
    size = tl.cast(out_features, tl.int64) * IN
    offsets = (experts * size)[:, None, None] + (outs.to(tl.int64) * IN)[None, :, None] + ins[None, None, :]
    mask = is_here[:, None, None] & (outs < out_features)[None, :, None] & (ins < IN)[None, None, :]
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    if SCALE_OUTS:
        weight_scales = _load_expert_scales(
            scale_ptr, experts, is_here, outs, out_features, IN, BLOCK_IN, SCALE_OUTS, SCALE_INS
        )
    if shared_ptr is not None:
        # Beside the first choice, so that it has a part in the same sums.
        is_first = (choices == 0)[:, None, None]
        shared_offsets = (outs.to(tl.int64) * IN)[None, :, None] + ins[None, None, :] + 0 * choices[:, None, None]
        shared_mask = is_first & (outs < out_features)[None, :, None] & (ins < IN)[None, None, :]
        shared = tl.load(shared_ptr + shared_offsets, mask=shared_mask, other=0.0)
    wait_for_previous(PDL)
    x_mask = is_here[:, None] & (ins < IN)[None, :]
    x = tl.load(x_ptr + choices[:, None] * IN + ins[None, :], mask=x_mask, other=0.0).to(tl.float32)
    if SCALE_OUTS:
        by_input = from_e4m3(weight, tl.float16, NATIVE).to(tl.float32) * x[:, None, :]
        EACH: tl.constexpr = SCALE_INS if SCALE_INS else BLOCK_IN
        by_block = tl.sum(tl.reshape(by_input, [CHOICES, BLOCK_OUT, BLOCK_IN // EACH, EACH]), axis=3)
        products = tl.sum(by_block * weight_scales, axis=2) * scales[:, None]
    elif shared_ptr is not None:
        shared_x_mask = (choices == 0)[:, None] & (ins < IN)[None, :]
        shared_x = tl.load(x_ptr + TOP_K * IN + 0 * choices[:, None] + ins[None, :], mask=shared_x_mask, other=0.0)
        by_input = weight.to(tl.float32) * (x * scales[:, None])[:, None, :]
        products = tl.sum(by_input + shared.to(tl.float32) * shared_x.to(tl.float32)[:, None, :], axis=2)
    else:
        products = tl.sum(weight.to(tl.float32) * x[:, None, :], axis=2) * scales[:, None]
    out = tl.sum(products, axis=0)
    tl.store(out_ptr + outs, out.to(out_ptr.dtype.element_ty), mask=outs < out_features)


def up_gemv(
    x: torch.Tensor, routing: Routing, weight: torch.Tensor | Fp8Matrix | FourBitMatrix, out: torch.Tensor,
    first_expert: int, activation: Activation, shared: SharedExpert | None = None,
) -> None:  # fmt: skip
    """Compute the first `expert_gemm` of one row; `out` is zero where the expert is not here.

    With a shared expert, `out` has one more row for it, which the gate has scaled.
    """
    (rows, in_features), size, top_k = x.shape, out.shape[2], routing.experts.shape[1]
    weight, scaling = kernel_arguments(weight)
    assert rows == 1 and x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    block_in = triton.next_power_of_2(in_features)
    block_out = min(16, max(1, _GEMV_WEIGHTS // (2 * block_in if activation == "silu" else block_in)))
    shared_up, gate = (None, None) if shared is None else (shared.up, shared.gate)
    _up_gemv_kernel[(triton.cdiv(size, block_out), out.shape[1])](
        x, routing.experts, weight, shared_up, gate, out, first_expert, len(weight), size, IN=in_features,
        BLOCK_IN=block_in, BLOCK_OUT=block_out, TOP_K=top_k, ACTIVATION=activation, num_warps=4,
        **pdl_options(x.device), **scaling,
    )  # fmt: skip


def down_gemv(
    x: torch.Tensor, routing: Routing, weight: torch.Tensor | Fp8Matrix | FourBitMatrix, out: torch.Tensor,
    first_expert: int, shared: SharedExpert | None = None,
) -> None:  # fmt: skip
    """Compute the sum, [1, out_features], over the experts of one row of what `expert_gemm` has for down.

    With a shared expert, x has one more row for it.
    """
    size, top_k, (rows, out_features) = x.shape[2], routing.experts.shape[1], out.shape
    weight, scaling = kernel_arguments(weight)
    assert rows == 1 and x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    block_in, choices = triton.next_power_of_2(size), triton.next_power_of_2(top_k)
    block_out = min(16, max(1, _GEMV_WEIGHTS // (choices * block_in)))
    _down_gemv_kernel[(triton.cdiv(out_features, block_out),)](
        x, routing.experts, routing.weights, weight, None if shared is None else shared.down, out, first_expert,
        len(weight), out_features, IN=size, BLOCK_IN=block_in, BLOCK_OUT=block_out, TOP_K=top_k, CHOICES=choices,
        num_warps=4 if choices * block_in <= _MOST_BY_FEW_WARPS else 8, **pdl_options(x.device), **scaling,
    )  # fmt: skip
