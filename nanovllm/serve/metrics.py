"""The server's metrics for Prometheus.

What the engine counts is read from it whenever Prometheus asks, and is counted nowhere else. Times come from finished
requests; errors are told by the server. Nothing is registered globally, so a process can have several servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from nanovllm.outputs import RequestOutput

_GAUGES = {
    "nanovllm_requests_running": ("num_running", "Sequences that are being computed."),
    "nanovllm_requests_waiting": ("num_waiting", "Sequences that wait to be scheduled."),
}
_COUNTERS = {
    "nanovllm_prompt_tokens": ("num_prompt_tokens", "Prompt tokens of admitted requests, with those in the cache."),
    "nanovllm_output_tokens": ("num_output_tokens", "Generated tokens."),
    "nanovllm_prefix_cache_hit_tokens": ("num_cached_tokens", "Prompt tokens that were found in the prefix cache."),
    "nanovllm_preemptions": ("num_preemptions", "Sequences that lost their blocks because the cache was full."),
}
"""Names in Prometheus, where counters end in `_total`; names in `LLM.stats`; and what they are."""

_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_TOKEN_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)
_HISTOGRAMS = {
    "nanovllm_time_to_first_token_seconds": ("Time from a request's arrival to its first token.", _REQUEST_BUCKETS),
    "nanovllm_time_per_output_token_seconds": ("Mean time between the tokens of a request.", _TOKEN_BUCKETS),
    "nanovllm_queue_time_seconds": ("Time from a request's arrival until it was first scheduled.", _REQUEST_BUCKETS),
    "nanovllm_request_time_seconds": ("Time from a request's arrival to its end.", _REQUEST_BUCKETS),
}
"""Upper bounds in seconds: from a short prompt on an idle GPU to a long answer in a full queue."""

_FINISH_REASONS = ("stop", "length", "abort")


class Metrics:
    """Counts requests, their times and errors, and renders them with the engine's own counters.

    Args:
        get_stats: returns the engine's counters: `LLM.stats`.
    """

    def __init__(self, get_stats: Callable[[], Mapping[str, int]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(get_stats))
        self._histograms = {
            name: Histogram(name, text, buckets=buckets, registry=self._registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._requests = Counter(
            "nanovllm_requests", "Requests by why their first output ended.", ["finish_reason"], registry=self._registry
        )
        # Prometheus sees no increase in a series that begins above 0.
        for reason in _FINISH_REASONS:
            self._requests.labels(reason)
        self._errors = Counter("nanovllm_errors", "Errors by kind.", ["kind"], registry=self._registry)

    def observe(self, output: RequestOutput, num_tokens: int | None = None) -> None:
        """Count a finished request, and its times as far as they are known.

        Args:
            output: the request's output, or the last one of its stream.
            num_tokens: tokens of its longest output. The last output of a stream holds only what is new, so it must be
                given there; None counts those of `output`.
        """
        self._requests.labels(output.outputs[0].finish_reason).inc()
        times = output.metrics
        if times is None:
            return
        if num_tokens is None:
            num_tokens = max(len(completion.token_ids) for completion in output.outputs)
        self._observe_time("nanovllm_queue_time_seconds", times.queue_time)
        self._observe_time("nanovllm_time_to_first_token_seconds", times.time_to_first_token)
        self._observe_time("nanovllm_request_time_seconds", times.total_time)
        if times.time_to_first_token is not None and times.total_time is not None and num_tokens > 1:
            per_token = (times.total_time - times.time_to_first_token) / (num_tokens - 1)
            self._observe_time("nanovllm_time_per_output_token_seconds", per_token)

    def count_aborted(self, count: int) -> None:
        """Count requests that ended unfinished, since nobody waits for them any more."""
        self._requests.labels("abort").inc(count)

    def count_error(self, kind: str) -> None:
        """Count an error. Kinds must be few and not made by clients: each is kept for good."""
        self._errors.labels(kind).inc()

    def render(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text form, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _observe_time(self, name: str, seconds: float | None) -> None:
        if seconds is not None:
            self._histograms[name].observe(seconds)


class _EngineCollector(Collector):
    """Reads the engine's counters when they are asked for."""

    def __init__(self, get_stats: Callable[[], Mapping[str, int]]) -> None:
        self._get_stats = get_stats

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's gauges and counters, all of one moment."""
        stats = self._get_stats()
        for name, (key, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, stats[key])
        num_used, num_free = stats["num_used_blocks"], stats["num_free_blocks"]
        use = num_used / max(1, num_used + num_free)
        yield GaugeMetricFamily("nanovllm_cache_usage_ratio", "Fraction of the cache's blocks that are in use.", use)
        for name, (key, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, stats[key])
