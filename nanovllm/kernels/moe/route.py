"""The router of a mixture of experts: its product, the choice of each token's experts, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.linear.norm_linear import norm_linear
from nanovllm.kernels.policy import FASTEST, KernelPolicy
from nanovllm.kernels.rms_norm import Norm, rms_norm, rms_norm_ref


@dataclass(frozen=True)
class Routing:
    """The experts of each token.

    Attributes:
        experts: [num_tokens, top_k] int32, the best first; of equal ones the lowest number.
        weights: [num_tokens, top_k] float32, what their outputs are multiplied by.
        num_experts: the number of experts to choose from.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    num_experts: int


@dataclass(frozen=True)
class SharedExpert:
    """An expert of every token, in the rows' dtype and of the other experts' size.

    Attributes:
        up, down: its matrices; see `fused_experts`.
        gate: [1, in_features], whose product's sigmoid is the weight of its output; None for weight 1.
    """

    up: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor | None


@dataclass(frozen=True)
class SigmoidScores:
    """Weights that are sigmoids of logits, instead of their softmax (DeepSeek-V3, arXiv:2412.19437).

    Attributes:
        bias: [num_experts] float32, added to sigmoids when experts are chosen; None for zero.
        eps: added to the sum that renormalised weights are divided by.
        factor: of the weights.
        is_exact: whether logits are sums in float32, instead of rounded to the rows' dtype.
    """

    bias: torch.Tensor | None
    eps: float
    factor: float
    is_exact: bool = False


def route_ref(
    x: torch.Tensor, weight: torch.Tensor, top_k: int, renormalize: bool, norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    *, sigmoid: SigmoidScores | None = None, bias: torch.Tensor | None = None,
) -> tuple[Routing, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Plain torch form of `route`."""
    normed, total = (x, x) if norm is None else rms_norm_ref(x, norm.weight, norm.eps, residual)
    is_exact = sigmoid is not None and sigmoid.is_exact
    rows, matrix = (one.float() if is_exact else one for one in (normed, weight))
    logits = functional.linear(rows, matrix, bias).float()
    if sigmoid is not None:
        shares = logits.sigmoid()
        scores = shares if sigmoid.bias is None else shares + sigmoid.bias
        experts = scores.sort(dim=1, descending=True, stable=True)[1][:, :top_k]
        best = shares.gather(1, experts)
        best = best / (best.sum(1, keepdim=True) + sigmoid.eps) if renormalize else best
        return Routing(experts.int(), best * sigmoid.factor, len(weight)), normed, total
    best, experts = (values[:, :top_k] for values in logits.sort(dim=1, descending=True, stable=True))
    sums = (best if renormalize else logits).logsumexp(1, keepdim=True)
    return Routing(experts.int(), (best - sums).exp(), len(weight)), normed, total


@jit
def _choose_experts_kernel(
    logits_ptr, experts_ptr, weights_ptr, bias_ptr, num_experts, eps, factor,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, RENORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, experts, choices = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    is_expert = experts < num_experts
    wait_for_previous(PDL)
    logits = tl.load(logits_ptr + row * num_experts + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        shares, total = tl.sigmoid(logits), 1.0
        # What experts are chosen by.
        logits = shares
        if bias_ptr is not None:
            logits += tl.load(bias_ptr + experts, mask=is_expert, other=0.0)
        logits = tl.where(is_expert, logits, float("-inf"))
    else:
        shares = tl.exp(logits - tl.max(logits, axis=0))
        total = tl.sum(shares, axis=0)
    chosen, weights = tl.zeros([CHOICES], dtype=tl.int32), tl.zeros([CHOICES], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.min(tl.where(logits == tl.max(logits, axis=0), experts, EXPERTS), axis=0)
        # Where a row is not a number, as padding may be, none is the best; but all must be there.
        expert = tl.minimum(expert, num_experts - 1)
        chosen = tl.where(choices == choice, expert, chosen)
        weights = tl.where(choices == choice, tl.sum(tl.where(experts == expert, shares, 0.0), axis=0), weights)
        logits = tl.where(experts == expert, float("-inf"), logits)
    if RENORMALIZE:
        total = tl.sum(weights, axis=0) + eps
    if SIGMOID:
        weights *= factor
    tl.store(experts_ptr + row * TOP_K + choices, chosen, mask=choices < TOP_K)
    tl.store(weights_ptr + row * TOP_K + choices, weights / total, mask=choices < TOP_K)


def route(
    x: torch.Tensor, weight: torch.Tensor, top_k: int, renormalize: bool, norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    *, sigmoid: SigmoidScores | None = None, policy: KernelPolicy = FASTEST, bias: torch.Tensor | None = None,
) -> tuple[Routing, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Choose the `top_k` experts of the largest probabilities, the softmax of `norm(x + residual) @ weight.T`.

    Or by the sigmoids of these logits, if `sigmoid` says how.

    x, norm and residual: see `norm_linear`; weight: [num_experts, in_features], contiguous; renormalize: divide the
    probabilities by their sum; policy: chooses the product's kernel; bias: [num_experts], of logits, not with
    `sigmoid`. Returns also `norm(x + residual)` and `x + residual`, which may be x itself.
    """
    if not uses_triton(x.device):
        return route_ref(x, weight, top_k, renormalize, norm, residual, sigmoid=sigmoid, bias=bias)
    is_exact = sigmoid is not None and sigmoid.is_exact
    normed, total, logits = x, x, None
    if norm is not None and x.shape[-2] == 1 and not is_exact:
        from nanovllm.kernels.linear.gemv import gemv  # noqa: PLC0415

        normed = torch.empty_like(x)
        logits, total = gemv(x, weight, bias, norm, residual, normed=normed)
    elif norm is not None:
        normed, total = rms_norm(x, norm.weight, norm.eps, residual)
    if logits is None:
        logits = _exact_logits(normed, weight) if is_exact else norm_linear(normed, weight, bias, policy=policy)[0]
    return _choose_experts(logits, top_k, renormalize, sigmoid), normed, total


def _exact_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return products in float32, in which products of 16-bit numbers are exact."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())


def _choose_experts(logits: torch.Tensor, top_k: int, renormalize: bool, sigmoid: SigmoidScores | None) -> Routing:
    num_rows, num_experts = logits.shape
    chosen = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    bias, eps, factor = (None, 0.0, 1.0) if sigmoid is None else (sigmoid.bias, sigmoid.eps, sigmoid.factor)
    _choose_experts_kernel[(num_rows,)](
        logits, chosen, weights, bias, num_experts, eps, factor, EXPERTS=triton.next_power_of_2(num_experts),
        TOP_K=top_k, CHOICES=triton.next_power_of_2(top_k), RENORMALIZE=renormalize, SIGMOID=sigmoid is not None,
        num_warps=1, **pdl_options(logits.device),
    )  # fmt: skip
    return Routing(chosen, weights, num_experts)
