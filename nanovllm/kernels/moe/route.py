"""The router of a mixture of experts: its product, the choice of each token's experts, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from nanovllm.kernels._triton import device_limits, jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.fast_math import round_to
from nanovllm.kernels.rms_norm import Norm, rms_norm, rms_norm_ref

_STEP_BYTES = 256
"""Inputs per step of the product, in bytes."""
_STAGES = 4


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
    x: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    renormalize: bool,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    sigmoid: SigmoidScores | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> tuple[Routing, torch.Tensor, torch.Tensor]:
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
def _choose_row_kernel(
    logits_ptr, experts_ptr, weights_ptr, bias_ptr, num_experts, eps, factor,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, RENORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose one row's experts by their ranks, all at once instead of one after the other."""
    experts, choices = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    is_expert = experts < num_experts
    wait_for_previous(PDL)
    logits = tl.load(logits_ptr + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        shares = tl.sigmoid(logits)
        # What experts are chosen by.
        logits = shares
        if bias_ptr is not None:
            logits += tl.load(bias_ptr + experts, mask=is_expert, other=0.0)
        logits = tl.where(is_expert, logits, float("-inf"))
    else:
        shares = tl.exp(logits - tl.max(logits, axis=0))
    is_equal, is_earlier = logits[None, :] == logits[:, None], experts[None, :] < experts[:, None]
    is_before = (logits[None, :] > logits[:, None]) | (is_equal & is_earlier)
    ranks = tl.sum(is_before.to(tl.int32), axis=1)
    is_chosen = ranks[:, None] == choices[None, :]
    # Where the row is not a number, as padding may be, all are the best; but what is chosen must be there.
    chosen = tl.minimum(tl.sum(tl.where(is_chosen, experts[:, None], 0), axis=0), num_experts - 1)
    weights = tl.sum(tl.where(is_chosen, shares[:, None], 0.0), axis=0)
    if RENORMALIZE:
        weights = weights / (tl.sum(tl.where(ranks < TOP_K, shares, 0.0), axis=0) + eps)
    elif not SIGMOID:
        weights = weights / tl.sum(shares, axis=0)
    if SIGMOID:
        weights *= factor
    tl.store(experts_ptr + choices, chosen, mask=choices < TOP_K)
    tl.store(weights_ptr + choices, weights, mask=choices < TOP_K)


@jit(do_not_specialize=["num_rows"])
def _route_kernel(
    x_ptr, weight_ptr, experts_ptr, weights_ptr, bias_ptr, logit_bias_ptr, num_rows, num_experts, in_features, eps,
    factor,
    EVEN: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, INS: tl.constexpr, TOP_K: tl.constexpr,
    CHOICES: tl.constexpr, RENORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    ins = tl.arange(0, INS)
    is_row, is_expert = (rows < num_rows)[:, None], (experts < num_experts)[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * in_features + ins[None, :]
    weight_ptrs = weight_ptr + experts[None, :] * in_features + ins[:, None]
    acc = tl.zeros([ROWS, EXPERTS], dtype=tl.float32)
    wait_for_previous(PDL)
    for start in range(0, in_features, INS):
        x_mask, weight_mask = is_row, is_expert
        if not EVEN:
            x_mask = x_mask & (start + ins < in_features)[None, :]
            weight_mask = weight_mask & (start + ins < in_features)[:, None]
        x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
        weight = tl.load(weight_ptrs + start, mask=weight_mask, other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if logit_bias_ptr is not None:
        acc += tl.load(logit_bias_ptr + experts, mask=experts < num_experts, other=0.0).to(tl.float32)[None, :]
    # Rounded as by a separate product.
    logits = tl.where(is_expert, round_to(acc, x_ptr.dtype.element_ty) if ROUNDS else acc, float("-inf"))
    most = tl.max(logits, axis=1)
    if SIGMOID:
        shares, total = tl.sigmoid(logits), tl.full([ROWS], 1.0, tl.float32)
        # What experts are chosen by.
        logits = shares
        if bias_ptr is not None:
            logits += tl.load(bias_ptr + experts, mask=experts < num_experts, other=0.0)[None, :]
        logits = tl.where(is_expert, logits, float("-inf"))
    else:
        total = tl.sum(tl.exp(logits - most[:, None]), axis=1)
    choices = tl.arange(0, CHOICES)[None, :]
    chosen = tl.zeros([ROWS, CHOICES], dtype=tl.int32)
    weights = tl.zeros([ROWS, CHOICES], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        best = tl.max(logits, axis=1)
        expert = tl.min(tl.where(logits == best[:, None], experts[None, :], EXPERTS), axis=1)
        # Where a row is not a number, as padding may be, none is the best; but all must be there.
        expert = tl.minimum(expert, num_experts - 1)
        chosen = tl.where(choices == choice, expert[:, None], chosen)
        if SIGMOID:
            share = tl.sum(tl.where(experts[None, :] == expert[:, None], shares, 0.0), axis=1)
        else:
            share = tl.exp(best - most)
        weights = tl.where(choices == choice, share[:, None], weights)
        logits = tl.where(experts[None, :] == expert[:, None], float("-inf"), logits)
    if RENORMALIZE:
        total = tl.sum(weights, axis=1) + eps
    if SIGMOID:
        weights *= factor
    places = rows.to(tl.int64)[:, None] * TOP_K + choices
    mask = is_row & (choices < TOP_K)
    tl.store(experts_ptr + places, chosen, mask=mask)
    tl.store(weights_ptr + places, weights / total[:, None], mask=mask)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    renormalize: bool,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    sigmoid: SigmoidScores | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> tuple[Routing, torch.Tensor, torch.Tensor]:
    """Choose the `top_k` experts of the largest probabilities, the softmax of `norm(x + residual) @ weight.T`.

    Or by the sigmoids of these logits, if `sigmoid` says how.

    x, norm and residual: see `norm_linear`; weight: [num_experts, in_features], contiguous; renormalize: divide the
    probabilities by their sum; bias: [num_experts], of logits, not with `sigmoid`.

    Returns also `norm(x + residual)` and `x + residual`, which may be x itself.
    """
    if not uses_triton(x.device):
        return route_ref(x, weight, top_k, renormalize, norm, residual, sigmoid, bias=bias)
    num_rows, num_experts = x.shape[-2], len(weight)
    chosen = torch.empty(num_rows, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=x.device)
    experts = max(16, triton.next_power_of_2(num_experts))
    score_bias, eps, factor = (None, 0.0, 1.0) if sigmoid is None else (sigmoid.bias, sigmoid.eps, sigmoid.factor)
    is_exact = sigmoid is not None and sigmoid.is_exact
    if num_rows == 1 and not is_exact:
        normed = x if norm is None else torch.empty_like(x)
        from nanovllm.kernels.linear.gemv import gemv  # noqa: PLC0415

        logits, total = gemv(x, weight, bias, norm, residual, normed=None if norm is None else normed)
        _choose_row_kernel[(1,)](
            logits, chosen, weights, score_bias, num_experts, eps, factor, EXPERTS=experts, TOP_K=top_k,
            CHOICES=triton.next_power_of_2(top_k), RENORMALIZE=renormalize, SIGMOID=sigmoid is not None, num_warps=8,
            **pdl_options(x.device),
        )  # fmt: skip
        return Routing(chosen, weights, num_experts), normed, total
    normed, total = (x, x) if norm is None else rms_norm(x, norm.weight, norm.eps, residual)
    in_features = normed.shape[1]
    assert normed.is_contiguous() and weight.is_contiguous()
    num_processors, shared_bytes = device_limits(x.device)
    # Each program reads the whole weight.
    tile_rows = 16 if num_rows <= 16 * num_processors else 64
    ins, step_bytes = _STEP_BYTES // normed.element_size(), (tile_rows + experts) * _STEP_BYTES
    _route_kernel[(triton.cdiv(num_rows, tile_rows),)](
        normed, weight, chosen, weights, score_bias, bias, num_rows, num_experts, in_features, eps, factor,
        EVEN=in_features % ins == 0, ROWS=tile_rows, EXPERTS=experts, INS=ins, TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k), RENORMALIZE=renormalize, SIGMOID=sigmoid is not None,
        ROUNDS=not is_exact, num_warps=4 if tile_rows == 16 else 8,
        num_stages=max(1, min(_STAGES, shared_bytes // step_bytes)), **pdl_options(x.device),
    )  # fmt: skip
    return Routing(chosen, weights, num_experts), normed, total
