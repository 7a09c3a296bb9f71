"""The timeline of an engine's steps and requests."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from nanovllm import SamplingParams
from nanovllm.engine.llm_engine import LLMEngine
from tests.mock_runner import make_engine


def traced(engine: LLMEngine, file: Path) -> dict[str, list[dict[str, Any]]]:
    """Run an engine's requests; return the timeline's events by phase."""
    with engine.trace(file):
        while not engine.is_finished():
            engine.step()
    phases = defaultdict(list)
    for event in json.loads(file.read_text())["traceEvents"]:
        phases[event["ph"]].append(event)
    return phases


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_and_the_life_of_requests(depth: int, tmp_path: Path) -> None:
    # The second request, whose blocks are taken in turn, is preempted.
    engine, runner = make_engine(pipeline_depth=depth, num_blocks=6, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    ids = [engine.add_request([number] * 17, params) for number in (1, 2)]
    phases = traced(engine, tmp_path / "run.json")
    assert {event["args"]["name"] for event in phases["M"]} == {"engine", "host", "device", "requests"}
    steps = [event for event in phases["X"] if event["tid"] == 2]
    # What runs past the ends of outputs is a step as well.
    assert [event["name"] for event in steps] == [f"step {batch.number}" for batch in runner.batches]
    assert [event["args"]["decodes"] for event in steps] == [len(batch.decode_slots) for batch in runner.batches]
    assert sum(event["args"]["preempted"] for event in steps) == engine.stats()["num_preemptions"] > 0
    ends = [0.0, *(event["ts"] + event["dur"] for event in steps)]
    assert all(event["ts"] >= end and event["dur"] >= 0 for event, end in zip(steps, ends, strict=False))
    for event in steps:
        launch, wait = (e for e in phases["X"] if e["tid"] == 1 and e["name"].endswith(event["name"]))
        assert (
            launch["ts"] + launch["dur"] <= event["ts"] + 1e-3
            and wait["ts"] + wait["dur"] == ends[steps.index(event) + 1]
        )
    for request_id in ids:
        begins, closes = ([e for e in phases[phase] if e["id"] == request_id] for phase in "be")
        assert [event["name"] for event in begins] == ["queued", "prefill", "decode"]
        assert [event["ts"] for event in begins[1:]] == [event["ts"] for event in closes[:2]]
        assert all(begin["ts"] <= close["ts"] for begin, close in zip(begins, closes, strict=True))
        assert begins[-1]["args"] == {"request": request_id, "tokens": 57, "ended by": "length"}


def test_a_trace_ends_with_its_block_and_one_is_made_at_a_time(tmp_path: Path) -> None:
    engine, runner = make_engine(pipeline_depth=1)
    with engine.trace(tmp_path / "a.json"):
        with pytest.raises(ValueError, match="traced already"), engine.trace(tmp_path / "b.json"):
            pass
        assert engine.require_open() is not runner
    assert engine.require_open() is runner
    with pytest.raises(OSError, match="nowhere"), engine.trace(tmp_path / "nowhere" / "a.json"):
        pass
    # A request that has not ended is there up to now; an engine that is closed meanwhile stays closed.
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=9))
    with engine.trace(tmp_path / "c.json"):
        engine.step()
        engine.step()
        engine.exit()
    events = json.loads((tmp_path / "c.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "b"] == ["queued", "prefill", "decode"]
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()
