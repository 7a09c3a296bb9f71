"""The device on which one rank's steps run, and their stream."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch


class OnDevice:
    """The methods of a runner that concern only its device; see `Runner`."""

    device: torch.device
    is_cuda: bool

    def check(self) -> None:
        """Raise if launched work has failed, without waiting."""
        if self.is_cuda:
            self._stream.query()

    def synchronize(self) -> None:
        """Wait for all launched work; raises if the device is lost."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def _device_guard(self) -> AbstractContextManager[Any]:
        """Make the device and one stream of it current: Triton launches there, whatever its arguments' device.

        Steps are ordered by their stream, and the caller's may change between two of them.
        """
        return torch.cuda.stream(self._stream) if self.is_cuda else nullcontext()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.default_stream(self.device)
