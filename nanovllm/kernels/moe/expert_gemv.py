"""The experts of one row, whose time goes to reading the weights of those that it has.

As in `gemv`, a program requests all its weights at once, and does not use the tensor cores.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.fast_math import round_to
from nanovllm.kernels.moe.route import Routing

_WEIGHTS = 4096
"""Weights per program, or as many as an output has: small programs, since there are many and they start late, once the
experts are known. Qwen3-30B-A3B on an H100: 21.1 -> 18.4 us for gate and up, 12.0 -> 11.1 for down."""
_MOST_BY_FEW_WARPS = 16384


@jit(do_not_specialize=["first_expert"])
def _gate_up_gemv_kernel(
    x_ptr, experts_ptr, weight_ptr, out_ptr, first_expert, num_experts, out_features,
    IN: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, PDL: tl.constexpr,
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
    # Rounded as by separate ops.
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = round_to(tl.sum(gate_weight.to(tl.float32) * x[None, :], axis=1), dtype)
    up = round_to(tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1), dtype)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_ptr + choice * out_features + outs, out.to(dtype), mask=outs < out_features)


@jit(do_not_specialize=["first_expert"])
def _down_gemv_kernel(
    x_ptr, experts_ptr, scales_ptr, weight_ptr, out_ptr, first_expert, num_experts, out_features,
    IN: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    PDL: tl.constexpr,
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
    wait_for_previous(PDL)
    x_mask = is_here[:, None] & (ins < IN)[None, :]
    x = tl.load(x_ptr + choices[:, None] * IN + ins[None, :], mask=x_mask, other=0.0).to(tl.float32)
    products = tl.sum(weight.to(tl.float32) * x[:, None, :], axis=2)
    out = tl.sum(products * scales[:, None], axis=0)
    tl.store(out_ptr + outs, out.to(out_ptr.dtype.element_ty), mask=outs < out_features)


def _block_out(each: int) -> int:
    """Return the outputs per program where each takes so many weights."""
    return min(16, max(1, _WEIGHTS // each))


def gate_up_gemv(x: torch.Tensor, routing: Routing, weight: torch.Tensor, out: torch.Tensor, first_expert: int) -> None:
    """Compute SiLU(gate) * up of one row for each of its experts.

    Args:
        x: [1, in_features], contiguous.
        routing: the row's experts.
        weight: [num_experts, 2 * size, in_features].
        out: [1, top_k, size]; zeros where the expert is not here.
        first_expert: the number of the first of them.
    """
    (rows, in_features), (_, top_k, size) = x.shape, out.shape
    assert rows == 1 and x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    block_in = triton.next_power_of_2(in_features)
    block_out = _block_out(2 * block_in)
    _gate_up_gemv_kernel[(triton.cdiv(size, block_out), top_k)](
        x, routing.experts, weight, out, first_expert, len(weight), size,
        IN=in_features, BLOCK_IN=block_in, BLOCK_OUT=block_out, num_warps=4, **pdl_options(x.device),
    )  # fmt: skip


def down_gemv(x: torch.Tensor, routing: Routing, weight: torch.Tensor, out: torch.Tensor, first_expert: int) -> None:
    """Compute the weighted sum of the products of one row's experts.

    Args:
        x: [1, top_k, size], contiguous.
        routing: the row's experts; from a kernel before the one ahead.
        weight: [num_experts, out_features, size].
        out: [1, out_features].
        first_expert: the number of the first expert; those that are not here count nothing.
    """
    (_, top_k, size), (rows, out_features) = x.shape, out.shape
    assert rows == 1 and x.is_contiguous() and weight.is_contiguous() and out.is_contiguous()
    block_in, choices = triton.next_power_of_2(size), triton.next_power_of_2(top_k)
    block_out = _block_out(choices * block_in)
    _down_gemv_kernel[(triton.cdiv(out_features, block_out),)](
        x, routing.experts, routing.weights, weight, out, first_expert, len(weight), out_features,
        IN=size, BLOCK_IN=block_in, BLOCK_OUT=block_out, TOP_K=top_k, CHOICES=choices,
        num_warps=4 if choices * block_in <= _MOST_BY_FEW_WARPS else 8, **pdl_options(x.device),
    )  # fmt: skip
