"""The figures of a load on a server: per rate a row of a table, JSON, and a plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Its module needs aiohttp, an extra.
    from tests.load.client import Outcome

PERCENTILES = (50, 95, 99)
_PLOTTED = {"ttft": "time to first token", "tpot": "time per output token"}
HEADER = f"""\
                         output               TTFT, ms      time per token, ms   E2E, ms
    rate   done errors    req/s    tok/s {"     p50     p95     p99" * 2}       p50"""
_COLORS = "#3b6fb6", "#c46a2b", "#8a3a8f"
# Over this the client, or its limit on concurrency, has shaped the load.
_LATE_MS = 100.0


@dataclass
class RateResult:
    """What was measured at one rate; latencies are in milliseconds, one for each completed request that has it."""

    rate: float
    seconds: float
    num_requests: int
    completed: int
    input_tokens: int
    output_tokens: int
    errors: Counter[str]
    details: dict[str, str]
    latencies: dict[str, list[float]]
    delay_p99: float

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON knows them: an infinite rate is a text, a percentile of nothing null."""
        figures: dict[str, Any] = {
            name: {f"p{share}": percentile(values, share) if values else None for share in PERCENTILES}
            for name, values in self.latencies.items()
        }
        return {
            "rate": self.rate if math.isfinite(self.rate) else "inf",
            "seconds": self.seconds,
            "num_requests": self.num_requests,
            "completed": self.completed,
            "errors": dict(self.errors),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_second": self.completed / self.seconds,
            "output_tokens_per_second": self.output_tokens / self.seconds,
            "send_delay_p99_ms": self.delay_p99,
        } | {f"{name}_ms": value for name, value in figures.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile of values, interpolated between the nearest two.

    Args:
        values: at least one, in any order.
        share: 0 to 100.
    """
    ordered, place = sorted(values), (len(values) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summarize(rate: float, outcomes: Sequence[Outcome], seconds: float) -> RateResult:
    """Return the figures of a rate, at which all requests and their answers took so many seconds."""
    done = [o for o in outcomes if o.error is None]
    details = {str(o.error): " ".join(o.detail.split())[:160] for o in outcomes if o.error}
    times: dict[str, Sequence[float | None]] = {
        "ttft": [o.time_to_first_token for o in done],
        "tpot": [o.time_per_output_token for o in done],
        "e2e": [o.ended - o.sent for o in done],
    }
    return RateResult(
        rate=rate,
        seconds=seconds,
        num_requests=len(outcomes),
        completed=len(done),
        input_tokens=sum(o.input_tokens for o in done),
        output_tokens=sum(o.output_tokens for o in done),
        errors=Counter(o.error for o in outcomes if o.error),
        details=details,
        latencies={name: [1000 * t for t in values if t is not None] for name, values in times.items()},
        delay_p99=percentile([1000 * (o.sent - o.due) for o in outcomes], 99),
    )


def row(result: RateResult) -> str:
    """Return a line of the table; a hyphen stands for what was not measured."""
    figures = result.to_json()
    shown = [figures["ttft_ms"][f"p{share}"] for share in PERCENTILES]
    shown += [figures["tpot_ms"][f"p{share}"] for share in PERCENTILES]
    shown += [figures["e2e_ms"]["p50"]]
    latencies = ["-" if value is None else f"{value:.1f}" for value in shown]
    counts = f"{result.rate:8g} {result.completed:6d} {sum(result.errors.values()):6d}"
    rates = f"{figures['requests_per_second']:8.2f} {figures['output_tokens_per_second']:8.0f}"
    return f"{counts} {rates} {''.join(f'{text:>8}' for text in latencies[:-1])} {latencies[-1]:>9}"


def notes(results: Sequence[RateResult]) -> list[str]:
    """Return lines about the errors of each kind, and about rates that the client could not keep."""
    lines = []
    for r in results:
        for kind, count in r.errors.most_common():
            detail = f" (one of them: {r.details[kind]})" if r.details[kind] else ""
            lines.append(f"rate {r.rate:g}: {count} of {r.num_requests} failed: {kind}{detail}")
        if r.delay_p99 > _LATE_MS and math.isfinite(r.rate):
            lines.append(f"rate {r.rate:g}: requests were sent up to {r.delay_p99:.0f} ms late (p99)")
    return lines


def plot(results: Sequence[RateResult], title: str, file: str) -> None:
    """Draw throughput and latencies over the rate, or for a single rate the distribution of latencies."""
    # Not pyplot, which chooses a window system.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(layout="constrained")
    figure.suptitle(title, fontsize=10)
    if len(results) > 1:
        _plot_rates(figure, sorted(results, key=lambda r: r.rate))
    else:
        _plot_distributions(figure, results[0])
    figure.savefig(file, dpi=150, format="png")


def _plot_rates(figure: Any, results: Sequence[RateResult]) -> None:
    figure.set_size_inches(8, 9)
    # Rates stand side by side as in the table: they often grow by factors, and one may be infinite.
    figures, places = [r.to_json() for r in results], range(len(results))
    tokens, *panels = figure.subplots(3, sharex=True)
    bars = tokens.bar(places, [f["output_tokens_per_second"] for f in figures], width=0.5, color=_COLORS[0])
    tokens.bar_label(bars, [f"{f['requests_per_second']:.3g} requests/s" for f in figures], padding=2, fontsize=8)
    tokens.margins(y=0.15)
    tokens.set(ylabel="output tokens/s")
    for axes, (name, label) in zip(panels, _PLOTTED.items(), strict=True):
        _plot_latencies(axes, [r.latencies[name] for r in results])
        axes.set(ylabel=f"{label}, ms")
    panels[-1].set(xlabel="rate, requests/s")
    panels[-1].set_xticks(places, [f"{r.rate:g}" for r in results])


def _plot_latencies(axes: Any, latencies: Sequence[Sequence[float]]) -> None:
    places = [place for place, values in enumerate(latencies) if values]
    curves = [[percentile(latencies[place], share) for place in places] for share in PERCENTILES]
    for curve, share, color in zip(curves, PERCENTILES, _COLORS, strict=True):
        axes.plot(places, curve, marker="o", color=color, label=f"p{share}")
    # A server that sends each answer in one piece has no time between tokens.
    lowest, highest = min(curves[0], default=0.0), max(curves[-1], default=0.0) or 1.0
    # A saturated server's latencies are often a thousand times those of an idle one.
    if highest > 20 * lowest > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.15 * highest)
    axes.grid(axis="y", color="#e4e4e4")
    axes.legend(loc="upper left")


def _plot_distributions(figure: Any, result: RateResult) -> None:
    figure.set_size_inches(8, 6)
    for axes, (name, label) in zip(figure.subplots(2), _PLOTTED.items(), strict=True):
        values = result.latencies[name]
        if values:
            axes.ecdf(values, color=_COLORS[0])
            for share, color in zip(PERCENTILES, _COLORS, strict=True):
                value = percentile(values, share)
                axes.axvline(value, color=color, linestyle=":", label=f"p{share}: {value:.1f} ms")
            axes.legend(loc="upper left")
        axes.set(xlabel=f"{label}, ms", ylabel="share of requests")
