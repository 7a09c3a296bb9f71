"""Options of a layer's attention: window, softcap, sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MAX_HEAD_SIZE = 512
"""Most elements of a key and of a value: of more, no tile of one fits."""


@dataclass(frozen=True)
class AttentionOptions:
    """Changes to a layer's scores besides their scale: a window, a soft cap, sinks.

    Attributes:
        window: tokens that a query sees, its own included (sliding window attention); None for all.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118); None for none.
        sinks: [num_heads]; the score of a key without a value that every query of a head sees (gpt-oss,
            arXiv:2508.10925); None for none.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is plain causal attention."""
        return self.window is None and self.softcap is None and self.sinks is None

    def score_scales(self, scale: float) -> tuple[float | None, float]:
        """Return the factor of the scores before the tanh, None without one, and of a softmax of base 2."""
        factor = math.log2(math.e)
        return (None, scale * factor) if self.softcap is None else (scale / self.softcap, self.softcap * factor)


PLAIN = AttentionOptions()


def padded_size(size: int) -> int:
    """Return the size to which kernels pad a key or a value: a power of two, at least the 16 of a product."""
    return max(16, 1 << (size - 1).bit_length())
