"""Pictures of a run: a plot of the engine's counters, and a timeline of its steps and requests.

The timeline is in Chrome's trace event format, which ui.perfetto.dev opens. During recording, the engine's runner is
one that records times; otherwise this code does not run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any, cast

import numpy as np

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stats import StatsSample
from nanovllm.runner.messages import Runner, ScheduledBatch, StepHandle, StepOutput
from nanovllm.utils.display import install_hint

# Process numbers in Chrome's format, and threads of the first.
_ENGINE, _REQUESTS = 1, 2
_HOST, _DEVICE = 1, 2
_COLORS = "#3b6fb6", "#c46a2b"


def plot_stats(samples: list[StatsSample], file: str | os.PathLike[str]) -> None:
    """Plot batch size, cache use and tokens per second over time; the extension of the file sets its format.

    samples: oldest first. ImportError without matplotlib.
    """
    try:
        # Not pyplot, which would choose a GUI backend.
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(f"plot_stats needs matplotlib: {install_hint('plot')}") from error
    figure = Figure(figsize=(8, 6), layout="constrained")
    batch, cache, rate = figure.subplots(3, sharex=True)
    times = [sample.time for sample in samples]
    # A sample is valid until the next.
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


def token_rates(samples: list[StatsSample], counter: str) -> list[float]:
    """Return the tokens per second between each sample and the next, by the counter of this name."""
    return [(getattr(b, counter) - getattr(a, counter)) / max(b.time - a.time, 1e-9) for a, b in pairwise(samples)]


@dataclass
class _Step:
    """A step under way or ended: its contents, and its times on the monotonic clock, in seconds."""

    batch: dict[str, int]
    number: int
    began: float
    # From the traced runner's `forward`.
    inner: Any
    handle: StepHandle | None = None
    launched: float = 0.0
    asked: float = 0.0
    ended: float = 0.0

    def result(self) -> StepOutput:
        """Wait for the step; see `StepHandle`."""
        assert self.handle is not None
        self.asked = time.monotonic()
        try:
            output = self.handle.result()
            if output.offsets is not None:
                self.batch["accepted drafts"] = int(output.offsets[-1]) - len(output.offsets) + 1
            return output
        except BaseException:
            self.batch["failed"] = 1
            raise
        finally:
            # A trace keeps no outputs.
            self.inner = self.handle = None
            self.ended = time.monotonic()


class TracedRunner:
    """A runner whose steps are recorded, and the requests in them; all else is the `runner`'s, see `Runner`."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self._scheduler = scheduler
        self._num_preemptions = scheduler.stats.num_preemptions
        self._steps: list[_Step] = []
        self._seqs = {seq.seq_id: seq for seq in list(scheduler.sequences)}
        self._began = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def forward(self, batch: ScheduledBatch) -> _Step:
        """Record a step being launched, and the requests that arrived since the previous one."""
        preempted, self._num_preemptions = self._num_preemptions, self._scheduler.stats.num_preemptions
        what = {
            "decodes": len(batch.rows),
            "chunks": len(batch.chunks),
            "prompt tokens": batch.num_chunk_tokens,
            "new requests": len(batch.new_requests),
            "preempted": self._num_preemptions - preempted,
        }
        if self.num_drafts:
            what["drafts"] = int(batch.rows.num_new.sum()) - len(batch.rows)
        # The newest are last.
        for seq in reversed(self._scheduler.sequences):
            if seq.seq_id in self._seqs:
                break
            self._seqs[seq.seq_id] = seq
        began = time.monotonic()
        step = _Step(what, batch.number, began, self.runner.forward(batch))
        self._steps.append(step)
        return step

    def sample(self, step: _Step, masks: np.ndarray | None = None) -> StepHandle:
        """Record when a step's sampling is launched."""
        step.handle = self.runner.sample(step.inner, masks)
        step.launched = time.monotonic()
        return step

    def write(self, file: IO[str]) -> None:
        """Write the recording as JSON."""
        events = [_name(_ENGINE, 0, "engine"), _name(_ENGINE, _HOST, "host"), _name(_ENGINE, _DEVICE, "device")]
        before: _Step | None = None
        for step in (step for step in self._steps if step.ended):
            events += self._step_events(step, before)
            before = step
        events.append(_name(_REQUESTS, 0, "requests"))
        # Another thread may still drive the engine.
        for seq_id in sorted(self._seqs):
            events += self._request_events(self._seqs[seq_id])
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def _step_events(self, step: _Step, before: _Step | None) -> list[dict[str, Any]]:
        name = f"step {step.number}"
        # The device runs steps in order. If no call waits for a step's end, it ended a little earlier.
        starts = step.launched if before is None else max(step.launched, before.ended)
        return [
            self._slice(_HOST, "launch " + name, step.began, step.launched) | {"args": step.batch},
            self._slice(_HOST, "wait for " + name, step.asked, step.ended),
            self._slice(_DEVICE, name, starts, step.ended) | {"args": step.batch},
        ]

    def _request_events(self, seq: Sequence) -> list[dict[str, Any]]:
        """Return the nested events of a request's life: the whole of it, and its phases."""
        times = seq.metrics
        total = time.monotonic() - times.arrival_time if times.total_time is None else times.total_time
        # An output that ends early, for example in the queue, has no more phases.
        ends = [end for end in (times.queue_time, times.time_to_first_token) if end is not None] + [total]
        starts = [times.arrival_time + start for start in (0.0, *ends)]
        name = f"request {seq.seq_id}" + (f", output {seq.index}" if seq.index else "")
        args = {"prompt tokens": seq.num_prompt_tokens, "tokens": len(seq.token_ids), "ended by": seq.finish_reason}
        begin, finish = self._nested(seq.seq_id, name, starts[0], starts[-1])
        events = [begin | {"args": args}]
        for phase, start, end in zip(("queued", "prefill", "decode"), starts, starts[1:], strict=False):
            if end > self._began:
                events += self._nested(seq.seq_id, phase, start, end)
        return [*events, finish]

    def _nested(self, row: int, name: str, start: float, end: float) -> list[dict[str, Any]]:
        event = {"name": name, "cat": "request", "id2": {"local": row}, "pid": _REQUESTS, "tid": 0}
        return [event | {"ph": phase, "ts": self._micros(at)} for phase, at in (("b", start), ("e", end))]

    def _slice(self, row: int, name: str, start: float, end: float) -> dict[str, Any]:
        ts, end_ts = self._micros(start), self._micros(end)
        return {"name": name, "ph": "X", "pid": _ENGINE, "tid": row, "ts": ts, "dur": round(end_ts - ts, 3)}

    def _micros(self, seconds: float) -> float:
        """Return a time as microseconds since the trace began; earlier times become 0."""
        return round(max(0.0, seconds - self._began) * 1e6, 3)


def _name(process: int, row: int, name: str) -> dict[str, Any]:
    """Return the event that names a row, or the process if it is 0."""
    kind = "thread_name" if row else "process_name"
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}


@contextmanager
def trace_engine(engine: LLMEngine, file: str | os.PathLike[str]) -> Iterator[None]:
    """Write a timeline of what an engine runs inside the `with` block, as JSON; see `LLM.trace`."""
    runner = engine.require_open()
    if isinstance(runner, TracedRunner):
        raise ValueError("the engine is traced already, by a trace that has not ended")
    traced = TracedRunner(runner, engine.scheduler)
    with open(file, "w", encoding="utf-8") as opened:
        engine.replace_runner(cast("Runner", traced))
        try:
            yield
        finally:
            engine.replace_runner(runner)
            traced.write(opened)
