"""A timeline of an engine's steps and requests, in Chrome's trace event format, which ui.perfetto.dev opens.

While it is recorded, the engine's runner is wrapped in one that takes times; otherwise nothing of this runs.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.runner.messages import Handle, Runner, ScheduledBatch, StepOutput

_ENGINE, _REQUESTS = 1, 2
_HOST, _DEVICE = 1, 2


@dataclass
class _Step:
    """Times of one step on the monotonic clock, in seconds, and what is in it."""

    batch: dict[str, int]
    number: int
    began: float
    launched: float = 0.0
    asked: float = 0.0
    ended: float = 0.0


class Trace:
    """Records the steps that an engine runs, and the requests in them.

    Args:
        scheduler: the engine's.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_preemptions = scheduler.stats.num_preemptions
        self._steps: list[_Step] = []
        self._seqs: dict[int, Sequence] = {}
        self._began = time.monotonic()

    def begin_step(self, batch: ScheduledBatch) -> _Step:
        """Note a step that is being launched, and the requests whose prompts end in it."""
        preempted, self._num_preemptions = self._num_preemptions, self._scheduler.stats.num_preemptions
        what = {
            "decodes": len(batch.decode_slots),
            "chunks": len(batch.chunks),
            "prompt tokens": batch.num_prompt_tokens,
            "new requests": len(batch.new_requests),
            "preempted": self._num_preemptions - preempted,
        }
        for seq_id in batch.sampled_seq_ids[len(batch.decode_slots) :]:
            if (seq := self._scheduler.find(seq_id)) is not None:
                self._seqs[seq_id] = seq
        step = _Step(what, batch.number, time.monotonic())
        self._steps.append(step)
        return step

    def write(self, file: IO[str]) -> None:
        """Write what was recorded as JSON."""
        names = [(_ENGINE, None, "engine"), (_ENGINE, _HOST, "host"), (_ENGINE, _DEVICE, "device")]
        events = [_name(pid, tid, name) for pid, tid, name in [*names, (_REQUESTS, None, "requests")]]
        before: _Step | None = None
        for step in (step for step in self._steps if step.ended):
            events += self._step_events(step, before)
            before = step
        for seq in self._seqs.values():
            events += self._request_events(seq)
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def _step_events(self, step: _Step, before: _Step | None) -> list[dict[str, Any]]:
        name = f"step {step.number}"
        # The device does one step after the other. If nobody waits for the end of one, it was a little earlier.
        starts = step.launched if before is None else max(step.launched, before.ended)
        return [
            self._slice("launch " + name, _HOST, step.began, step.launched),
            self._slice("wait for " + name, _HOST, step.asked, step.ended),
            self._slice(name, _DEVICE, starts, step.ended) | {"args": step.batch},
        ]

    def _request_events(self, seq: Sequence) -> list[dict[str, Any]]:
        times = seq.metrics
        now = time.monotonic() - times.arrival_time
        ends = [now if end is None else end for end in (times.queue_time, times.time_to_first_token, times.total_time)]
        events, start = [], 0.0
        for name, end in zip(("queued", "prefill", "decode"), ends, strict=True):
            for phase, at in (("b", start), ("e", end)):
                event = {"name": name, "cat": "request", "ph": phase, "id": seq.seq_id, "pid": _REQUESTS, "tid": 1}
                events.append(event | {"ts": self._micros(times.arrival_time + at)})
            start = end
        events[-2]["args"] = {"request": seq.seq_id, "tokens": len(seq.token_ids), "ended by": seq.finish_reason}
        return events

    def _slice(self, name: str, tid: int, start: float, end: float) -> dict[str, Any]:
        duration = (end - start) * 1e6
        return {"name": name, "ph": "X", "pid": _ENGINE, "tid": tid, "ts": self._micros(start), "dur": duration}

    def _micros(self, seconds: float) -> float:
        return (seconds - self._began) * 1e6


def _name(pid: int, tid: int | None, name: str) -> dict[str, Any]:
    kind = "process_name" if tid is None else "thread_name"
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid or 0, "args": {"name": name}}


class TracedRunner:
    """A runner whose steps are recorded; see `Runner`."""

    def __init__(self, runner: Runner, trace: Trace) -> None:
        self.runner = runner
        self._trace = trace
        self.pipeline_depth = runner.pipeline_depth
        self.num_kvcache_blocks = runner.num_kvcache_blocks

    def forward(self, batch: ScheduledBatch) -> tuple[Any, _Step]:
        """See `Runner`."""
        times = self._trace.begin_step(batch)
        return self.runner.forward(batch), times

    def sample(self, step: tuple[Any, _Step], masks: np.ndarray | None = None) -> Handle:
        """See `Runner`."""
        inner, times = step
        handle = self.runner.sample(inner, masks)
        times.launched = time.monotonic()
        return _TracedHandle(handle, times)

    def synchronize(self) -> None:
        """See `Runner`."""
        self.runner.synchronize()

    def exit(self) -> None:
        """See `Runner`."""
        self.runner.exit()


@dataclass(frozen=True)
class _TracedHandle:
    handle: Handle
    times: _Step

    def result(self) -> StepOutput:
        self.times.asked = time.monotonic()
        output = self.handle.result()
        self.times.ended = time.monotonic()
        return output
