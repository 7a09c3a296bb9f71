"""The course of an engine's counters, in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class StatsSample(NamedTuple):
    """An engine's state at one time.

    Attributes:
        time: seconds since the engine began.
        num_running, num_waiting: sequences.
        cache_use: fraction of the cache's blocks that are in use.
        num_prompt_tokens, num_output_tokens: since the engine began.
    """

    time: float
    num_running: int
    num_waiting: int
    cache_use: float
    num_prompt_tokens: int
    num_output_tokens: int


class StatsHistory:
    """Samples of an engine's counters, evenly spaced while it steps.

    Args:
        interval: least seconds between samples. A sample takes some microseconds, which a step at batch 1 would feel.
        capacity: so many samples are thinned to half, and the interval doubles.
    """

    def __init__(self, interval: float = 0.05, capacity: int = 4096) -> None:
        self._interval = interval
        self._capacity = capacity
        self._samples: list[StatsSample] = []
        self._began = self._next_time = time.monotonic()

    def sample_if_due(self, get_stats: Callable[[], Mapping[str, int]]) -> None:
        """Take a sample of `LLMEngine.stats`, unless the last one is too recent."""
        if (now := time.monotonic()) >= self._next_time:
            self._samples.append(self._sample(now, get_stats()))
            if len(self._samples) >= self._capacity:
                self._samples = self._samples[::2]
                self._interval *= 2
            # The newest sample may just have been thinned out.
            self._next_time = self._began + self._samples[-1].time + self._interval

    def samples(self, stats: Mapping[str, int]) -> list[StatsSample]:
        """Return all samples, oldest first, and one of now, when the counters are `stats`."""
        return [*self._samples, self._sample(time.monotonic(), stats)]

    def _sample(self, now: float, stats: Mapping[str, int]) -> StatsSample:
        num_used, num_free = stats["num_used_blocks"], stats["num_free_blocks"]
        return StatsSample(
            now - self._began,
            stats["num_running"],
            stats["num_waiting"],
            num_used / max(1, num_used + num_free),
            stats["num_prompt_tokens"],
            stats["num_output_tokens"],
        )
