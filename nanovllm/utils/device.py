"""Resolves the device and dtype settings, and copies; calls the CUDA driver for what torch does not offer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class DeviceInfo:
    """The device of an engine, of several ranks the first's, with the dtype of weights and KV cache there."""

    device: torch.device
    dtype: torch.dtype
    name: str


def resolve_device(name: str, rank: int = 0, size: int = 1) -> torch.device:
    """Return the device of a rank; "auto" is CUDA if available, else the CPU. ValueError if there is none.

    Several ranks use consecutive CUDA devices, starting at the named one, or at 0.
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


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Queue a copy of a host's tensor to a device, through pinned memory; on the CPU return the tensor itself."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the host; on the CPU return the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *args: Any) -> None:
    """Call a driver function; the thread must have used the current device. An error is a RuntimeError."""
    error = getattr(_driver(), name)(*args)
    if error:
        raise RuntimeError(f"{name} failed with CUDA error {error} on cuda:{torch.cuda.current_device()}")
