"""Which tensors of a checkpoint a layer's parameters are made of, and what one rank holds of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from nanovllm.distributed.shard import Shard


class WeightTarget(NamedTuple):
    """Where a tensor of the checkpoint goes.

    Attributes:
        param: name of the model's parameter.
        part: name of the projection, of several that the parameter stacks; None if it is no such parameter.
        expert: number of the expert, of several that the parameter holds; None in a dense layer.
    """

    param: str
    part: str | None = None
    expert: int | None = None

    def __str__(self) -> str:
        labels = [str(label) for label in (self.part, self.expert) if label is not None]
        return f"{self.param}[{', '.join(labels)}]" if labels else self.param


@dataclass(frozen=True)
class WeightSlice:
    """The slice of one tensor of the checkpoint that this rank holds.

    Attributes:
        shape: of the whole tensor.
        index: the slice; one a dimension.
        region: where it goes: a parameter, or a region of one.
    """

    shape: tuple[int, ...]
    index: tuple[slice, ...]
    region: torch.Tensor

    @classmethod
    def along(cls, dim: int, shard: Shard, region: torch.Tensor) -> WeightSlice:
        """Return the slice `shard` of dimension `dim`, of which `region` also has the padding."""
        shape, index = list(region.shape), [slice(None)] * region.dim()
        shape[dim], index[dim] = shard.total, shard.present
        return cls(tuple(shape), tuple(index), region.narrow(dim, 0, shard.num_present))


class LoadableLayer(nn.Module):
    """A layer that maps checkpoint tensors to its parameters; here one tensor a parameter, whole on every rank."""

    def weight_slices(self, name: str, param: nn.Parameter) -> dict[WeightTarget, WeightSlice]:
        """Return what this rank holds of each tensor that `param`, which the model calls `name`, is made of."""
        return {WeightTarget(name): WeightSlice(tuple(param.shape), (slice(None),) * param.dim(), param.data)}
