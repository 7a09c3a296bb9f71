"""The server's metrics, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.metrics import Metrics

STATS = {
    "num_steps": 9,
    "num_prompt_tokens": 1000,
    "num_output_tokens": 500,
    "num_cached_tokens": 250,
    "num_preemptions": 3,
    "num_running": 7,
    "num_waiting": 2,
    "num_used_blocks": 30,
    "num_free_blocks": 10,
}
HOST_STATS = {"num_host_blocks": 5, "num_saved_blocks": 9, "num_loaded_blocks": 4, "num_lost_blocks": 1}
STATE_STATS = {"num_used_states": 7, "num_kept_states": 6, "num_matched_tokens": 300}
SPECULATION_STATS = {
    "num_drafts": 40,
    "num_draft_tokens": 100,
    "num_accepted_tokens": 60,
    "num_accepted_per_position": [35, 25, 0],
}
TIMES = (
    "request_queue_time_seconds",
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds",
)
DASHBOARD = json.loads((resources.files("nanovllm.serve") / "dashboard.json").read_text())


def output(*lengths: int, reason: str = "stop", times: RequestMetrics | None = None) -> RequestOutput:
    """A finished request whose outputs have these lengths."""
    outputs = [CompletionOutput(i, "", [0] * n, finish_reason=reason) for i, n in enumerate(lengths)]
    return RequestOutput(0, None, [1, 2], outputs, True, metrics=times)


def observe(metrics: Metrics, output: RequestOutput) -> None:
    metrics.observe(output, max(len(completion.token_ids) for completion in output.outputs))


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Values by name and labels."""
    families = list(text_string_to_metric_families(metrics.render()[0].decode()))
    known = (family for family in families if family.name.startswith(("nanovllm_", "vllm:")))
    found = [sample for family in known for sample in family.samples]
    assert all((sample.labels.pop("model_name"), sample.labels.pop("engine")) == ("m", "0") for sample in found)
    return {(sample.name, tuple(sample.labels.values())): sample.value for sample in found}


def value(metrics: Metrics, name: str, *labels: str) -> float | None:
    return samples(metrics).get((f"vllm:{name}", labels))


DRAFTS = "vllm:spec_decode_num_"


@pytest.mark.parametrize(
    ("more", "names"),
    [
        (HOST_STATS, {
            "nanovllm_host_cache_blocks": 5, "nanovllm_host_cache_saved_blocks_total": 9,
            "nanovllm_host_cache_loaded_blocks_total": 4, "nanovllm_host_cache_lost_blocks_total": 1,
        }),
        (STATE_STATS, {
            "nanovllm_num_states_running": 7, "nanovllm_num_states_kept": 6,
            "nanovllm_prefix_cache_key_hits_total": 300,
        }),
        (SPECULATION_STATS, {
            f"{DRAFTS}drafts_total": 40, f"{DRAFTS}draft_tokens_total": 100, f"{DRAFTS}accepted_tokens_total": 60,
            f"{DRAFTS}accepted_tokens_per_pos_total 0": 35, f"{DRAFTS}accepted_tokens_per_pos_total 1": 25,
            f"{DRAFTS}accepted_tokens_per_pos_total 2": 0,
        }),
    ],
)  # fmt: skip
def test_what_an_engine_may_have_is_counted_where_it_has_it(more: dict[str, Any], names: dict[str, int]) -> None:
    stats: dict[str, Any] = dict(STATS)
    metrics = Metrics(lambda: stats, "m", {})
    before = samples(metrics)
    stats |= more
    found = {" ".join([name, *labels]): count for (name, labels), count in (samples(metrics).items() - before.items())}
    assert {name: count for name, count in found.items() if not name.endswith("_created")} == names


def test_the_engine_counts_all_that_is_read_from_it(llm: Any) -> None:
    metrics = Metrics(llm.stats, "m", {}, llm.step_histograms)
    (result,) = llm.generate([[5, 6, 7]], use_tqdm=False)
    num_tokens = len(result.outputs[0].token_ids)
    # A step each token, the first with the prompt.
    assert (
        value(metrics, "iteration_tokens_total_count") == num_tokens
        and value(metrics, "iteration_tokens_total_sum") == num_tokens + 3
    )
    assert value(metrics, "iteration_tokens_total_bucket", "1.0") == value(metrics, "inter_token_latency_seconds_count")
    assert value(metrics, "inter_token_latency_seconds_count") == num_tokens - 1
    between, total = value(metrics, "inter_token_latency_seconds_sum"), result.metrics.total_time
    assert 0 < (between or 0) <= total - result.metrics.time_to_first_token + 1e-3
    assert value(metrics, "prompt_tokens_by_source_total", "local_compute") == 3
    observe(metrics, result)
    assert value(metrics, "prompt_tokens_total") == 3
    assert value(metrics, "generation_tokens_total") == len(result.outputs[0].token_ids)
    for name in TIMES:
        assert value(metrics, f"{name}_count") == 1


@pytest.mark.parametrize(
    ("lengths", "times", "counts"),
    [
        ((1, 1), RequestMetrics(0.0, 0.1, 0.2, 0.3), (1, 1, 1, 0)),
        ((0,), RequestMetrics(0.0, None, None, 0.3), (0, 0, 1, 0)),
        ((4,), RequestMetrics(0.0, 0.1), (1, 0, 0, 0)),
        ((4,), RequestMetrics(0.0, 0.1, 0.2), (1, 1, 0, 0)),
        ((4,), RequestMetrics(0.0, 0.0, 0.0, 0.0), (1, 1, 1, 1)),
        ((4,), None, (0, 0, 0, 0)),
    ],
)
def test_unknown_times_are_left_out(
    lengths: tuple[int, ...], times: RequestMetrics | None, counts: tuple[int, ...]
) -> None:
    metrics = Metrics(lambda: STATS, "m", {})
    observe(metrics, output(*lengths, times=times))
    assert tuple(value(metrics, f"{name}_count") for name in TIMES) == counts
    assert value(metrics, "request_success_total", "stop") == 1


def test_requests_and_errors_are_counted_by_kind_and_by_server() -> None:
    metrics, other = Metrics(lambda: STATS, "m", {}), Metrics(lambda: STATS, "m", {})
    for reason in ("stop", "stop", "abort"):
        observe(metrics, output(2, reason=reason))
    for kind in ("timeout_error", "rate_limit_error", "timeout_error"):
        metrics.count_error(kind)
    requests = {reason: value(metrics, "request_success_total", reason) for reason in ("stop", "length", "abort")}
    assert requests == {"stop": 2, "length": 0, "abort": 1}
    errors = [samples(metrics)["nanovllm_errors_total", (f"{kind}_error",)] for kind in ("timeout", "rate_limit")]
    assert errors == [2, 1]
    assert value(other, "request_success_total", "stop") == 0 and "nanovllm_errors_total" not in str(samples(other))


def test_the_text_says_what_each_metric_is() -> None:
    text, content_type = Metrics(lambda: STATS, "m", {}).render()
    assert content_type.startswith("text/plain; version=")
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.name.startswith(("nanovllm_", "vllm:", "process_", "python_gc_"))
        assert family.documentation and family.type != "unknown"


def test_names_and_labels_are_vllms() -> None:
    stats = STATS | SPECULATION_STATS
    metrics = Metrics(lambda: stats, "m", {"block_size": 16})
    # Two seconds for the four tokens that follow the first one of the longest output.
    finished = output(3, 5, reason="length", times=RequestMetrics(0.0, 0.25, 1.0, 3.0))
    observe(metrics, replace(finished, num_cached_tokens=1))
    metrics.observe_params(SamplingParams(n=2, max_tokens=7))
    lines = metrics.render()[0].decode().splitlines()
    labels = 'engine="0",model_name="m"'
    for line in (
        "num_requests_running{%s} 7.0", "kv_cache_usage_perc{%s} 0.75", "generation_tokens_total{%s} 500.0",
        "prefix_cache_hits_total{%s} 250.0", "num_preemptions_total{%s} 3.0", "num_requests_waiting{%s} 2.0",
        "request_queue_time_seconds_sum{%s} 0.25", "time_to_first_token_seconds_sum{%s} 1.0",
        "e2e_request_latency_seconds_sum{%s} 3.0", "request_time_per_output_token_seconds_sum{%s} 0.5",
        'request_time_per_output_token_seconds_bucket{engine="0",le="0.2",model_name="m"} 0.0',
        'request_time_per_output_token_seconds_bucket{engine="0",le="0.5",model_name="m"} 1.0',
        'spec_decode_num_accepted_tokens_per_pos_total{%s,position="1"} 25.0',
        "prompt_tokens_total{%s} 1000.0", "prefix_cache_queries_total{%s} 1000.0",
        'request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0',
        "request_decode_time_seconds_sum{%s} 2.0", "request_prefill_time_seconds_sum{%s} 0.75",
        "request_inference_time_seconds_sum{%s} 2.75", "request_generation_tokens_sum{%s} 5.0",
        "request_max_num_generation_tokens_sum{%s} 5.0", "request_prefill_kv_computed_tokens_sum{%s} 1.0",
        "prompt_tokens_cached_total{%s} 250.0", "iteration_tokens_total_count{%s} 0.0",
        'iteration_tokens_total_bucket{engine="0",le="16.0",model_name="m"} 0.0',
        "inter_token_latency_seconds_sum{%s} 0.0", 'num_requests_waiting_by_reason{%s,reason="capacity"} 2.0',
        'prompt_tokens_by_source_total{%s,source="local_compute"} 750.0',
        'prompt_tokens_by_source_total{%s,source="local_cache_hit"} 250.0',
        "request_params_n_sum{%s} 2.0", "request_params_max_tokens_sum{%s} 7.0",
        'cache_config_info{block_size="16",%s} 1.0',
    ):  # fmt: skip
        assert "vllm:" + line.replace("%s", labels) in lines, line
    # The engine's counters are read when they are asked for.
    stats.update(num_running=0, num_used_blocks=0, num_free_blocks=0)
    assert [value(metrics, name) for name in ("num_requests_running", "kv_cache_usage_perc")] == [0, 0]


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    metrics = Metrics(lambda: STATS | HOST_STATS, "m", {})
    observe(metrics, output(2, times=RequestMetrics(0.0, 0.1, 0.2, 0.3)))
    metrics.count_error("timeout_error")
    rendered = {name for name, _ in samples(metrics) if not name.endswith("_created")}
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    shown = {name for expression in expressions for name in re.findall(r"(?:nanovllm_|vllm:)\w+", expression)}
    assert shown and shown <= rendered
    series = re.compile(r"_(bucket|sum|count)$")
    names, all_names = ({series.sub("", name) for name in some} for some in (shown, rendered))
    # Settings, and what other metrics say as well.
    assert all_names - names == {
        "vllm:cache_config_info",
        "vllm:prefix_cache_queries_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:request_max_num_generation_tokens",
    }
