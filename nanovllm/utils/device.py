"""From the settings to torch's devices and dtypes, and what a CPU has to give."""

from __future__ import annotations

import os

import torch

_CPU_MEMORY_SHARE = 0.1
_CPU_MEMORY_LIMIT = 2**30


def resolve_device(name: str, rank: int = 0, size: int = 1) -> torch.device:
    """Turn the setting into a rank's device: "auto" takes CUDA if there is one.

    Several ranks take CUDA devices one after the other, from the one that is named or else from 0.

    Raises:
        ValueError: an unknown device, or more CUDA devices than there are.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', not {name!r}")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    first = int(index) if index else (torch.cuda.current_device() if count and size == 1 else 0)
    if first + size > count:
        ranks = f" with tensor_parallel_size={size}" if size > 1 else ""
        raise ValueError(f"device={name!r}{ranks}, but there are {count} CUDA devices")
    return torch.device("cuda", first + rank)


def resolve_dtype(name: str, checkpoint: str, is_cuda: bool) -> torch.dtype:
    """Turn the setting into a dtype: "auto" is the checkpoint's on CUDA and float32 on the CPU."""
    if name == "auto":
        name = checkpoint if is_cuda else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def cpu_cache_budget() -> int:
    """Bytes for caches in host memory: a tenth of what is free, at most 1 GiB."""
    # Windows has no such call.
    if not hasattr(os, "sysconf"):
        return _CPU_MEMORY_LIMIT
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * _CPU_MEMORY_SHARE), _CPU_MEMORY_LIMIT)
