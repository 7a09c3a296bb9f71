"""SwiGLU experts, some for each token.

Beside weights in e4m3 the rows of a step are rounded as in linear layers (`norm_linear`), before each product.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from nanovllm.kernels._triton import uses_triton
from nanovllm.kernels.e4m3 import Fp8Matrix, dequantize_ref
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding, quantize_rows, quantize_rows_ref
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.policy import FASTEST, ExpertsKernel, KernelPolicy
from nanovllm.kernels.silu_and_mul import silu_and_mul_ref

ExpertsMatrices = torch.Tensor | Fp8Matrix
"""One matrix for each expert, [num_experts, out_features, in_features]."""


def _torch_linear(x: torch.Tensor, weight: ExpertsMatrices, expert: int, quantizes_rows: bool) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return functional.linear(x, weight[expert])
    if quantizes_rows:
        from nanovllm.kernels.linear.scaled_gemm import scaled_gemm_ref  # noqa: PLC0415

        return scaled_gemm_ref(quantize_rows_ref(x, Rounding(weight.block_ins))[0], weight.expert(expert), x.dtype)
    return functional.linear(x, dequantize_ref(weight.expert(expert), x.dtype))


def fused_experts_ref(
    x: torch.Tensor,
    routing: Routing,
    gate_up: ExpertsMatrices,
    down: ExpertsMatrices,
    first_expert: int = 0,
    quantizes_rows: bool = False,
) -> torch.Tensor:
    """Plain torch form of `fused_experts`; quantizes_rows: round what weights in e4m3 multiply."""
    experts = routing.experts - first_expert
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        if 0 <= expert < len(_values(down)):
            tokens, choices = (experts == expert).nonzero(as_tuple=True)
            activated = silu_and_mul_ref(_torch_linear(x[tokens], gate_up, expert, quantizes_rows))
            weights = routing.weights[tokens, choices].unsqueeze(1)
            out.index_add_(0, tokens, _torch_linear(activated, down, expert, quantizes_rows).float() * weights)
    return out.to(x.dtype)


def _values(weight: ExpertsMatrices) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.values


def fused_experts(
    x: torch.Tensor,
    routing: Routing,
    gate_up: ExpertsMatrices,
    down: ExpertsMatrices,
    first_expert: int = 0,
    policy: KernelPolicy = FASTEST,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, without experts of other ranks.

    Args:
        x: [num_tokens, in_features], contiguous.
        routing: the experts of each token.
        gate_up: [num_experts, 2 * size, in_features]; of each expert the gate's rows, then up's.
        down: [num_experts, in_features, size].
        first_expert: number of this rank's first expert.
        policy: chooses the kernels.

    Returns:
        [num_tokens, in_features], or the parts of a sum, [top_k, num_tokens, in_features], which the next norm adds up.
    """
    if not uses_triton(x.device):
        return fused_experts_ref(x, routing, gate_up, down, first_expert)
    (num_tokens, top_k), (num_experts, in_features, size) = routing.experts.shape, _values(down).shape
    kernel = policy.experts(num_tokens)
    activated = x.new_empty(num_tokens, top_k, size)
    if kernel is ExpertsKernel.EXPERT_GEMV:
        from nanovllm.kernels.moe.expert_gemm import down_gemv, gate_up_gemv  # noqa: PLC0415

        out = torch.empty_like(x)
        gate_up_gemv(x, routing, gate_up, activated, first_expert)
        down_gemv(activated, routing, down, out, first_expert)
        return out
    # Of experts that are not here, no part is written.
    make = torch.empty if num_experts == routing.num_experts else torch.zeros
    parts = make(num_tokens, top_k, in_features, dtype=x.dtype, device=x.device)
    if kernel is ExpertsKernel.EXPERT_GEMM:
        from nanovllm.kernels.moe.expert_gemm import expert_gemm  # noqa: PLC0415

        expert_gemm(x, routing, gate_up, activated, first_expert, gated=True)
        expert_gemm(activated, routing, down, parts, first_expert, gated=False)
        return parts.transpose(0, 1)
    from nanovllm.kernels.moe.grouped_gemm import grouped_gemm, sort_slots  # noqa: PLC0415

    order, by_slot = sort_slots(routing, first_expert, num_experts), activated.flatten(0, 1)
    for rows, weight, out, gated in ((x, gate_up, by_slot, True), (by_slot, down, parts.flatten(0, 1), False)):
        given: torch.Tensor | Fp8Rows = rows
        if isinstance(weight, Fp8Matrix) and policy.rounds_rows(num_tokens, x.dtype, x.device):
            given = quantize_rows(rows, Rounding(weight.block_ins))[0]
        grouped_gemm(given, routing, order, weight, out, gated, policy)
    return parts.transpose(0, 1)
