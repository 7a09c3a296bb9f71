"""Living ranks, engines and front ends that a process has started, as the system lists them."""

from __future__ import annotations

import os
from pathlib import Path

from tests.forked_python import started


def rank_pids(starter: int | None = None) -> dict[int, int]:
    """Process ids of the living ranks that a process, this one by default, has started, by rank."""
    return _pids("rank", starter)


def engine_pids(starter: int | None = None) -> dict[int, int]:
    """Process ids of the living engines that a process has started, by replica."""
    return _pids("engine", starter)


def front_end_pids(starter: int) -> dict[int, int]:
    """Process ids of a server's living front ends, by index."""
    return _pids("front end", starter)


def _pids(kind: str, starter: int | None) -> dict[int, int]:
    pids = {}
    for process in started[:] if starter is None else ():
        if process.title.startswith(f"nanovllm {kind} ") and process.poll() is None:
            pids[int(process.title.split()[-1])] = process.pid
    for folder in Path("/proc").iterdir():
        try:
            # A process that exits meanwhile leaves no folder.
            arguments = (folder / "cmdline").read_text().rstrip("\0").split("\0")
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, UnicodeDecodeError):
            continue
        if arguments[-1].startswith(f"nanovllm {kind} ") and parent == (starter or os.getpid()):
            pids[int(arguments[-1].split()[-1])] = int(folder.name)
    return pids
