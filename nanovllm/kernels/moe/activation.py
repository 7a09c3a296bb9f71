"""The activations of experts, after the first of their two products."""

from __future__ import annotations

from typing import Literal

import torch

from nanovllm.kernels._triton import jit, tl
from nanovllm.kernels.fast_math import round_to
from nanovllm.kernels.gates import silu_and_mul_ref

Activation = Literal["silu", "relu2", "clamped"]
"""SiLU of the first half of the outputs times the second (SwiGLU); squares of positive outputs, without a gate; or
gpt-oss's clamped SwiGLU: of a gate up to `LIMIT`, with another slope, times 1 and a second half within `LIMIT`."""
LIMIT, ALPHA = 7.0, 1.702


def is_gated(activation: Activation | None) -> bool:
    """Return whether the outputs before an activation are twice those after it."""
    return activation in ("silu", "clamped")


def activate_rows(out: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activation of a product, [num_rows, size]; `out` has twice this size if there is a gate."""
    if activation == "clamped":
        gate, up = out.chunk(2, -1)
        gate = gate.clamp(max=LIMIT)
        return gate * torch.sigmoid(gate * ALPHA) * (up.clamp(-LIMIT, LIMIT) + 1)
    return silu_and_mul_ref(out) if activation == "silu" else out.relu().square()


@jit
def activate(out, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return an activation of float32 sums, rounded as by separate ops; up: the sums that `out` gates."""
    if ACTIVATION == "silu":
        gate = round_to(out, dtype)
        out = gate / (1 + tl.exp(-gate)) * round_to(up, dtype)
    elif ACTIVATION == "clamped":
        gate = tl.minimum(round_to(out, dtype), 7.0)
        out = gate / (1 + tl.exp(-1.702 * gate)) * (tl.minimum(tl.maximum(round_to(up, dtype), -7.0), 7.0) + 1)
    elif ACTIVATION == "relu2":
        out = tl.maximum(round_to(out, dtype), 0.0)
        out *= out
    return out
