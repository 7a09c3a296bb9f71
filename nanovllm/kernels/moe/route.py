"""The router of a mixture of experts: its product, the choice of each token's experts, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Routing:
    """The experts of each token.

    Attributes:
        experts: [num_tokens, top_k] int32, the best first; of equal ones that of the lowest number.
        weights: [num_tokens, top_k] float32, what their outputs are multiplied by.
    """

    experts: torch.Tensor
    weights: torch.Tensor


def route_ref(x: torch.Tensor, weight: torch.Tensor, top_k: int, renormalize: bool) -> Routing:
    """Plain torch form of `route`."""
    logits = functional.linear(x, weight).float()
    best, experts = (values[:, :top_k] for values in logits.sort(dim=1, descending=True, stable=True))
    total = (best if renormalize else logits).logsumexp(1, keepdim=True)
    return Routing(experts.int(), (best - total).exp())


def route(x: torch.Tensor, weight: torch.Tensor, top_k: int, renormalize: bool) -> Routing:
    """Choose the `top_k` experts of the largest probabilities, the softmax of `x @ weight.T`.

    Args:
        x: [num_tokens, in_features], contiguous.
        weight: [num_experts, in_features].
        top_k: experts of each token.
        renormalize: divide their probabilities by their sum.
    """
    return route_ref(x, weight, top_k, renormalize)
