"""Loads weights into the model that one rank runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch

from nanovllm.distributed.communicator import Communicator
from nanovllm.models.adapter import is_adapter
from nanovllm.models.base import CausalLM
from nanovllm.models.live_weights import LiveWeights, update_weights, warn_of_nans
from nanovllm.runner.messages import LoadedWeights, LoadFailedError, MissingWeights


class RunnerWeights:
    """One rank's weights, and their way to it.

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

    def load(self, weights: str | Iterable[tuple[str, torch.Tensor]], strict: bool) -> LoadedWeights:
        """Write tensors; see `WeightsRunner`. For one rank alone."""
        if isinstance(weights, str) and is_adapter(weights):
            count = self.live.check_adapter(weights)
            self.merge_adapter(weights)
        elif isinstance(weights, str):
            with self.checked_folder(weights, strict) as count:
                self.write_folder(weights)
        else:
            count = update_weights(self.live, weights, self.write, strict=strict)
        warn_of_nans(self.take_nans())
        return LoadedWeights(count, self.missing())

    @contextmanager
    def checked_folder(self, folder: str, strict: bool) -> Iterator[int]:
        """Check a folder on rank 0; yields its number of tensors, which every rank writes inside the `with` block."""
        count, targets = self.live.check_folder(folder, strict)
        missing = self.live.missing | targets
        try:
            yield count
        except Exception as error:
            self.live.missing = missing
            raise LoadFailedError(str(error), self.missing()) from error

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

    def take_adapter_out(self) -> bool:
        """See `LiveWeights`."""
        with torch.inference_mode(), self._device_guard():
            return self.live.take_adapter_out()

    def take_nans(self) -> list[str]:
        """See `LiveWeights`."""
        with torch.inference_mode(), self._device_guard():
            return self.live.take_nans()

    def missing(self) -> MissingWeights:
        """Return what a sleep has dropped, and nothing has brought again."""
        missing = self.live.missing
        return MissingWeights(len(missing), str(min(missing)) if missing else "")

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


class WeightsHolder(ABC):
    """The methods of a runner of one rank that change its weights; see `WeightsRunner`."""

    model: CausalLM
    communicator: Communicator
    device: torch.device

    @abstractmethod
    def _device_guard(self) -> AbstractContextManager[Any]:
        """Make the device and the stream of the steps current."""

    @cached_property
    def weights(self) -> RunnerWeights:
        """Loads weights into the model that runs."""
        return RunnerWeights(self.model, self.communicator, self.device, self._device_guard)

    def load_weights(self, weights: Any, strict: bool) -> LoadedWeights:
        """Write tensors into the model."""
        return self.weights.load(weights, strict)

    def unload_adapter(self) -> bool:
        """Restore the weights that an adapter has changed."""
        return self.weights.take_adapter_out()
