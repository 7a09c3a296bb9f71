"""The weights of the model that one rank runs, and their way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch

from nanovllm.distributed.communicator import Communicator
from nanovllm.models.base import CausalLM
from nanovllm.models.live_weights import LiveWeights
from nanovllm.runner.messages import MissingWeights


class RunnerWeights:
    """One rank's weights; `WeightsLoader` calls them on every rank.

    Args:
        model: filled before.
        communicator: joins the ranks.
        device: of the model.
        device_guard: makes the device and the stream of the steps current.

    Attributes:
        live: the weights.
    """

    def __init__(
        self,
        model: CausalLM,
        communicator: Communicator,
        device: torch.device,
        device_guard: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.live = LiveWeights(model, device)
        self._communicator = communicator
        self._device = device
        self._device_guard = device_guard

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor of rank 0's, which its `live.check` has passed, on every rank: the others `receive` it."""
        with torch.inference_mode(), self._after_the_caller():
            given = tensor
            if self._communicator.size > 1:
                given = self._communicator.broadcast(tensor.to(self._device))
            self.live.write(name, given)

    def receive(self, name: str, shape: list[int], dtype: torch.dtype) -> None:
        """Write a tensor that rank 0 sends."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self.live.check(name, tensor)
        self.write(name, tensor)

    def write_folder(self, folder: str) -> None:
        """Write the tensors of a folder, which `live.check_folder` has passed on rank 0."""
        with torch.inference_mode(), self._device_guard():
            self.live.write_folder(folder)

    def merge_adapter(self, folder: str) -> None:
        """See `LiveWeights`."""
        with torch.inference_mode(), self._device_guard():
            self.live.merge_adapter(folder)

    def take_adapter_out(self) -> int:
        """See `LiveWeights`."""
        with torch.inference_mode(), self._device_guard():
            return self.live.take_adapter_out()

    def take_nans(self) -> list[str]:
        """See `LiveWeights`."""
        with torch.inference_mode(), self._device_guard():
            return self.live.take_nans()

    def missing(self) -> MissingWeights:
        """Return what a sleep has dropped, and nothing has brought again; or what has parts of an adapter."""
        missing = self.live.missing or self.live.half_merged
        example = str(min(missing)) if missing else ""
        return MissingWeights(len(missing), example, is_half_merged=bool(missing) and not self.live.missing)

    @contextmanager
    def _after_the_caller(self) -> Iterator[None]:
        """Work on the stream of the steps, after what the caller's has queued, which waits for it in turn."""
        if self._device.type != "cuda":
            yield
            return
        callers, own = torch.cuda.current_stream(self._device), self._own_stream
        if own == callers:
            with torch.cuda.device(self._device):
                yield
            return
        with self._device_guard():
            own.wait_stream(callers)
            yield
            callers.wait_stream(own)

    @cached_property
    def _own_stream(self) -> torch.cuda.Stream:
        with self._device_guard():
            return torch.cuda.current_stream(self._device)
