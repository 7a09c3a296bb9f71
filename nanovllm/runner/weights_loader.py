"""Loads weights into every rank of an engine: what fails in its middle is told, with what it has left undone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

from nanovllm.distributed.communicator import Communicator
from nanovllm.models.adapter import is_adapter
from nanovllm.models.base import CausalLM
from nanovllm.models.live_weights import weight_pair
from nanovllm.quantization.loading import WeightTarget
from nanovllm.runner.messages import LoadedWeights, LoadFailedError
from nanovllm.runner.runner_weights import RunnerWeights


@contextmanager
def counted(written: Sized) -> Iterator[None]:
    """If the `with` block raises, say how many tensors it had written.

    Raises:
        ValueError, LoadFailedError: the block raised it.
        RuntimeError: it raised another error, such as that of the iterator which brings the tensors.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; {len(written)} tensors were written before") from error
    except LoadFailedError as error:
        raise LoadFailedError(f"{error}; {len(written)} tensors were written before", error.missing) from error
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"the weights end with {cause}; {len(written)} tensors were written before") from error


class WeightsLoader:
    """Rank 0's way to the weights of every rank; see `WeightsRunner`.

    Args:
        own: rank 0's, which say what fits, and what is missing.
        call: calls a method of every rank's runner, and returns the results in rank order.
        write: puts a tensor where it goes, on every rank.
    """

    def __init__(
        self, own: RunnerWeights, call: Callable[..., list[Any]], write: Callable[[str, torch.Tensor], None]
    ) -> None:
        self._own = own
        self._live = own.live
        self._call = call
        self._write = write

    def load(self, weights: str | Iterable[tuple[str, torch.Tensor]], strict: bool) -> LoadedWeights:
        """Write tensors of a folder or of pairs, or merge an adapter."""
        if isinstance(weights, str) and is_adapter(weights):
            count = self._merge_adapter(weights)
        elif isinstance(weights, str):
            count = self._load_folder(weights, strict)
        else:
            count = self._load_pairs(weights, strict)
        nans = [name for names in self._call("weights.take_nans") for name in names]
        return LoadedWeights(count, self._own.missing(), list(dict.fromkeys(nans)))

    def unload_adapter(self) -> LoadedWeights:
        """Restore the weights that an adapter has changed; the count is of them."""
        return LoadedWeights(self._take_adapter_out(), self._own.missing())

    def _load_folder(self, folder: str, strict: bool) -> int:
        count, targets = self._live.check_folder(folder, strict)
        self._take_adapter_out()
        with self._left_undone("loading weights", targets):
            self._call("weights.write_folder", folder)
        return count

    def _load_pairs(self, weights: Iterable[tuple[str, torch.Tensor]], strict: bool) -> int:
        live, written = self._live, list[str]()
        with counted(written):
            for item in weights.items() if isinstance(weights, Mapping) else weights:
                name, tensor = weight_pair(item)
                if live.check(name, tensor):
                    live.check_values(name, tensor)
                    self._write_pair(name, tensor)
                    written.append(name)
            if strict:
                live.check_whole({target for name in written for target in live.targets(name)})
        return len(written)

    def _write_pair(self, name: str, tensor: torch.Tensor) -> None:
        if self._live.adapter_targets:
            self._take_adapter_out()
        with self._left_undone(f"writing {name!r}", set(self._live.targets(name))):
            self._write(name, tensor)

    @contextmanager
    def _left_undone(self, what: str, targets: set[WeightTarget]) -> Iterator[None]:
        """If the `with` block raises, these weights are missing until they are loaded."""
        try:
            yield
        except Exception as error:
            self._live.missing |= targets
            raise LoadFailedError(f"{what} has failed in its middle: {error}", self._own.missing()) from error

    def _merge_adapter(self, folder: str) -> int:
        count, targets = self._live.check_adapter(folder)
        # Other ranks may change more of them than this one, and may not take out the adapter before.
        changed = self._live.adapter_targets | targets
        try:
            self._call("weights.merge_adapter", folder)
        except Exception as error:
            self._live.half_merged = changed
            failure = f"merging an adapter has failed: {error}"
            try:
                self._take_adapter_out()
            except LoadFailedError as again:
                raise LoadFailedError(f"{failure}; {again}", again.missing) from error
            raise LoadFailedError(f"{failure}; the weights are those without one", self._own.missing()) from error
        return count

    def _take_adapter_out(self) -> int:
        """Restore, on every rank, the weights that an adapter has changed, and return how many."""
        changed = self._live.adapter_targets
        try:
            counts = self._call("weights.take_adapter_out")
        except Exception as error:
            self._live.half_merged = changed
            cause = f"taking an adapter out has failed in its middle: {error}"
            raise LoadFailedError(cause, self._own.missing()) from error
        self._live.half_merged = set()
        # Of ranks some may have restored theirs in a call before, which failed on another.
        return max(counts)


class WeightsChanger(ABC):
    """The methods of a runner that change the model's weights; see `WeightsRunner`."""

    @property
    @abstractmethod
    def _loader(self) -> WeightsLoader:
        """The way to the weights of every rank."""

    def load_weights(self, weights: Any, strict: bool) -> LoadedWeights:
        """Write tensors into the model; each rank reads a folder by itself."""
        return self._loader.load(weights, strict)

    def unload_adapter(self) -> LoadedWeights:
        """Restore the weights that an adapter has changed."""
        return self._loader.unload_adapter()


class WeightsHolder(WeightsChanger):
    """A runner of one rank, with its weights."""

    model: CausalLM
    communicator: Communicator
    device: torch.device

    @abstractmethod
    def _device_guard(self) -> AbstractContextManager[Any]:
        """Make the device and the stream of the steps current."""

    @cached_property
    def weights(self) -> RunnerWeights:
        """This rank's weights."""
        return RunnerWeights(self.model, self.communicator, self.device, self._device_guard)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank's runner, which are this one; see `ParallelRunner`."""
        return [attrgetter(method)(self)(*args)]

    @property
    def _loader(self) -> WeightsLoader:
        return WeightsLoader(self.weights, self.call, self.weights.write)
