"""Histograms of step sizes and of times between tokens: two counts a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Histogram:
    """Counts of values by inclusive upper bounds, as in Prometheus.

    Args:
        bounds: ascending; values above the last one have a bucket of their own.

    Attributes:
        total: the sum of the values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value that occurred `count` times."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram with the same bounds."""
        self.total += other.total
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]

    def cumulative(self) -> list[int]:
        """Return the number of values up to each bound, and of all values."""
        return list(accumulate(self._counts))


@dataclass
class StepHistograms:
    """Histograms of steps since the engine began.

    Attributes:
        step_tokens: prompt tokens and sampled tokens of each step.
        inter_token_seconds: from each token of an output to the next one.
    """

    step_tokens: Histogram = field(default_factory=lambda: Histogram(_STEP_TOKENS))
    inter_token_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    _last_time: float = 0.0

    def observe(self, num_tokens: int, num_decodes: int, now: float) -> None:
        """Record a step whose tokens have come.

        Args:
            num_tokens: prompt tokens computed plus tokens sampled.
            num_decodes: sampled tokens that follow another one, which came with the previous step.
            now: in seconds.
        """
        self.step_tokens.observe(num_tokens)
        if num_decodes:
            self.inter_token_seconds.observe(now - self._last_time, num_decodes)
        self._last_time = now


def merged_histograms(several: Sequence[StepHistograms]) -> StepHistograms:
    """Return the sum of several engines' histograms."""
    merged = StepHistograms()
    for histograms in several:
        merged.step_tokens.merge(histograms.step_tokens)
        merged.inter_token_seconds.merge(histograms.inter_token_seconds)
    return merged
