"""Angles of the rotary embedding (RoPE, Su et al. 2021), stretched by YaRN (Peng et al. 2023) where a model asks."""

from __future__ import annotations

import math

import torch
from torch import nn

from nanovllm.model_config import YarnConfig


def inverse_frequencies(head_dim: int, theta: float, yarn: YarnConfig | None) -> tuple[torch.Tensor, float]:
    """Return radians per position, [head_dim / 2] float32, and the factor of the cosines and sines.

    YaRN keeps the fast dimensions, which turn more than `beta_fast` times within the original length, divides the slow
    ones, which turn less than `beta_slow` times, by `factor`, and goes from one to the other linearly between.
    """
    base = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if yarn is None:
        return base, 1.0

    def dimension(turns: float) -> float:
        length = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), head_dim - 1)
    slow = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = base * (1 - slow) + base / yarn.factor * slow
    default_factor = 0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0
    return frequencies, yarn.attention_factor or default_factor


def cos_sin_table(
    head_dim: int, max_position: int, theta: float, yarn: YarnConfig | None, device: torch.device
) -> torch.Tensor:
    """Return [max_position, head_dim] float32: the cosines of a position's angles, then the sines."""
    frequencies, factor = inverse_frequencies(head_dim, theta, yarn)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device)


class RotaryEmbedding(nn.Module):
    """The angles of positions, in one table for all layers whose parameters are equal.

    Args:
        head_dim, theta, yarn: see `inverse_frequencies`.

    Attributes:
        cos_sin: see `cos_sin_table`; there once `tabulate` was called.
    """

    cos_sin: torch.Tensor

    def __init__(self, head_dim: int, theta: float, yarn: YarnConfig | None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.yarn = head_dim, theta, yarn

    def tabulate(self, max_position: int, device: torch.device) -> None:
        """Compute the table for positions below `max_position`."""
        self.cos_sin = cos_sin_table(self.head_dim, max_position, self.theta, self.yarn, device)
