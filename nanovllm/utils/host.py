"""Reads the host's resources: free memory, and GPUs without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes
import os
from importlib.metadata import version
from pathlib import Path

_GIB = 2**30


def check_swap_space(swap_space: float, num_engines: int = 1) -> None:
    """Raise a `ValueError` unless the host has this number of free GiB for each engine."""
    if swap_space and num_engines * swap_space * _GIB > (free := available_memory()):
        each = f" for each of {num_engines} engines" if num_engines > 1 else ""
        raise ValueError(
            f"swap_space={swap_space} GiB{each} is more than the {free / _GIB:.2f} GiB of memory that are free"
        )


def available_memory() -> int:
    """Return the bytes that this process can allocate without swapping, within its control group's limit."""
    if not hasattr(os, "sysconf"):
        raise ValueError("swap_space needs Linux or macOS, not Windows")
    info = Path("/proc/meminfo")
    if info.exists():
        lines = (line.split() for line in info.read_text().splitlines())
        free = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    if (limit := group / "memory.max").exists() and (most := limit.read_text().strip()) != "max":
        # File pages are reclaimed when memory is needed.
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stats["inactive_file"])
        free = min(free, int(most) - used)
    return max(0, free)


def num_gpus() -> int:
    """Return the number of GPUs that `CUDA_VISIBLE_DEVICES` allows (CUDA Driver API)."""
    if version("torch").endswith("+cpu"):
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        # No driver is installed.
        return 0
    count = ctypes.c_int()
    # Without a GPU the driver cannot be initialised.
    has_failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if has_failed else count.value
