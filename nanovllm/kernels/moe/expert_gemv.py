"""The experts of one row; the time goes to reading their weights.

As in `gemv`, a program requests all its weights at once, and does not use the tensor cores.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.e4m3 import Fp8Matrix, from_e4m3
from nanovllm.kernels.linear.gemv import load_scales, scaled_product
from nanovllm.kernels.moe.expert_gemm import find_scales, swiglu
from nanovllm.kernels.moe.route import Routing

_WEIGHTS = 4096
"""Weights per program, or all of an output's: small programs, since there are many and they start late, once the
experts are known. Qwen3-30B-A3B on an H100: 21.1 -> 18.4 us for gate and up, 12.0 -> 11.1 for down."""
_MOST_BY_FEW_WARPS = 16384


@jit(do_not_specialize=["first_expert"])
def _gate_up_gemv_kernel(
    x_ptr, experts_ptr, weight_ptr, out_ptr, first_expert, num_experts, out_features,
    IN: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, PDL: tl.constexpr,
    scale_ptr=None, SCALE_OUTS: tl.constexpr = 0, SCALE_INS: tl.constexpr = 0, NATIVE: tl.constexpr = False,
):  # fmt: skip
    choice = tl.program_id(1)
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    ins = tl.arange(0, BLOCK_IN)
    wait_for_previous(PDL)
    expert = tl.load(experts_ptr + choice) - first_expert
    # Of an expert that is not here, no output is computed.
    is_out = outs < tl.where((expert >= 0) & (expert < num_experts), out_features, 0)
    mask = is_out[:, None] & (ins < IN)[None, :]
    size = tl.cast(out_features, tl.int64) * IN
    ptrs = weight_ptr + 2 * expert * size + outs.to(tl.int64)[:, None] * IN + ins[None, :]
    gate_weight = tl.load(ptrs, mask=mask, other=0.0)
    up_weight = tl.load(ptrs + size, mask=mask, other=0.0)
    x = tl.load(x_ptr + ins, mask=ins < IN, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if SCALE_OUTS:
        num_blocks: tl.constexpr = (IN + SCALE_INS - 1) // SCALE_INS if SCALE_INS else 1
        scale_ptr += expert * tl.cdiv(2 * out_features, SCALE_OUTS) * num_blocks
        scales = load_scales(scale_ptr, outs, is_out, IN, BLOCK_IN, SCALE_OUTS, SCALE_INS)
        up_scales = load_scales(scale_ptr, outs + out_features, is_out, IN, BLOCK_IN, SCALE_OUTS, SCALE_INS)
        gate = scaled_product(gate_weight, x, scales, BLOCK_IN, BLOCK_OUT, SCALE_INS, NATIVE)
        up = scaled_product(up_weight, x, up_scales, BLOCK_IN, BLOCK_OUT, SCALE_INS, NATIVE)
    else:
        gate = tl.sum(gate_weight.to(tl.float32) * x[None, :], axis=1)
        up = tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1)
    out = swiglu(gate, up, dtype)
    tl.store(out_ptr + choice * out_features + outs, out.to(dtype), mask=outs < out_features)


@jit
def _load_expert_scales(
    scale_ptr, experts, is_here, outs, out_features,
    IN: tl.constexpr, BLOCK_IN: tl.constexpr, SCALE_OUTS: tl.constexpr, SCALE_INS: tl.constexpr,
):  # fmt: skip
    """Return the scales of outputs of several experts, [experts, outs, blocks of inputs]."""
    NUM_BLOCKS: tl.constexpr = (IN + SCALE_INS - 1) // SCALE_INS if SCALE_INS else 1
    blocks = tl.arange(0, BLOCK_IN // SCALE_INS if SCALE_INS else 1)[None, None, :]
    ptrs, _ = find_scales(
        scale_ptr, experts[:, None, None], outs[None, :, None], IN, out_features, SCALE_OUTS, SCALE_INS, False
    )
    mask = is_here[:, None, None] & (outs < out_features)[None, :, None] & (blocks < NUM_BLOCKS)
    return tl.load(ptrs + blocks, mask=mask, other=0.0)


@jit(do_not_specialize=["first_expert"])
def _down_gemv_kernel(
    x_ptr, experts_ptr, scales_ptr, weight_ptr, out_ptr, first_expert, num_experts, out_features,
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
    wait_for_previous(PDL)
    x_mask = is_here[:, None] & (ins < IN)[None, :]
    x = tl.load(x_ptr + choices[:, None] * IN + ins[None, :], mask=x_mask, other=0.0).to(tl.float32)
    if SCALE_OUTS:
        by_input = from_e4m3(weight, tl.float16, NATIVE).to(tl.float32) * x[:, None, :]
        EACH: tl.constexpr = SCALE_INS if SCALE_INS else BLOCK_IN
        by_block = tl.sum(tl.reshape(by_input, [CHOICES, BLOCK_OUT, BLOCK_IN // EACH, EACH]), axis=3)
        products = tl.sum(by_block * weight_scales, axis=2)
    else:
        products = tl.sum(weight.to(tl.float32) * x[:, None, :], axis=2)
    out = tl.sum(products * scales[:, None], axis=0)
    tl.store(out_ptr + outs, out.to(out_ptr.dtype.element_ty), mask=outs < out_features)


def _block_out(each: int) -> int:
    """Return the outputs per program, given the weights of each."""
    return min(16, max(1, _WEIGHTS // each))


def gate_up_gemv(
    x: torch.Tensor, routing: Routing, weight: torch.Tensor | Fp8Matrix, out: torch.Tensor, first_expert: int
) -> None:
    """Compute SiLU(gate) * up of one row for each of its experts.

    Args:
        x: [1, in_features], contiguous.
        routing: the row's experts.
        weight: [num_experts, 2 * size, in_features].
        out: [1, top_k, size]; zeros where the expert is not here.
        first_expert: the number of the first of them.
    """
    (rows, in_features), (_, top_k, size) = x.shape, out.shape
    scaling = {}
    if isinstance(weight, Fp8Matrix):
        scaling, weight = weight.scaling, weight.bytes
    assert rows == 1 and x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    block_in = triton.next_power_of_2(in_features)
    block_out = _block_out(2 * block_in)
    _gate_up_gemv_kernel[(triton.cdiv(size, block_out), top_k)](
        x, routing.experts, weight, out, first_expert, len(weight), size,
        IN=in_features, BLOCK_IN=block_in, BLOCK_OUT=block_out, num_warps=4, **pdl_options(x.device), **scaling,
    )  # fmt: skip


def down_gemv(
    x: torch.Tensor, routing: Routing, weight: torch.Tensor | Fp8Matrix, out: torch.Tensor, first_expert: int
) -> None:
    """Compute the weighted sum of the products of one row's experts.

    Args:
        x: [1, top_k, size], contiguous.
        routing: the row's experts; from a kernel before the one ahead.
        weight: [num_experts, out_features, size].
        out: [1, out_features].
        first_expert: the number of the first expert; experts of other ranks count nothing.
    """
    (_, top_k, size), (rows, out_features) = x.shape, out.shape
    scaling = {}
    if isinstance(weight, Fp8Matrix):
        scaling, weight = weight.scaling, weight.bytes
    assert rows == 1 and x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    block_in, choices = triton.next_power_of_2(size), triton.next_power_of_2(top_k)
    block_out = _block_out(choices * block_in)
    _down_gemv_kernel[(triton.cdiv(out_features, block_out),)](
        x, routing.experts, routing.weights, weight, out, first_expert, len(weight), out_features,
        IN=size, BLOCK_IN=block_in, BLOCK_OUT=block_out, TOP_K=top_k, CHOICES=choices,
        num_warps=4 if choices * block_in <= _MOST_BY_FEW_WARPS else 8, **pdl_options(x.device), **scaling,
    )  # fmt: skip
