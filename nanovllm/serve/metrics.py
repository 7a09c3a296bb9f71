"""Exports the server's metrics to Prometheus, with vLLM's names where vLLM has them.

The engine's own counters are read on each scrape. Times come from finished requests; errors are reported by the
server. Nothing is registered globally, so a process can have several servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from nanovllm.engine.stats import Histogram as StepHistogram
from nanovllm.engine.stats import StepHistograms
from nanovllm.outputs import RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams

_GAUGES = {
    "vllm:num_requests_running": ("num_running", "Sequences that are being computed."),
    "vllm:num_requests_waiting": ("num_waiting", "Sequences that wait to be scheduled."),
    "nanovllm_host_cache_blocks": ("num_host_blocks", "Blocks in the host cache."),
    "nanovllm_num_states_running": ("num_used_states", "States of running sequences."),
    "nanovllm_num_states_kept": ("num_kept_states", "States in the prefix cache, for sequences to start from."),
}
_COUNTERS = {
    "vllm:prompt_tokens": ("num_prompt_tokens", "Prompt tokens of admitted requests, with those in the cache."),
    # Every prompt token is looked up in the prefix cache.
    "vllm:prefix_cache_queries": ("num_prompt_tokens", "Prompt tokens that were looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("num_cached_tokens", "Prompt tokens that were found in the prefix cache."),
    "vllm:prompt_tokens_cached": ("num_cached_tokens", "Prompt tokens that were not computed."),
    "vllm:generation_tokens": ("num_output_tokens", "Generated tokens."),
    "vllm:num_preemptions": ("num_preemptions", "Sequences that lost their blocks because the cache was full."),
    "nanovllm_host_cache_saved_blocks": ("num_saved_blocks", "Blocks that were copied to the host cache."),
    "nanovllm_host_cache_loaded_blocks": ("num_loaded_blocks", "Blocks that were copied back."),
    "nanovllm_host_cache_lost_blocks": ("num_lost_blocks", "Blocks that were evicted before they were saved."),
    # Of a model with states, `vllm:prefix_cache_hits` counts the tokens before a kept state.
    "nanovllm_prefix_cache_key_hits": ("num_matched_tokens", "Prompt tokens with cached keys, with a state or not."),
    "vllm:spec_decode_num_drafts": ("num_drafts", "Times that a sequence's drafts were verified."),
    "vllm:spec_decode_num_draft_tokens": ("num_draft_tokens", "Drafts that were verified."),
    "vllm:spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Drafts that were accepted."),
}
"""Maps names in Prometheus, where counters end in `_total`, to keys in `LLM.stats` and descriptions.

Some keys are there only with `swap_space`, for a model with states, or with speculation.
"""
_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
"""Bucket bounds in seconds: from a short prompt on an idle GPU to a long answer in a full queue."""
_TOKEN_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)
_LENGTH_BUCKETS = tuple(base * 10**power for power in range(5) for base in (1, 2, 5))
_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token.", _REQUEST_BUCKETS),
    "request_time_per_output_token_seconds": ("Mean time between the tokens of a request.", _TOKEN_BUCKETS),
    "request_queue_time_seconds": ("Time from a request's arrival until it was first scheduled.", _REQUEST_BUCKETS),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its end.", _REQUEST_BUCKETS),
    "request_prefill_time_seconds": ("Time from first scheduled to the first token.", _REQUEST_BUCKETS),
    "request_decode_time_seconds": ("Time from a request's first token to its end.", _REQUEST_BUCKETS),
    "request_inference_time_seconds": ("Time from first scheduled to a request's end.", _REQUEST_BUCKETS),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _LENGTH_BUCKETS),
    "request_prefill_kv_computed_tokens": ("Tokens of a prompt that were not in the cache.", _LENGTH_BUCKETS),
    "request_generation_tokens": ("Tokens of a request's longest output.", _LENGTH_BUCKETS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest output.", _LENGTH_BUCKETS),
    "request_params_max_tokens": ("The most tokens of an output that a request asks for.", _LENGTH_BUCKETS),
    "request_params_n": ("Outputs that a request asks for.", (1, 2, 5, 10, 20, 50, 100)),
}
"""Histograms of requests, by name without `vllm:`."""
_FINISH_REASONS = ("stop", "length", "abort")


class Metrics(Collector):
    """Counts requests, times and errors, and renders them together with the engine's counters.

    `get_stats` and `get_steps` return the engine's counters and step histograms. `folder` has the counters of all front
    ends, which are merged; the client library must have been imported with it as PROMETHEUS_MULTIPROC_DIR.
    """

    def __init__(
        self, get_stats: Callable[[], Mapping[str, Any]], model: str, cache_config: Mapping[str, object],
        get_steps: Callable[[], StepHistograms] = StepHistograms, folder: str | None = None,
    ) -> None:  # fmt: skip
        self._get_stats, self._get_steps = get_stats, get_steps
        self._cache_config = {name: str(value) for name, value in cache_config.items()}
        self._labels = labels = {"model_name": model, "engine": "0"}
        self._registry = own = CollectorRegistry()
        if folder is None:
            for collector in (ProcessCollector, GCCollector):
                collector(registry=self._registry)
        else:
            own = CollectorRegistry()
            MultiProcessCollector(self._registry, folder)
        self._registry.register(self)
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, list(labels), buckets=buckets, registry=own).labels(**labels)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        text = "Requests by why their first output ended."
        self._requests = Counter("vllm:request_success", text, [*labels, "finished_reason"], registry=own)
        # Start at 0: Prometheus sees no increase in a series that begins above 0.
        for reason in _FINISH_REASONS:
            self._requests.labels(**labels, finished_reason=reason)
        self._errors = Counter("nanovllm_errors", "Errors by kind.", [*labels, "kind"], registry=own)

    def observe(self, output: RequestOutput, num_tokens: int) -> None:
        """Count a finished request, whose longest output has `num_tokens`, and its known times."""
        self._requests.labels(**self._labels, finished_reason=output.outputs[0].finish_reason).inc()
        num_prompt_tokens, times = len(output.prompt_token_ids), output.metrics or RequestMetrics(0.0)
        queue, first, total = times.queue_time, times.time_to_first_token, times.total_time
        decode = _difference(total, first)
        per_token = None if decode is None or num_tokens < 2 else decode / (num_tokens - 1)
        self._observe(
            request_prompt_tokens=num_prompt_tokens,
            request_prefill_kv_computed_tokens=num_prompt_tokens - output.num_cached_tokens,
            request_generation_tokens=num_tokens,
            request_max_num_generation_tokens=num_tokens,
            request_queue_time_seconds=queue,
            time_to_first_token_seconds=first,
            e2e_request_latency_seconds=total,
            request_prefill_time_seconds=_difference(first, queue),
            request_decode_time_seconds=decode,
            request_inference_time_seconds=_difference(total, queue),
            request_time_per_output_token_seconds=per_token,
        )

    def observe_params(self, params: SamplingParams) -> None:
        """Record a request's sampling parameters."""
        self._observe(request_params_n=params.n, request_params_max_tokens=params.max_tokens)

    def count_aborted(self) -> None:
        """Count a request whose reader left before its end."""
        self._requests.labels(**self._labels, finished_reason="abort").inc()

    def count_error(self, kind: str) -> None:
        """Count an error. Kinds must be few and not chosen by clients, since each is kept forever."""
        self._errors.labels(**self._labels, kind=kind).inc()

    def render(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text format, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _observe(self, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self._histograms[name].observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics, from a single snapshot."""
        stats = self._get_stats()
        for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (key, text) in metrics.items():
                if key in stats:
                    yield self._values(kind, name, text, {"": stats[key]})
        text, num_used = "Fraction of the cache's blocks that are in use, from 0 to 1.", stats["num_used_blocks"]
        use = num_used / max(1, num_used + stats["num_free_blocks"])
        yield self._values(GaugeMetricFamily, "vllm:kv_cache_usage_perc", text, {"": use})
        # By vLLM's causes: transfers from host memory count as capacity, and prefixes in the host cache as local hits.
        name, text = "vllm:num_requests_waiting_by_reason", "Sequences that wait, by cause."
        waiting = {"capacity": stats["num_waiting"], "deferred": 0}
        yield self._values(GaugeMetricFamily, name, text, waiting, "reason")
        name, text, num_cached = "vllm:prompt_tokens_by_source", "Prompt tokens by origin.", stats["num_cached_tokens"]
        sources = {"local_compute": stats["num_prompt_tokens"] - num_cached, "local_cache_hit": num_cached}
        yield self._values(CounterMetricFamily, name, text, {**sources, "external_kv_transfer": 0}, "source")
        if (accepted := stats.get("num_accepted_per_position")) is not None:
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            text = "Drafts that were accepted, by position among a sequence's drafts in a step, from 0."
            values = {str(position): count for position, count in enumerate(accepted)}
            yield self._values(CounterMetricFamily, name, text, values, "position")
        steps = self._get_steps()
        text = "Prompt tokens and generated tokens of a step."
        yield self._histogram("vllm:iteration_tokens_total", text, steps.step_tokens)
        text = "Time from a token of an output to the next one."
        yield self._histogram("vllm:inter_token_latency_seconds", text, steps.inter_token_seconds)
        info = Metric("vllm:cache_config_info", "Settings of the cache.", "gauge")
        info.add_sample(info.name, {**self._labels, **self._cache_config}, 1)
        yield info

    def _values(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, values: Mapping[str, float],
        label: str | None = None,
    ) -> Metric:  # fmt: skip
        """Return a gauge or a counter, with a value for each value of `label`, or one without a label."""
        family = kind(name, text, labels=[*self._labels, *([label] if label else [])])
        for own, value in values.items():
            family.add_metric([*self._labels.values(), *([own] if label else [])], value)
        return family

    def _histogram(self, name: str, text: str, histogram: StepHistogram) -> Metric:
        bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
        buckets = list(zip(bounds, histogram.cumulative(), strict=True))
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, histogram.total)
        return family


def _difference(end: float | None, begin: float | None) -> float | None:
    return None if end is None or begin is None else end - begin
