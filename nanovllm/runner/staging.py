"""One packed copy a step from the host to the device."""

from __future__ import annotations

import numpy as np
import torch


class Staging:
    """Pinned buffers on the host, and where they are copied to.

    Two host buffers take turns, so that one is filled while the other may still be read; an event guards each.

    Args:
        capacity: most int32 elements of a step.
        device: where they go.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._device_buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._host_buffers = [torch.empty(capacity, dtype=torch.int32, pin_memory=self.is_cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if self.is_cuda else []
        self._turn = 0

    def send(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        """Copy int32 arrays to the device in one non-blocking copy; returns views, valid until the next call."""
        lengths = [len(part) for part in parts]
        total = sum(lengths)
        views = self._device_buffer[:total].split(lengths)
        if total:
            self._turn ^= 1
            if self.is_cuda:
                self._copied[self._turn].synchronize()
            host = self._host_buffers[self._turn][:total]
            np.concatenate(parts, out=host.numpy())
            self._device_buffer[:total].copy_(host, non_blocking=True)
            if self.is_cuda:
                self._copied[self._turn].record()
        return list(views)
