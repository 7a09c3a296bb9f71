"""Specs of what a layer caches: keys and values of tokens in pages, or a state of fixed size per sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Paged:
    """The keys and values that one layer caches of each token on this rank.

    Attributes:
        num_kv_heads: heads of keys and values.
        key_size, value_size: elements of a head's key and of its value.
        window: tokens that a query sees at most, its own included; None for all before it.
        dtype: of keys and values.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None
    dtype: torch.dtype


@dataclass(frozen=True)
class State:
    """The state that one layer keeps of each sequence on this rank.

    Attributes:
        tensors: their shapes and dtypes, by name.
        checkpoint: a state is kept at every block end whose number is a multiple of this.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    checkpoint: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors.values())


CacheSpec = Paged | State
"""What a layer declares; see `nanovllm.runner.messages.CacheKind` for what the engine is told of it."""


def common_window(specs: Iterable[Paged]) -> int | None:
    """Return how many tokens some layer sees at most; None if one sees all."""
    windows = [spec.window for spec in specs]
    known = [window for window in windows if window is not None]
    return max(known) if known and len(known) == len(windows) else None
