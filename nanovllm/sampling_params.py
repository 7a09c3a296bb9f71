"""How one request is sampled, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.utils.checks import check_bool, check_float, check_int, strict_keywords


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
        object.__setattr__(self, "temperature", check_float("temperature", self.temperature))
        object.__setattr__(self, "max_tokens", check_int("max_tokens", self.max_tokens, 1))
        check_bool("ignore_eos", self.ignore_eos)
        if self.seed is not None:
            object.__setattr__(self, "seed", check_int("seed", self.seed, 0, 2**64 - 1))
