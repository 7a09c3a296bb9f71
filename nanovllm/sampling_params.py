"""How one request is sampled, and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanovllm.utils.keywords import strict_keywords


@strict_keywords
@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        temperature: divides the logits before the softmax; 0 is greedy.
        max_tokens: the most tokens to generate, at least 1.
        ignore_eos: go on past end-of-sequence tokens.
        seed: makes the request's tokens repeatable, in 0 ... 2**64 - 1; without one, it follows from the engine's
            seed and the request's number.

    Raises:
        ValueError: a value out of its range, or an unknown keyword.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.temperature, (int, float)) and not isinstance(self.temperature, bool)
        if not number or not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be a finite number >= 0, not {self.temperature!r}")
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be an integer >= 1, not {self.max_tokens!r}")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 2**64):
            raise ValueError(f"seed must be None or an integer in 0 ... 2**64 - 1, not {self.seed!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
