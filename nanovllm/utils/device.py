"""Resolve the device and dtype settings, and size the cache of a CPU."""

from __future__ import annotations

import os

import torch

_CPU_MEMORY_SHARE = 0.1
_CPU_MEMORY_LIMIT = 2**30


def resolve_device(name: str, rank: int = 0, size: int = 1) -> torch.device:
    """Return the device of a rank; "auto" is CUDA if available, else the CPU.

    Several ranks use consecutive CUDA devices, starting with the named one, or with 0.

    Raises:
        ValueError: the device is unknown, or there are too few CUDA devices.
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
    """Return the dtype of a setting; "auto" is the checkpoint's on CUDA and float32 on the CPU."""
    if name == "auto":
        name = checkpoint if is_cuda else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def cpu_cache_budget() -> int:
    """Return the bytes for a KV cache in host memory: a tenth of the free memory, at most 1 GiB."""
    # Windows has no `sysconf`.
    if not hasattr(os, "sysconf"):
        return _CPU_MEMORY_LIMIT
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * _CPU_MEMORY_SHARE), _CPU_MEMORY_LIMIT)
