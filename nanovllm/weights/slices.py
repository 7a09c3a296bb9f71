"""Maps checkpoint tensors to module parameters, and to this rank's slice of each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from nanovllm.kernels.policy import FASTEST, KernelPolicy
from nanovllm.parallel.shard import Shard

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Stored dtypes that may be converted to the model's, chosen by the user or for the CPU."""


class WeightTarget(NamedTuple):
    """The destination of a checkpoint tensor.

    Attributes:
        param: name of the tensor in the model's modules.
        part: name of the projection, if the parameter stacks several; None otherwise.
        expert: number of the expert, if the parameter holds several; None in a dense layer.
    """

    param: str
    part: str | None = None
    expert: int | None = None

    def __str__(self) -> str:
        labels = [str(label) for label in (self.part, self.expert) if label is not None]
        return f"{self.param}[{', '.join(labels)}]" if labels else self.param


@dataclass(frozen=True)
class WeightSlice:
    """This rank's slice of one checkpoint tensor.

    Attributes:
        shape: of the whole tensor.
        index: one slice per dimension.
        region: its storage: a parameter, or a region of one.
        dtypes: dtypes that the tensor may be stored in.
        has_model_dtype: whether a dtype other than the model's deserves a warning.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = _FLOATS
    has_model_dtype: ClassVar[bool] = True

    shape: tuple[int, ...]
    index: tuple[slice, ...]
    region: torch.Tensor

    @classmethod
    def of(cls, shards: Iterable[Shard], region: torch.Tensor) -> WeightSlice:
        """Return the slice of one shard per dimension; `region` also holds the padding."""
        shape, index = [], []
        for dim, shard in enumerate(shards):
            shape.append(shard.total)
            index.append(shard.present)
            region = region.narrow(dim, 0, shard.num_present)
        return cls(tuple(shape), tuple(index), region)

    @property
    def places(self) -> tuple[WeightSlice, ...]:
        """The slices of the same tensor that this rank stores: this one, and slices of modules tied to it."""
        return (self,)

    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Reject a tensor whose dtype is not in `dtypes`."""
        if dtype not in self.dtypes:
            raise ValueError(f"tensor {name!r} is stored as {dtype}; the config asks for one of {self.dtypes}")

    def check_shape(self, name: str, shape: list[int]) -> None:
        """Reject a tensor of another shape."""
        if list(self.shape) != shape:
            raise ValueError(f"tensor {name!r} has shape {shape}; the config asks for {list(self.shape)}")

    def check_values(self, name: str, tensor: Any) -> None:
        """Reject values that `store` rejects; `tensor` is read only if some can be rejected."""

    def store(self, name: str, values: torch.Tensor) -> None:
        """Store the slice of the tensor `name`, converting its dtype if both are plain floats."""
        self.region.copy_(values)


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


class LoadableModule(nn.Module):
    """A module that builds its parameters from checkpoint tensors."""

    policy: KernelPolicy = FASTEST
    """Chooses the module's kernels."""

    @property
    def kernel_rows(self) -> Collection[int]:
        """Numbers of rows at which the choice of kernels or of their tiles changes."""
        return ()

    @property
    def kernel_tokens(self) -> Collection[int]:
        """Likewise for prompt tokens beside decode rows: the sizes that engines of few sequences reach."""
        return ()

    def weight_slices(self, name: str) -> dict[WeightTarget, WeightSlice]:
        """Return this rank's slice of each tensor of the module, which the model calls `name`.

        By default one tensor per parameter, whole on every rank.
        """
        return {
            WeightTarget(f"{name}.{param_name}"): WeightSlice.of(map(Shard.whole, param.shape), param.data)
            for param_name, param in self.named_parameters(recurse=False)
        }

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the parameters, not yet filled; `dtype` is the dtype of the model's activations."""
        for name, param in list(self.named_parameters(recurse=False)):
            # For a tensor without memory, `empty_like` imports sympy, which takes as long as loading a small model.
            values = torch.empty(param.shape, dtype=dtype, device=device)
            setattr(self, name, nn.Parameter(values, requires_grad=False))
