"""Experts of two products, some for each token.

Beside weights in e4m3 the rows of a step are rounded as in linear layers (`norm_linear`), before each product.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm.kernels._triton import uses_triton
from nanovllm.kernels.e4m3 import Fp8Matrix, dequantize_ref
from nanovllm.kernels.four_bits import FourBitMatrix, dequantize_four_bits_ref
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding, quantize_rows, quantize_rows_ref
from nanovllm.kernels.moe.activation import Activation, activate_rows
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.policy import FASTEST, ExpertsKernel, KernelPolicy

ExpertsMatrices = torch.Tensor | Fp8Matrix | FourBitMatrix
"""One matrix for each expert, [num_experts, out_features, in_features]."""


def _torch_linear(x: torch.Tensor, weight: ExpertsMatrices, expert: int, quantizes_rows: bool) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return functional.linear(x, weight[expert])
    if isinstance(weight, FourBitMatrix):
        return functional.linear(x, dequantize_four_bits_ref(weight.expert(expert), x.dtype))
    if quantizes_rows:
        from nanovllm.kernels.linear.scaled_gemm import scaled_gemm_ref  # noqa: PLC0415

        return scaled_gemm_ref(quantize_rows_ref(x, Rounding(weight.block_ins))[0], weight.expert(expert), x.dtype)
    return functional.linear(x, dequantize_ref(weight.expert(expert), x.dtype))


def fused_experts_ref(
    x: torch.Tensor,
    routing: Routing,
    up: ExpertsMatrices,
    down: ExpertsMatrices,
    first_expert: int = 0,
    quantizes_rows: bool = False,
    activation: Activation = "silu",
) -> torch.Tensor:
    """Plain torch form of `fused_experts`; quantizes_rows: round what weights in e4m3 multiply."""
    experts = routing.experts - first_expert
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        if 0 <= expert < len(_values(down)):
            tokens, choices = (experts == expert).nonzero(as_tuple=True)
            activated = activate_rows(_torch_linear(x[tokens], up, expert, quantizes_rows), activation)
            weights = routing.weights[tokens, choices].unsqueeze(1)
            out.index_add_(0, tokens, _torch_linear(activated, down, expert, quantizes_rows).float() * weights)
    return out.to(x.dtype)


def _values(weight: ExpertsMatrices) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.values


def fused_experts(
    x: torch.Tensor,
    routing: Routing,
    up: ExpertsMatrices,
    down: ExpertsMatrices,
    first_expert: int = 0,
    policy: KernelPolicy = FASTEST,
    activation: Activation = "silu",
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, without experts of other ranks.

    Args:
        x: [num_tokens, in_features], contiguous.
        routing: the experts of each token.
        up: [num_experts, 2 * size, in_features]; of each expert the gate's rows, then up's; size rows without a gate.
        down: [num_experts, in_features, size].
        first_expert: number of this rank's first expert.
        policy: chooses the kernels.
        activation: between the products.

    Returns:
        [num_tokens, in_features], or the parts of a sum, [top_k, num_tokens, in_features], which the next norm adds up.
    """
    if not uses_triton(x.device):
        return fused_experts_ref(x, routing, up, down, first_expert, activation=activation)
    (num_tokens, top_k), (num_experts, in_features, size) = routing.experts.shape, _values(down).shape
    kernel = policy.experts(num_tokens)
    activated = x.new_empty(num_tokens, top_k, size)
    if kernel is ExpertsKernel.EXPERT_GEMV:
        from nanovllm.kernels.moe.expert_gemm import down_gemv, up_gemv  # noqa: PLC0415

        out = torch.empty_like(x)
        up_gemv(x, routing, up, activated, first_expert, activation)
        down_gemv(activated, routing, down, out, first_expert)
        return out
    # Of experts that are not here, no part is written.
    make = torch.empty if num_experts == routing.num_experts else torch.zeros
    parts = make(num_tokens, top_k, in_features, dtype=x.dtype, device=x.device)
    if kernel is ExpertsKernel.EXPERT_GEMM:
        from nanovllm.kernels.moe.expert_gemm import expert_gemm  # noqa: PLC0415

        expert_gemm(x, routing, up, activated, first_expert, activation)
        expert_gemm(activated, routing, down, parts, first_expert, None)
        return parts.transpose(0, 1)
    from nanovllm.kernels.moe.grouped_gemm import grouped_gemm, sort_slots  # noqa: PLC0415

    order, by_slot = sort_slots(routing, first_expert, num_experts), activated.flatten(0, 1)
    for rows, weight, out, own in ((x, up, by_slot, activation), (by_slot, down, parts.flatten(0, 1), None)):
        given: torch.Tensor | Fp8Rows = rows
        if isinstance(weight, Fp8Matrix) and policy.rounds_rows(num_tokens, x.dtype, x.device):
            given = quantize_rows(rows, Rounding(weight.block_ins))[0]
        grouped_gemm(given, routing, order, weight, out, own, policy)
    return parts.transpose(0, 1)
