"""What a layer tells the loader of each of its parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WeightPart:
    """The part of one tensor of the checkpoint that this rank holds.

    Attributes:
        shape: of the whole tensor.
        index: what of it this rank holds; one slice a dimension.
        target: where that goes: a parameter, or a region of one.
    """

    shape: tuple[int, ...]
    index: tuple[slice, ...]
    target: torch.Tensor

    @classmethod
    def whole(cls, param: torch.nn.Parameter) -> WeightPart:
        """All of a tensor, for a parameter that every rank has in whole."""
        return cls(tuple(param.shape), (slice(None),) * param.dim(), param.data)
