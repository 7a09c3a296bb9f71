"""Statistics of an engine: its counters over time, histograms of its steps, and the use of its cache's blocks."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class StatsSample(NamedTuple):
    """An engine's state at `time`, in seconds since it began; `cache_use` is the fraction of blocks in use.

    The other fields count sequences, and tokens since the engine began.
    """

    time: float
    num_running: int
    num_waiting: int
    cache_use: float
    num_prompt_tokens: int
    num_output_tokens: int


class StatsHistory:
    """Samples of an engine's counters, evenly spaced while it steps, in bounded memory.

    At the number `capacity`, samples are thinned to half, and the interval between them, in seconds, doubles.
    """

    def __init__(self, interval: float = 0.05, capacity: int = 4096) -> None:
        self._interval = interval
        self._capacity = capacity
        self._samples: list[StatsSample] = []
        self._began = self._next_time = time.monotonic()

    def sample_if_due(self, get_stats: Callable[[], Mapping[str, Any]]) -> None:
        """Take a sample of `Engine.stats`, unless the last one is too recent."""
        if (now := time.monotonic()) >= self._next_time:
            self._samples.append(self._sample(now, get_stats()))
            if len(self._samples) >= self._capacity:
                self._samples = self._samples[::2]
                self._interval *= 2
            # The newest sample may just have been thinned out.
            self._next_time = self._began + self._samples[-1].time + self._interval

    def samples(self, stats: Mapping[str, Any]) -> list[StatsSample]:
        """Return all samples, oldest first, and one of now, with the counters `stats`."""
        return [*self._samples, self._sample(time.monotonic(), stats)]

    def _sample(self, now: float, stats: Mapping[str, Any]) -> StatsSample:
        num_used, num_free = stats["num_used_blocks"], stats["num_free_blocks"]
        return StatsSample(
            now - self._began, stats["num_running"], stats["num_waiting"], num_used / max(1, num_used + num_free),
            stats["num_prompt_tokens"], stats["num_output_tokens"],
        )  # fmt: skip


class Histogram:
    """Counts of values by ascending, inclusive upper bounds, as in Prometheus; and the sum of the values, `total`."""

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
    """Histograms of steps since the engine began: tokens of prompts and outputs, and seconds between an output's."""

    step_tokens: Histogram = field(default_factory=lambda: Histogram(_STEP_TOKENS))
    inter_token_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    _last_time: float = 0.0

    def observe(self, num_tokens: int, num_decodes: int, now: float) -> None:
        """Record a step whose tokens have come; `num_decodes` of them follow tokens of the previous step."""
        self.step_tokens.observe(num_tokens)
        if num_decodes:
            self.inter_token_seconds.observe(now - self._last_time, num_decodes)
        self._last_time = now


@dataclass(frozen=True)
class BlockUsage:
    """The blocks of a KV cache, in cells of adjacent blocks, for display; the last cell may have fewer.

    Attributes:
        block_size: tokens in a block.
        num_blocks, blocks_per_cell: blocks in the cache, and in a cell.
        used, cached, users, hits: by cell, blocks in use; blocks with a part of a findable prefix, in use or not; the
            most sequences that share a block; prefix-cache hits since the engine began.
    """

    block_size: int
    num_blocks: int
    blocks_per_cell: int
    used: list[int]
    cached: list[int]
    users: list[int]
    hits: list[int]
