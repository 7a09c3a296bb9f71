"""The activations of experts, after the first of their two products."""

from __future__ import annotations

from typing import Literal

import torch

from nanovllm.kernels._triton import jit, tl
from nanovllm.kernels.fast_math import round_to
from nanovllm.kernels.silu_and_mul import silu_and_mul_ref

Activation = Literal["silu", "relu2"]
"""SiLU of the first half of the outputs times the second (SwiGLU), or squares of positive outputs, without a gate."""


def activate_rows(out: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activation of a product, [num_rows, size]; `out` has twice this size if there is a gate."""
    return silu_and_mul_ref(out) if activation == "silu" else out.relu().square()


@jit
def activate(out, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return an activation of float32 sums, rounded as by separate ops; up: the sums that `out` gates."""
    if ACTIVATION == "silu":
        gate = round_to(out, dtype)
        out = gate / (1 + tl.exp(-gate)) * round_to(up, dtype)
    elif ACTIVATION == "relu2":
        out = tl.maximum(round_to(out, dtype), 0.0)
        out *= out
    return out
