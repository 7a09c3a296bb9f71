"""The processes of a test's Ray actors."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

MARK = uuid4().hex
"""In the environment of this test's processes, so that they are told from those of others."""


def inherited_environment() -> dict[str, str]:
    """Return what the environment must have before Ray starts: its processes then import this package, too."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"NANOVLLM_TEST": MARK, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def actor_times() -> dict[int, int]:
    """The CPU time of each process of this run's actors, in ticks."""
    times = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_actor = b"ray::" in (title := (process / "cmdline").read_bytes()) and b"EngineActor" in title
            if is_actor and MARK.encode() in (process / "environ").read_bytes():
                times[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[11])
        except (OSError, ProcessLookupError):
            continue
    return times
