"""Resolves the device and dtype settings, and calls the CUDA driver for what torch does not offer."""

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


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *args: Any) -> None:
    """Call a driver function; the thread must have used the current device. An error is a RuntimeError."""
    error = getattr(_driver(), name)(*args)
    if error:
        raise RuntimeError(f"{name} failed with CUDA error {error} on cuda:{torch.cuda.current_device()}")


class _Place(ctypes.Structure):
    """Source or destination in CUDA_MEMCPY3D."""

    _fields_ = (
        ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("z", ctypes.c_size_t), ("level", ctypes.c_size_t),
        ("memory_type", ctypes.c_int), ("host", ctypes.c_void_p), ("address", ctypes.c_uint64),
        ("array", ctypes.c_void_p), ("reserved", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class _Copy3D(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        ("source", _Place), ("destination", _Place),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("depth", ctypes.c_size_t),
    )  # fmt: skip


_HOST, _DEVICE = 1, 2
"""CU_MEMORYTYPE_HOST, pinned or pageable, and CU_MEMORYTYPE_DEVICE."""


def copy_rows(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy on the current stream with one call, done by copy engines without occupying multiprocessors.

    Args:
        destination, source: [rows, numbers] of one dtype, on the GPU or in host memory. With pageable memory the call
            returns after the copy. Rows are contiguous, and the row stride is a multiple of the row size.
    """
    rows, numbers = source.shape
    row_bytes = numbers * source.itemsize
    # One plane per row, whose height gives the row stride: with a 2D copy's pitch of over 2 GiB the driver would copy
    # rows one by one.
    from_place, to_place = (
        _Place(pitch=row_bytes, height=side.stride(0) // numbers, **_address(side)) for side in (source, destination)
    )
    copy = _Copy3D(source=from_place, destination=to_place, width=row_bytes, height=1, depth=rows)
    stream = torch.cuda.current_stream().cuda_stream
    call_driver("cuMemcpy3DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(stream))


def _address(side: torch.Tensor) -> dict[str, int]:
    if side.is_cuda:
        return {"memory_type": _DEVICE, "address": side.data_ptr()}
    return {"memory_type": _HOST, "host": side.data_ptr()}
