"""The timeline of an engine's steps and requests."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams, StepError
from nanovllm.client.trace import trace_engine
from nanovllm.engine.llm_engine import LLMEngine
from tests.mock_runner import make_engine

Event = dict[str, Any]


def rows_of(file: Path) -> dict[str, list[Event]]:
    """A timeline's events by the names of their rows; requests' events are given durations, too."""
    events = json.loads(file.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {names[1, 0], names[2, 0]} == {"engine", "requests"}
    rows, nested = defaultdict(list), defaultdict(list)
    requests: dict[int, str] = {}
    for event in events:
        if event["ph"] == "X":
            rows[names[event["pid"], event["tid"]]].append(event)
        elif event["ph"] == "b":
            row = requests.setdefault(event["id2"]["local"], event["name"])
            rows[row].append(event)
            nested[row].append(event)
        elif event["ph"] == "e":
            begin = nested[requests[event["id2"]["local"]]].pop()
            assert event["name"] == begin["name"]
            begin["dur"] = event["ts"] - begin["ts"]
    assert not any(nested.values())
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for row in rows.values() for event in row)
    return rows


def run(engine: LLMEngine) -> None:
    while not engine.is_finished():
        engine.step()


def end(event: Event) -> float:
    return round(event["ts"] + event["dur"], 3)


def phases(events: list[Event]) -> list[str]:
    """The names of a request's phases, which follow one another and fill its life."""
    life, *parts = events
    assert parts[0]["ts"] == life["ts"] and end(parts[-1]) == end(life)
    assert all(end(event) == following["ts"] for event, following in pairwise(parts))
    return [event["name"] for event in parts]


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_and_the_life_of_requests(depth: int, tmp_path: Path) -> None:
    # The second request, whose blocks are taken in turn, is preempted.
    engine, runner = make_engine(pipeline_depth=depth, num_blocks=6, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    ids = [engine.add_request([number] * 17, params) for number in (1, 2)]
    with trace_engine(engine, tmp_path / "run.json"):
        run(engine)
    rows = rows_of(tmp_path / "run.json")
    steps = rows["device"]
    # What runs past the ends of outputs is a step as well.
    assert [event["name"] for event in steps] == [f"step {batch.number}" for batch in runner.batches]
    assert [event["args"]["decodes"] for event in steps] == [len(batch.rows) for batch in runner.batches]
    assert sum(event["args"]["preempted"] for event in steps) == engine.stats()["num_preemptions"] > 0
    assert all(end(event) <= following["ts"] + 0.01 for event, following in pairwise(steps))
    for event in steps:
        launch, wait = (e for e in rows["host"] if e["name"].endswith(event["name"]))
        assert end(launch) <= event["ts"] + 0.01 and end(wait) == pytest.approx(end(event), abs=0.01)
    for request_id in ids:
        events = rows[f"request {request_id}"]
        assert phases(events) == ["queued", "prefill", "decode"]
        assert events[0]["args"] == {"prompt tokens": 17, "tokens": 57, "ended by": "length"}


def test_drafts_and_accepted_ones_are_shown(tmp_path: Path) -> None:
    engine, runner = make_engine(pipeline_depth=1, num_blocks=40, num_drafts=3)
    engine.add_request(list(range(9)), SamplingParams(0, 30, ignore_eos=True))
    with trace_engine(engine, tmp_path / "run.json"):
        run(engine)
    steps = [event["args"] for event in rows_of(tmp_path / "run.json")["device"]]
    assert [step["drafts"] for step in steps] == [int((b.rows.num_new - 1).sum()) for b in runner.batches]
    accepted = [step["accepted drafts"] for step in steps if step["drafts"]]
    assert sum(accepted) > 5 and all(0 <= n <= 3 for n in accepted) and len(set(accepted)) > 1
    assert all("accepted drafts" not in step for step in steps if not step["drafts"])


def test_requests_that_began_before_or_end_early(tmp_path: Path) -> None:
    engine, runner = make_engine(pipeline_depth=1, num_blocks=40, max_num_seqs=4, max_num_batched_tokens=16)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    early = engine.add_request([1, 2], params)
    engine.step()
    engine.step()
    with trace_engine(engine, tmp_path / "run.json"):
        twice = engine.add_request([3, 4], replace(params, n=2))
        engine.step()
        long, waiting = engine.add_request([5] * 40, params), engine.add_request([6], params)
        engine.step()
        engine.abort([waiting, long])
        run(engine)
        failing = engine.add_request([7], params)
        runner.fail_result = True
        with pytest.raises(StepError):
            run(engine)
    rows = rows_of(tmp_path / "run.json")
    assert phases(rows[f"request {early}"]) == ["decode"] and rows[f"request {early}"][0]["ts"] == 0
    assert phases(rows[f"request {twice}"]) == ["queued", "prefill", "decode"]
    assert phases(rows[f"request {twice + 1}, output 1"]) == ["queued", "prefill", "decode"]
    assert phases(rows[f"request {waiting}"]) == ["queued"]
    for request_id in long, failing:
        assert phases(rows[f"request {request_id}"]) == ["queued", "prefill"]
        assert rows[f"request {request_id}"][0]["args"]["ended by"] == "abort"
    assert [event["args"].get("failed", 0) for event in rows["device"]][-1] == 1


def test_one_trace_at_a_time_until_its_block_ends(tmp_path: Path) -> None:
    engine, runner = make_engine(pipeline_depth=1)
    with trace_engine(engine, tmp_path / "a.json"):
        with pytest.raises(ValueError, match="traced already"), trace_engine(engine, tmp_path / "b.json"):
            pass
        assert engine.require_open() is not runner
    assert engine.require_open() is runner
    with pytest.raises(OSError, match="nowhere"), trace_engine(engine, tmp_path / "nowhere" / "a.json"):
        pass
    # A request that has not ended is there up to now; an engine that is closed meanwhile stays closed.
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=9))
    with trace_engine(engine, tmp_path / "c.json"):
        engine.step()
        engine.step()
        engine.exit()
    assert phases(rows_of(tmp_path / "c.json")["request 0"]) == ["queued", "prefill", "decode"]
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()
