"""Statistics of an engine: its counters over time, histograms of its steps, and the use of its cache's blocks."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from nanovllm.utils.display import install_hint

_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_COLORS = "#3b6fb6", "#c46a2b"


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


def plot_stats(samples: Sequence[StatsSample], file: str | os.PathLike[str]) -> None:
    """Plot batch size, cache use and tokens per second over time; the extension of the file sets its format.

    samples: oldest first. ImportError without matplotlib.
    """
    try:
        # Not pyplot, which would choose a GUI backend.
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(f"plot_stats needs matplotlib: {install_hint('plot')}") from error
    figure = Figure(figsize=(8, 6), layout="constrained")
    batch, cache, rate = figure.subplots(3, sharex=True)
    times = [sample.time for sample in samples]
    # A sample is valid until the next.
    steps = {"drawstyle": "steps-post"}
    batch.plot(times, [sample.num_running for sample in samples], color=_COLORS[0], label="running", **steps)
    batch.plot(times, [sample.num_waiting for sample in samples], color=_COLORS[1], label="waiting", **steps)
    cache.plot(times, [100 * sample.cache_use for sample in samples], color=_COLORS[0], **steps)
    for name, color in zip(("output", "prompt"), _COLORS, strict=True):
        rate.stairs(token_rates(samples, f"num_{name}_tokens"), times, color=color, label=name)
    batch.set(ylabel="sequences")
    cache.set(ylabel="cache in use, %", ylim=(0, 100))
    rate.set(ylabel="tokens/s", xlabel="seconds since the engine began")
    batch.legend()
    rate.legend()
    figure.savefig(file, dpi=150)


def token_rates(samples: Sequence[StatsSample], counter: str) -> list[float]:
    """Return the tokens per second between each sample and the next, by the counter of this name."""
    return [(getattr(b, counter) - getattr(a, counter)) / max(b.time - a.time, 1e-9) for a, b in pairwise(samples)]


def add_stats(total: dict[str, Any], stats: Mapping[str, Any]) -> None:
    """Add an engine's counters to a total; lists are added position by position."""
    for name, value in stats.items():
        if isinstance(value, list):
            total[name] = [a + b for a, b in zip(total.get(name, [0] * len(value)), value, strict=True)]
        else:
            total[name] = total.get(name, 0) + value


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


def merged_histograms(several: Sequence[StepHistograms]) -> StepHistograms:
    """Return the sum of several engines' histograms."""
    merged = StepHistograms()
    for histograms in several:
        merged.step_tokens.merge(histograms.step_tokens)
        merged.inter_token_seconds.merge(histograms.inter_token_seconds)
    return merged


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


def joined_usage(usages: Sequence[BlockUsage]) -> BlockUsage:
    """Return the blocks of several engines' caches of about one size, concatenated."""
    first = usages[0]
    cells = {
        name: [n for usage in usages for n in getattr(usage, name)] for name in ("used", "cached", "users", "hits")
    }
    return BlockUsage(first.block_size, sum(usage.num_blocks for usage in usages), first.blocks_per_cell, **cells)
