"""Counts GPUs without importing torch, which takes seconds, for processes that only start others."""

from __future__ import annotations

import ctypes
from importlib.metadata import version


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
