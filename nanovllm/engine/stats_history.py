"""History of an engine's counters, in bounded memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from nanovllm.utils.display import install_hint


class StatsSample(NamedTuple):
    """An engine's state at one time.

    Attributes:
        time: seconds since the engine began.
        num_running, num_waiting: sequences.
        cache_use: fraction of the cache's blocks in use.
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
        interval: minimum seconds between samples. A sample takes some microseconds, noticeable at batch 1.
        capacity: at this number, samples are thinned to half, and the interval doubles.
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
        """Return all samples, oldest first, and one of now, with the counters `stats`."""
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


_COLORS = "#3b6fb6", "#c46a2b"


def plot_stats(samples: Sequence[StatsSample], file: str | os.PathLike[str]) -> None:
    """Plot batch size, cache use and tokens per second over time, one below the other.

    Args:
        samples: oldest first.
        file: output path; its extension sets the format.

    Raises:
        ImportError: matplotlib is not installed.
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
