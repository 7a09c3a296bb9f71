"""SwiGLU experts, of which each token has some."""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm.kernels._triton import uses_triton
from nanovllm.kernels.moe.expert_gemm import MAX_ROWS, expert_gemm
from nanovllm.kernels.moe.expert_gemv import down_gemv, gate_up_gemv
from nanovllm.kernels.moe.grouped_gemm import grouped_gemm, tile_limits
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.moe.sort_slots import sort_slots
from nanovllm.kernels.silu_and_mul import silu_and_mul_ref


def fused_experts_ref(
    x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor, first_expert: int = 0
) -> torch.Tensor:
    """Plain torch form of `fused_experts`."""
    experts = routing.experts - first_expert
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        if 0 <= expert < len(gate_up):
            tokens, choices = (experts == expert).nonzero(as_tuple=True)
            activated = silu_and_mul_ref(functional.linear(x[tokens], gate_up[expert]))
            weights = routing.weights[tokens, choices].unsqueeze(1)
            out.index_add_(0, tokens, functional.linear(activated, down[expert]).float() * weights)
    return out.to(x.dtype)


def fused_experts(
    x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor, first_expert: int = 0
) -> torch.Tensor:
    """Return the weighted sum of what each token's experts make of it.

    Args:
        x: [num_tokens, in_features], contiguous.
        routing: the experts of each token; those that are not here count nothing.
        gate_up: [num_experts, 2 * size, in_features]; of each expert the gate's rows, then as many of up.
        down: [num_experts, in_features, size].
        first_expert: the number of the first of them.

    Returns:
        [num_tokens, in_features], or the parts of a sum, [top_k, num_tokens, in_features], which the next norm adds up.
    """
    if not uses_triton(x.device):
        return fused_experts_ref(x, routing, gate_up, down, first_expert)
    (num_tokens, top_k), (num_experts, in_features, size) = routing.experts.shape, down.shape
    activated = torch.empty(num_tokens, top_k, size, dtype=x.dtype, device=x.device)
    if num_tokens == 1:
        out = torch.empty_like(x)
        gate_up_gemv(x, routing, gate_up, activated, first_expert)
        down_gemv(activated, routing, down, out, first_expert)
        return out
    # Of experts that are not here, no part is written.
    make = torch.empty if num_experts == routing.num_experts else torch.zeros
    parts = make(num_tokens, top_k, in_features, dtype=x.dtype, device=x.device)
    if num_tokens <= MAX_ROWS:
        expert_gemm(x, routing, gate_up, activated, first_expert, gated=True)
        expert_gemm(activated, routing, down, parts, first_expert, gated=False)
    else:
        order = sort_slots(routing, first_expert, num_experts)
        grouped_gemm(x, routing, order, gate_up, activated.flatten(0, 1), gated=True)
        grouped_gemm(activated.flatten(0, 1), routing, order, down, parts.flatten(0, 1), gated=False)
    return parts.transpose(0, 1)


def kernel_rows(num_experts: int, top_k: int) -> tuple[int, ...]:
    """Return the numbers of rows at which the choice of kernels or of their tiles changes."""
    return 1, 2, MAX_ROWS + 1, *(rows for rows in tile_limits(num_experts, top_k) if rows > MAX_ROWS + 1)
