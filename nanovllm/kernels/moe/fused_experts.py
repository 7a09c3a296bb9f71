"""Experts of two products, some for each token.

Beside weights in e4m3 the rows of a step are rounded as in linear layers (`norm_linear`), before each product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from nanovllm.kernels._triton import uses_triton
from nanovllm.kernels.e4m3 import Fp8Matrix
from nanovllm.kernels.four_bits import FourBitMatrix
from nanovllm.kernels.linear.norm_linear import WeightMatrix, norm_linear_ref
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding, quantize_rows
from nanovllm.kernels.moe.activation import Activation, activate_rows, is_gated
from nanovllm.kernels.moe.route import Routing, SharedExpert
from nanovllm.kernels.policy import FASTEST, ExpertsKernel, KernelPolicy

ExpertsMatrices = torch.Tensor | Fp8Matrix | FourBitMatrix
"""One matrix for each expert, [num_experts, out_features, in_features]."""
Biases = tuple[torch.Tensor, torch.Tensor]
"""Of the experts' first and second products, [num_experts, out_features] each."""


def fused_experts_ref(
    x: torch.Tensor, routing: Routing, up: ExpertsMatrices, down: ExpertsMatrices, first_expert: int = 0,
    activation: Activation = "silu",
    *, biases: Biases | None = None, shared: SharedExpert | None = None,
) -> torch.Tensor:  # fmt: skip
    """Plain torch form of `fused_experts` where rows are not rounded to e4m3."""
    experts = routing.experts - first_expert
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        if 0 <= expert < len(_values(down)):
            tokens, choices = (experts == expert).nonzero(as_tuple=True)
            first = norm_linear_ref(x[tokens], _matrix_of(up, expert))[0]
            first = first if biases is None else first + biases[0][expert]
            second = norm_linear_ref(activate_rows(first, activation), _matrix_of(down, expert))[0]
            second = second if biases is None else second + biases[1][expert]
            out.index_add_(0, tokens, second.float() * routing.weights[tokens, choices].unsqueeze(1))
    if shared is not None:
        activated = activate_rows(functional.linear(x, shared.up), activation)
        gate = 1 if shared.gate is None else functional.linear(x.float(), shared.gate.float()).sigmoid()
        out += functional.linear(activated, shared.down).float() * gate
    return out.to(x.dtype)


def _matrix_of(weight: ExpertsMatrices, expert: int) -> WeightMatrix:
    return weight[expert] if isinstance(weight, torch.Tensor) else weight.expert(expert)


def _values(weight: ExpertsMatrices) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.values


def fused_experts(
    x: torch.Tensor, routing: Routing, up: ExpertsMatrices, down: ExpertsMatrices, first_expert: int = 0,
    policy: KernelPolicy = FASTEST, activation: Activation = "silu",
    *, biases: Biases | None = None, shared: SharedExpert | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the weighted sum of the outputs of each token's experts, without experts of other ranks.

    Args:
        x: [num_tokens, in_features], contiguous.
        up: [num_experts, 2 * size, in_features]; of each expert the gate's rows, then up's; size rows without a gate.
        down: [num_experts, in_features, size].
        first_expert: number of this rank's first expert.
        shared: added to the sum; only where the policy takes `EXPERT_GEMV`, and weights are not packed or biased.

    Returns:
        [num_tokens, in_features], or the parts of a sum, [top_k, num_tokens, in_features], which the next norm adds up.
    """
    if not uses_triton(x.device):
        return fused_experts_ref(
            x, routing, up, down, first_expert, activation=activation, biases=biases, shared=shared
        )
    (num_tokens, top_k), (num_experts, in_features) = routing.experts.shape, _values(down).shape[:2]
    kernel, (up_bias, down_bias) = policy.experts(num_tokens), biases or (None, None)
    size = _values(up).shape[1] // (2 if is_gated(activation) else 1)
    activated = x.new_empty(num_tokens, top_k + (shared is not None), size)
    is_packed = isinstance(up, FourBitMatrix) or isinstance(down, FourBitMatrix)
    if kernel is ExpertsKernel.EXPERT_GEMV and biases is None and not is_packed:
        from nanovllm.kernels.moe.expert_gemm import down_gemv, up_gemv  # noqa: PLC0415

        out = torch.empty_like(x)
        up_gemv(x, routing, up, activated, first_expert, activation, shared)
        down_gemv(activated, routing, down, out, first_expert, shared)
        return out
    assert shared is None
    # Of experts that are not here, no part is written.
    make = torch.empty if num_experts == routing.num_experts else torch.zeros
    parts = make(num_tokens, top_k, in_features, dtype=x.dtype, device=x.device)
    if kernel is not ExpertsKernel.GROUPED_GEMM:
        from nanovllm.kernels.moe.expert_gemm import expert_gemm  # noqa: PLC0415

        multiply: Any = expert_gemm
        if all(isinstance(own, FourBitMatrix) and policy.uses_skinny_four_bits(x.dtype, own) for own in (up, down)):
            from nanovllm.kernels.moe.four_bit_experts import skinny_four_bit_experts  # noqa: PLC0415

            multiply = skinny_four_bit_experts
        multiply(x, routing, up, activated, first_expert, activation, up_bias)
        multiply(activated, routing, down, parts, first_expert, None, down_bias)
        return parts.transpose(0, 1)
    from nanovllm.kernels.moe.grouped_gemm import grouped_gemm, sort_slots  # noqa: PLC0415

    order, by_slot = sort_slots(routing, first_expert, num_experts), activated.flatten(0, 1)
    products = (x, up, by_slot, activation, up_bias), (by_slot, down, parts.flatten(0, 1), None, down_bias)
    for rows, weight, out, own, bias in products:
        if isinstance(weight, FourBitMatrix) and policy.uses_hopper_four_bits(x.dtype, weight):
            from nanovllm.kernels.moe.four_bit_experts import hopper_four_bit_experts  # noqa: PLC0415

            hopper_four_bit_experts(rows, routing, order, weight, out, own, policy, bias=bias)
            continue
        given: torch.Tensor | Fp8Rows = rows
        if isinstance(weight, Fp8Matrix) and bias is None and policy.rounds_rows(num_tokens, x.dtype, x.device):
            given = quantize_rows(rows, Rounding(weight.block_ins))[0]
        grouped_gemm(given, routing, order, weight, out, own, policy, bias=bias)
    return parts.transpose(0, 1)
