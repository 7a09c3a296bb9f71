"""Results of changes to an engine's weights; plain data, without torch, for the engine and its clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class MissingWeights:
    """Number of weights that steps must wait for, and the name of one: a sleep dropped them, or a change failed."""

    count: int = 0
    example: str = ""


@dataclass(frozen=True)
class LoadedWeights:
    """Number of tensors written, the weights still missing, and the names of tensors with NaN."""

    count: int
    missing: MissingWeights
    nan_names: list[str] = field(default_factory=list)


class LoadFailedError(RuntimeError):
    """A change of weights failed half-way; no step runs until the `missing` ones, if any, are loaded."""

    def __init__(self, cause: str, missing: MissingWeights) -> None:
        # The original arguments, so that it pickles.
        super().__init__(cause, missing)
        self.missing = missing

    def __str__(self) -> str:
        return str(self.args[0])


class WeightsControl(Protocol):
    """Changes an engine's weights, and its memory, between two steps; see `WeightsLoader`, which needs torch."""

    @property
    def missing(self) -> MissingWeights:
        """The weights that steps must wait for."""

    def load(self, weights: Any, strict: bool) -> LoadedWeights:
        """Write tensors into the running model, or merge an adapter."""

    def unload_adapter(self) -> int:
        """Restore the weights that an adapter has changed, and return their number."""

    def sleep(self, keep_weights: bool, /) -> MissingWeights:
        """Release the memory of weights, cache and graphs; `keep_weights`: with a copy in host memory."""

    def wake_up(self, tags: list[str], /) -> None:
        """Allocate memory for "weights", with kept values, or for "kv_cache", empty; ignores tags that have memory.

        Once both have memory, and no weight is missing, the CUDA graphs are captured.
        """
