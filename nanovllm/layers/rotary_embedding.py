"""Angles of the rotary embedding (RoPE, Su et al. 2021, arXiv:2104.09864), stretched where a model asks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from nanovllm.configs.rope import Llama3Scaling, RopeConfig, YarnScaling


def inverse_frequencies(size: int, rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Return radians per position, [size / 2] float32, and the factor of the cosines and sines."""
    from nanovllm.configs.rope import LinearScaling, Llama3Scaling, YarnScaling  # noqa: PLC0415

    base, scaling = 1.0 / rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size), rope.scaling
    if isinstance(scaling, LinearScaling):
        return base / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3_frequencies(base, scaling), 1.0
    if isinstance(scaling, YarnScaling):
        return _yarn_frequencies(base, rope.theta, scaling)
    return base, 1.0


def _llama3_frequencies(base: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Keep dimensions that turn more than `high_freq_factor` times within the original length.

    Those that turn less than `low_freq_factor` times are divided by `factor`; between, one becomes the other linearly.
    """
    turns = scaling.original_max_position_embeddings * base / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return base * kept + base / scaling.factor * (1 - kept)


def _yarn_frequencies(base: torch.Tensor, theta: float, yarn: YarnScaling) -> tuple[torch.Tensor, float]:
    """Keep dimensions that turn more than `beta_fast` times within the original length.

    Those that turn less than `beta_slow` times are divided by `factor`; between, one becomes the other linearly.
    """
    head_dim = 2 * len(base)

    def dimension(turns: float) -> float:
        length = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    slow = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = base * (1 - slow) + base / yarn.factor * slow
    default_factor = 0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0
    return frequencies, yarn.attention_factor or default_factor


class RotaryEmbedding(nn.Module):
    """The angles of positions, in one table for all layers that rotate alike.

    Args:
        head_dim: elements per head.
        rope: None rotates nothing: all angles are zero.

    Attributes:
        size: elements that are rotated, the first of a head.
        cos_sin: [max_position, size] float32; the cosines of a position's angles, then the sines. There once `tabulate`
            was called.
    """

    cos_sin: torch.Tensor

    def __init__(self, head_dim: int, rope: RopeConfig | None) -> None:
        super().__init__()
        self.size, self.rope = head_dim if rope is None else rope.size(head_dim), rope

    def tabulate(self, max_position: int, device: torch.device) -> None:
        """Compute the table for positions below `max_position`."""
        if self.rope is None:
            frequencies, factor = torch.zeros(self.size // 2), 1.0
        else:
            frequencies, factor = inverse_frequencies(self.size, self.rope)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
        self.cos_sin = (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device)
