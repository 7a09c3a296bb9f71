"""The experts of one row, whose time goes to reading the weights of those that it has.

As in `gemv`, a program requests all its weights at once, and does not use the tensor cores.
"""

from __future__ import annotations

import torch

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.fast_math import round_to
from nanovllm.kernels.moe.route import Routing

_GATE_UP_WEIGHTS = 16384
"""Weights per program."""
_DOWN_WEIGHTS = 16384


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


def _block_out(weights: int, each: int) -> int:
    """Return the outputs per program that has room for so many weights, of so many an output."""
    return min(16, max(1, weights // each))


def expert_gemv(
    x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor, first_expert: int = 0
) -> torch.Tensor:
    """Compute `fused_experts` of one row; returns [1, in_features].

    The choice of experts must come from the kernel ahead, or an older one.
    """
    (rows, in_features), top_k = x.shape, routing.experts.shape[1]
    num_experts, _, size = down.shape
    assert rows == 1 and x.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous()
    activated = torch.empty(top_k, size, dtype=x.dtype, device=x.device)
    block_in = triton.next_power_of_2(in_features)
    block_out = _block_out(_GATE_UP_WEIGHTS, 2 * block_in)
    _gate_up_gemv_kernel[(triton.cdiv(size, block_out), top_k)](
        x, routing.experts, gate_up, activated, first_expert, num_experts, size,
        IN=in_features, BLOCK_IN=block_in, BLOCK_OUT=block_out, num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
    out = torch.empty_like(x)
    block_in, choices = triton.next_power_of_2(size), triton.next_power_of_2(top_k)
    block_out = _block_out(_DOWN_WEIGHTS, choices * block_in)
    _down_gemv_kernel[(triton.cdiv(in_features, block_out),)](
        activated, routing.experts, routing.weights, down, out, first_expert, num_experts, in_features,
        IN=size, BLOCK_IN=block_in, BLOCK_OUT=block_out, TOP_K=top_k, CHOICES=choices,
        num_warps=4 if choices * block_in <= _DOWN_WEIGHTS else 8, **pdl_options(x.device),
    )  # fmt: skip
    return out
