"""The processes of a test's Ray actors."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from uuid import uuid4

MARK = os.environ.get("NANOVLLM_TEST", uuid4().hex)
"""Marks the environment of this test's processes, Ray's included, to tell them from other tests' processes."""


def inherited_environment() -> dict[str, str]:
    """Return what the environment must have before Ray starts: its processes then import this package, too."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"NANOVLLM_TEST": MARK, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def actor_times() -> dict[int, int]:
    """Return the CPU time of each of this run's actors whose engine has started, by process, in ticks."""
    times = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes()
            is_ready = b"ray::" in title and b"EngineActor" in title and b"__init__" not in title
            if is_ready and MARK.encode() in (process / "environ").read_bytes():
                times[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[11])
        except (OSError, ProcessLookupError):
            continue
    return times


def wait_for_actors(number: int) -> dict[int, int]:
    """Wait until the engines of `number` actors have started, and return the actors' CPU times."""
    while len(times := actor_times()) < number:
        time.sleep(0.02)
    return times


def kill_computing_actor(number: int) -> int:
    """Kill the first of `number` actors that computes something, and return its process id."""
    started = wait_for_actors(number)
    while True:
        for process, ticks in actor_times().items():
            if ticks > started.get(process, ticks) + 20:
                os.kill(process, signal.SIGKILL)
                return process
        time.sleep(0.02)
