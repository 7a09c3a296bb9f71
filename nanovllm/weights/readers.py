"""Readers of checkpoint tensors, which are indexed by one slice per dimension: in memory, or a part of another one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from nanovllm.weights.slices import WeightSlice, WeightTarget


@dataclass(frozen=True)
class WholeTensor:
    """A tensor in memory, as `ModelWeights.write` expects it."""

    tensor: torch.Tensor

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return list(self.tensor.shape)

    def get_dtype(self) -> torch.dtype:
        """Return its dtype."""
        return self.tensor.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        return self.tensor[index]


@dataclass(frozen=True)
class TensorRows:
    """Rows `start ... stop - 1` of a checkpoint tensor that stacks several."""

    tensor: Any
    start: int
    stop: int

    def get_shape(self) -> list[int]:
        """Return the shape of these rows."""
        num_rows, *others = self.tensor.get_shape()
        return [min(self.stop, num_rows) - min(self.start, num_rows), *others]

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        rows, *others = index
        place = (slice(self.start + rows.start, self.start + rows.stop), *others)
        values: torch.Tensor = self.tensor[place]
        return values


@dataclass(frozen=True)
class StackedTensor:
    """One matrix of a tensor that stacks several, such as a trainer's experts."""

    tensor: Any
    number: int

    def get_shape(self) -> list[int]:
        """Return the shape of the matrix."""
        return list(self.tensor.get_shape()[1:])

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        place = (slice(self.number, self.number + 1), *index)
        values: torch.Tensor = self.tensor[place]
        return values[0]


def rows_of(tensor: Any, parts: list[tuple[WeightTarget, WeightSlice]]) -> Iterator[tuple[WeightTarget, Any]]:
    """Yield each target with its rows of a tensor; the last gets the rest."""
    if len(parts) < 2 or tensor.get_shape() in ([], [1]):
        # A single number belongs to all.
        yield from ((target, tensor) for target, _ in parts)
        return
    if len(tensor.get_shape()) > len(parts[0][1].shape):
        for number, (_, own) in enumerate(groupby(parts, lambda part: part[0].expert)):
            yield from rows_of(StackedTensor(tensor, number), list(own))
        return
    start, num_rows = 0, tensor.get_shape()[0]
    for number, (target, part) in enumerate(parts, 1):
        stop = num_rows if number == len(parts) else start + part.shape[0]
        yield target, TensorRows(tensor, start, stop)
        start = stop


def shape_of(parts: list[tuple[WeightTarget, WeightSlice]]) -> list[int]:
    """Return the shape of the tensor that consists of these parts."""
    experts = {target.expert for target, _ in parts}
    _, first = parts[0]
    rows = sum(part.shape[0] for _, part in parts) // len(experts)
    return [*([len(experts)] if len(experts) > 1 else []), rows, *first.shape[1:]]
