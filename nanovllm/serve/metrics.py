"""The server's metrics for Prometheus.

What the engine counts is read from it whenever Prometheus asks, and is counted nowhere else. Times come from finished
requests; errors are told by the server. Nothing is registered globally, so a process can have several servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from nanovllm.engine.step_histograms import StepHistograms
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

_GAUGES = {
    "nanovllm_requests_running": ("num_running", "Sequences that are being computed."),
    "nanovllm_requests_waiting": ("num_waiting", "Sequences that wait to be scheduled."),
    "nanovllm_host_cache_blocks": ("num_host_blocks", "Blocks that the host's memory has."),
}
_COUNTERS = {
    "nanovllm_prompt_tokens": ("num_prompt_tokens", "Prompt tokens of admitted requests, with those in the cache."),
    "nanovllm_output_tokens": ("num_output_tokens", "Generated tokens."),
    "nanovllm_prefix_cache_hit_tokens": ("num_cached_tokens", "Prompt tokens that were found in the prefix cache."),
    "nanovllm_preemptions": ("num_preemptions", "Sequences that lost their blocks because the cache was full."),
    "nanovllm_host_cache_saved_blocks": ("num_saved_blocks", "Blocks that were copied to the host's memory."),
    "nanovllm_host_cache_loaded_blocks": ("num_loaded_blocks", "Blocks that were copied back."),
    "nanovllm_host_cache_lost_blocks": ("num_lost_blocks", "Blocks that were evicted before they were saved."),
}
"""Names in Prometheus, where counters end in `_total`; names in `LLM.stats`; and what they are."""
_OF_HOST_CACHE = frozenset({"num_host_blocks", "num_saved_blocks", "num_loaded_blocks", "num_lost_blocks"})
"""What `LLM.stats` has with `swap_space` alone."""

_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_TOKEN_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)
_HISTOGRAMS = {
    "nanovllm_time_to_first_token_seconds": ("Time from a request's arrival to its first token.", _REQUEST_BUCKETS),
    "nanovllm_time_per_output_token_seconds": ("Mean time between the tokens of a request.", _TOKEN_BUCKETS),
    "nanovllm_queue_time_seconds": ("Time from a request's arrival until it was first scheduled.", _REQUEST_BUCKETS),
    "nanovllm_request_time_seconds": ("Time from a request's arrival to its end.", _REQUEST_BUCKETS),
}
"""Upper bounds in seconds: from a short prompt on an idle GPU to a long answer in a full queue."""

_LENGTH_BUCKETS = tuple(base * 10**power for power in range(5) for base in (1, 2, 5))
_HISTOGRAMS |= {
    "nanovllm_prefill_time_seconds": ("Time from first scheduled to the first token.", _REQUEST_BUCKETS),
    "nanovllm_decode_time_seconds": ("Time from a request's first token to its end.", _REQUEST_BUCKETS),
    "nanovllm_inference_time_seconds": ("Time from first scheduled to a request's end.", _REQUEST_BUCKETS),
    "nanovllm_request_prompt_tokens": ("Tokens of a request's prompt.", _LENGTH_BUCKETS),
    "nanovllm_request_computed_prompt_tokens": ("Tokens of a prompt that were not in the cache.", _LENGTH_BUCKETS),
    "nanovllm_request_output_tokens": ("Tokens of a request's longest output.", _LENGTH_BUCKETS),
    "nanovllm_request_max_tokens": ("The most tokens of an output that a request asks for.", _LENGTH_BUCKETS),
    "nanovllm_request_n": ("Outputs that a request asks for.", (1, 2, 5, 10, 20, 50, 100)),
}

_VLLM_NAMES = {
    "nanovllm_requests_running": ("vllm:num_requests_running",),
    "nanovllm_requests_waiting": ("vllm:num_requests_waiting",),
    "nanovllm_requests_waiting_by_reason": ("vllm:num_requests_waiting_by_reason",),
    "nanovllm_prompt_tokens_by_source": ("vllm:prompt_tokens_by_source",),
    "nanovllm_step_tokens": ("vllm:iteration_tokens_total",),
    "nanovllm_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds",),
    "nanovllm_cache_usage_ratio": ("vllm:kv_cache_usage_perc",),
    # Every prompt token is looked for in the prefix cache.
    "nanovllm_prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "nanovllm_output_tokens": ("vllm:generation_tokens",),
    "nanovllm_prefix_cache_hit_tokens": ("vllm:prefix_cache_hits", "vllm:prompt_tokens_cached"),
    "nanovllm_preemptions": ("vllm:num_preemptions",),
    "nanovllm_requests": ("vllm:request_success",),
    "nanovllm_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "nanovllm_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "nanovllm_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "nanovllm_request_time_seconds": ("vllm:e2e_request_latency_seconds",),
    "nanovllm_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "nanovllm_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "nanovllm_inference_time_seconds": ("vllm:request_inference_time_seconds",),
    "nanovllm_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "nanovllm_request_computed_prompt_tokens": ("vllm:request_prefill_kv_computed_tokens",),
    "nanovllm_request_output_tokens": ("vllm:request_generation_tokens", "vllm:request_max_num_generation_tokens"),
    "nanovllm_request_max_tokens": ("vllm:request_params_max_tokens",),
    "nanovllm_request_n": ("vllm:request_params_n",),
}
"""What dashboards and routers that are made for vLLM look for."""

_FINISH_REASONS = ("stop", "length", "abort")


class Metrics:
    """Counts requests, their times and errors, and renders them with the engine's own counters.

    Args:
        get_stats: returns the engine's counters: `LLM.stats`.
        model: the model's name.
        cache_config: settings of the cache, by vLLM's names.
        get_steps: returns what the engine counts step by step.
        folder: in which each front end of the server keeps its counters, which are shown together; the client library
            must have been imported with it as PROMETHEUS_MULTIPROC_DIR. None: there is one front end.
    """

    def __init__(
        self,
        get_stats: Callable[[], Mapping[str, int]],
        model: str,
        cache_config: Mapping[str, object],
        get_steps: Callable[[], StepHistograms] = StepHistograms,
        folder: str | None = None,
    ) -> None:
        self._registry = own = CollectorRegistry()
        self._all = CollectorRegistry()
        self._all.register(_WithVllmNames(self._registry, model, cache_config))
        if folder is None:
            for collector in (ProcessCollector, GCCollector):
                collector(registry=self._all)
        else:
            own = CollectorRegistry()
            MultiProcessCollector(self._registry, folder)
        self._registry.register(_EngineCollector(get_stats, get_steps))
        self._histograms = {
            name: Histogram(name, text, buckets=buckets, registry=own) for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._requests = Counter(
            "nanovllm_requests", "Requests by why their first output ended.", ["finish_reason"], registry=own
        )
        # Prometheus sees no increase in a series that begins above 0.
        for reason in _FINISH_REASONS:
            self._requests.labels(reason)
        self._errors = Counter("nanovllm_errors", "Errors by kind.", ["kind"], registry=own)

    def observe(self, output: RequestOutput, num_tokens: int | None = None) -> None:
        """Count a finished request, and its times as far as they are known.

        Args:
            output: the request's output, or the last one of its stream.
            num_tokens: tokens of its longest output. The last output of a stream holds only what is new, so it must be
                given there; None counts those of `output`.
        """
        self._requests.labels(output.outputs[0].finish_reason).inc()
        if num_tokens is None:
            num_tokens = max(len(completion.token_ids) for completion in output.outputs)
        self._observe("nanovllm_request_prompt_tokens", len(output.prompt_token_ids))
        num_computed = len(output.prompt_token_ids) - output.num_cached_tokens
        self._observe("nanovllm_request_computed_prompt_tokens", num_computed)
        self._observe("nanovllm_request_output_tokens", num_tokens)
        times = output.metrics
        if times is None:
            return
        queue, first, total = times.queue_time, times.time_to_first_token, times.total_time
        self._observe("nanovllm_queue_time_seconds", queue)
        self._observe("nanovllm_time_to_first_token_seconds", first)
        self._observe("nanovllm_request_time_seconds", total)
        if queue is None or first is None or total is None:
            return
        self._observe("nanovllm_prefill_time_seconds", first - queue)
        self._observe("nanovllm_decode_time_seconds", total - first)
        self._observe("nanovllm_inference_time_seconds", total - queue)
        if num_tokens > 1:
            self._observe("nanovllm_time_per_output_token_seconds", (total - first) / (num_tokens - 1))

    def observe_params(self, params: SamplingParams) -> None:
        """Count what a request asks for."""
        self._observe("nanovllm_request_n", params.n)
        self._observe("nanovllm_request_max_tokens", params.max_tokens)

    def count_aborted(self, count: int) -> None:
        """Count requests that ended unfinished, since nobody waits for them any more."""
        self._requests.labels("abort").inc(count)

    def count_error(self, kind: str) -> None:
        """Count an error. Kinds must be few and not made by clients: each is kept for good."""
        self._errors.labels(kind).inc()

    def render(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text form, and its content type."""
        return generate_latest(self._all), CONTENT_TYPE_LATEST

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)


class _EngineCollector(Collector):
    """Reads the engine's counters when they are asked for."""

    def __init__(self, get_stats: Callable[[], Mapping[str, int]], get_steps: Callable[[], StepHistograms]) -> None:
        self._get_stats = get_stats
        self._get_steps = get_steps

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's gauges and counters, all of one moment."""
        stats = self._get_stats()
        absent = _OF_HOST_CACHE - stats.keys()
        for name, (key, text) in _GAUGES.items():
            if key not in absent:
                yield GaugeMetricFamily(name, text, stats[key])
        num_used, num_free = stats["num_used_blocks"], stats["num_free_blocks"]
        use = num_used / max(1, num_used + num_free)
        yield GaugeMetricFamily("nanovllm_cache_usage_ratio", "Fraction of the cache's blocks that are in use.", use)
        for name, (key, text) in _COUNTERS.items():
            if key not in absent:
                yield CounterMetricFamily(name, text, stats[key])
        # Waiting for the link to the host's memory counts as capacity, and what is loaded from there as the cache's.
        name, text = "nanovllm_requests_waiting_by_reason", "Sequences that wait, by cause."
        waiting = GaugeMetricFamily(name, text, labels=["reason"])
        waiting.add_metric(["capacity"], stats["num_waiting"])
        waiting.add_metric(["deferred"], 0)
        yield waiting
        sources = CounterMetricFamily("nanovllm_prompt_tokens_by_source", "Prompt tokens by origin.", labels=["source"])
        sources.add_metric(["local_compute"], stats["num_prompt_tokens"] - stats["num_cached_tokens"])
        sources.add_metric(["local_cache_hit"], stats["num_cached_tokens"])
        sources.add_metric(["external_kv_transfer"], 0)
        yield sources
        steps = self._get_steps()
        for name, text, histogram in (
            ("nanovllm_step_tokens", "Prompt tokens and generated tokens of a step.", steps.step_tokens),
            (
                "nanovllm_inter_token_latency_seconds",
                "Time from a token of an output to the next one.",
                steps.inter_token_seconds,
            ),
        ):
            bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
            buckets = list(zip(bounds, histogram.cumulative(), strict=True))
            yield HistogramMetricFamily(name, text, buckets, histogram.total)


class _WithVllmNames(Collector):
    """The metrics of a registry with the model's name, and once more under vLLM's names.

    Args:
        registry: has the metrics.
        model: the model's name.
        cache_config: settings of the cache.
    """

    def __init__(self, registry: CollectorRegistry, model: str, cache_config: Mapping[str, object]) -> None:
        self._registry = registry
        self._model = model
        self._cache_config = {name: str(value) for name, value in cache_config.items()}

    def collect(self) -> Iterator[Metric]:
        """Yield all forms of each metric, all of one moment."""
        for metric in self._registry.collect():
            yield self._labelled(metric, metric.name)
            for name in _VLLM_NAMES.get(metric.name, ()):
                yield self._labelled(metric, name)
        info = Metric("vllm:cache_config_info", "Settings of the cache.", "gauge")
        info.add_sample(info.name, {"model_name": self._model, "engine": "0", **self._cache_config}, 1)
        yield info

    def _labelled(self, metric: Metric, name: str) -> Metric:
        copy, labels = Metric(name, metric.documentation, metric.type), {"model_name": self._model}
        renamed = {}
        if name != metric.name:
            labels, renamed = {**labels, "engine": "0"}, {"finish_reason": "finished_reason"}
        for sample in metric.samples:
            own = {renamed.get(key, key): text for key, text in sample.labels.items()}
            copy.add_sample(name + sample.name[len(metric.name) :], {**labels, **own}, sample.value)
        return copy
