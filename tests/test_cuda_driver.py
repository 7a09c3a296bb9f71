"""What the CUDA driver is asked for, by one that does it in the CPU's memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm.utils import device


def place(end: Any, plane: int) -> int:
    """Return the address of a plane's first row, by the rules of CUDA_MEMCPY3D."""
    return int(end.host + ((end.z + plane) * end.height + end.y) * end.pitch + end.x)


def copy_3d(pointer: Any, stream: ctypes.c_void_p) -> int:
    copy = pointer._obj
    assert ctypes.sizeof(copy) == 200 and stream.value == 7 and copy.height == 1
    assert all(end.memory_type == 1 for end in (copy.source, copy.destination))
    for plane in range(copy.depth):
        ctypes.memmove(place(copy.destination, plane), place(copy.source, plane), copy.width)
    return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A driver, and a stream of the number 7."""
    driver = SimpleNamespace(cuMemcpy3DAsync_v2=copy_3d)
    monkeypatch.setattr(device, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return driver


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_rows_go_where_they_belong(driver: SimpleNamespace, dtype: torch.dtype) -> None:
    blocks = torch.arange(3 * 5 * 4).to(dtype).view(3, 5, 4)
    content, before = torch.zeros(3, 4, dtype=dtype), blocks.clone()
    device.copy_rows(content, blocks[:, 2])
    assert torch.equal(content, before[:, 2])
    device.copy_rows(blocks[:, 4], content)
    before[:, 4] = before[:, 2]
    assert torch.equal(blocks, before)


def test_a_refusal_is_an_error(driver: SimpleNamespace) -> None:
    driver.cuMemcpy3DAsync_v2 = lambda *_: 700
    with pytest.raises(RuntimeError, match="cuMemcpy3DAsync_v2 failed with CUDA error 700 on cuda:1"):
        device.copy_rows(torch.zeros(2, 3), torch.zeros(2, 3))
