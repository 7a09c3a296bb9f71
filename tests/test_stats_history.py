"""The engine's counters over time, and their picture."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.client.trace import token_rates
from nanovllm.engine.stats import StatsHistory, StatsSample

STATS = {"num_running": 2, "num_waiting": 3, "num_used_blocks": 1, "num_free_blocks": 3}


def test_memory_is_bounded_and_samples_stay_even(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    history, calls = StatsHistory(interval=0.05, capacity=64), 0

    def stats() -> dict[str, int]:
        nonlocal calls
        calls += 1
        return {**STATS, "num_prompt_tokens": calls, "num_output_tokens": calls}

    for _ in range(100_000):
        history.sample_if_due(stats)
        now[0] += 0.01
    samples = history.samples(stats())
    assert 32 <= len(samples) <= 65
    assert samples[0].time == 0 and samples[-1].time == pytest.approx(1000)
    gaps = [b.time - a.time for a, b in pairwise(samples[:-1])]
    assert max(gaps) < 1.1 * min(gaps) and max(gaps) < 1000 / 30
    # At first every 50 ms, then less and less often: not at every step.
    assert calls < 64 * 12
    assert samples[3][1:4] == (2, 3, 0.25)


def test_an_engine_keeps_its_history(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.llm_engine._history = StatsHistory(interval=0.0)
    llm.generate([[1, 2, 3]] * 3, SamplingParams(0, 8, ignore_eos=True), use_tqdm=False)
    samples, stats = llm.stats_history(), llm.stats()
    assert samples[0].num_waiting == 3 and max(sample.num_running for sample in samples) == 3
    assert samples[0].num_output_tokens == 0 and samples[-1].num_output_tokens == stats["num_output_tokens"] == 24
    assert samples[-1].num_prompt_tokens == stats["num_prompt_tokens"] and samples[-1].num_running == 0
    assert 0 < max(sample.cache_use for sample in samples) <= 1
    assert all(b.time >= a.time for a, b in pairwise(samples))
    figure = pytest.importorskip("matplotlib.figure").Figure
    llm.plot_stats(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    figures: list[Any] = []
    monkeypatch.setattr(figure, "savefig", lambda drawn, *args, **options: figures.append(drawn))
    llm.plot_stats("")
    # A slope between two samples would show sequences that never were.
    lines = [line for axes in figures[0].axes[:2] for line in axes.get_lines()]
    assert [line.get_drawstyle() for line in lines] == ["steps-post"] * 3


def test_rates() -> None:
    later = StatsSample(3.0, 0, 0, 0.0, 6, 50)
    samples = [StatsSample(1.0, 0, 0, 0.0, 0, 10), later, later]
    assert token_rates(samples, "num_output_tokens") == [20, 0]
    assert token_rates(samples, "num_prompt_tokens") == [3, 0]


def test_without_matplotlib(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"nanovllm\[plot\]"):
        llm.plot_stats("x.png")
