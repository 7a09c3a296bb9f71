"""SwiGLU experts, of which each token has some."""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm.kernels.moe.route import Routing
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
        [num_tokens, in_features], or the parts of a sum, [top_k, num_tokens, in_features].
    """
    return fused_experts_ref(x, routing, gate_up, down, first_expert)
