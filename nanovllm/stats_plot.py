"""A picture of an engine's run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

from nanovllm.engine.stats_history import StatsSample
from nanovllm.utils.extras import install_hint

_COLORS = "#3b6fb6", "#c46a2b"


def plot_stats(samples: Sequence[StatsSample], file: str | os.PathLike[str]) -> None:
    """Draw batch size, cache use and tokens per second over time, one below the other.

    Args:
        samples: oldest first.
        file: gets the picture; its ending says in which format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        # Not pyplot, which chooses a window system.
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(f"plot_stats needs matplotlib: {install_hint('plot')}") from error
    figure = Figure(figsize=(8, 6), layout="constrained")
    batch, cache, rate = figure.subplots(3, sharex=True)
    times = [sample.time for sample in samples]
    # A sample counts until the next.
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
    """Return the tokens per second between each sample and the next, of the counter with this name."""
    return [(getattr(b, counter) - getattr(a, counter)) / max(b.time - a.time, 1e-9) for a, b in pairwise(samples)]
