"""Resolves the device and dtype settings."""

from __future__ import annotations

import torch


def resolve_device(name: str, rank: int = 0, size: int = 1) -> torch.device:
    """Return the device of a rank; "auto" is CUDA if available, else the CPU.

    Several ranks use consecutive CUDA devices, starting at the named one, or at 0.

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
    """Return the dtype for a setting; "auto" is the checkpoint's on CUDA and float32 on the CPU."""
    if name == "auto":
        name = checkpoint if is_cuda else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def device_name(name: str, size: int = 1) -> str:
    """Return a readable name of a setting's devices, such as "2 x NVIDIA H200"; see `resolve_device`."""
    device = resolve_device(name, 0, size)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return kind if size == 1 else f"{size} x {kind}"
