"""Tensors of checkpoints that have the outputs of several projections of an expert in turn, as gpt-oss's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from nanovllm.weights.slices import WeightSlice


@dataclass(frozen=True)
class WovenSlice(WeightSlice):
    """A slice of a tensor that has the outputs of several projections in turn.

    Attributes:
        parts: of the projections, of equal shapes.
        is_transposed: whether the tensor is [inputs, outputs].
    """

    is_plain = False

    parts: tuple[WeightSlice, ...]
    is_transposed: bool

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        rows = values.T if self.is_transposed else values
        for number, part in enumerate(self.parts):
            part.store(name, rows[number :: len(self.parts)])


def woven(made: list[dict[str, WeightSlice]]) -> dict[str, WeightSlice]:
    """Return the slices of the tensors that projections share; made: of each the same ones, by their names."""
    slices: dict[str, WeightSlice] = {}
    for name, first in made[0].items():
        parts = tuple(tensors[name] for tensors in made)
        rows = slice(first.index[0].start * len(parts), first.index[0].stop * len(parts))
        shape, index = (first.shape[0] * len(parts), *first.shape[1:]), (rows, *first.index[1:])
        if is_transposed := name == "weight":
            shape, index = shape[::-1], index[::-1]
        slices[name] = WovenSlice(
            shape, index, first.region, parts, is_transposed, dtypes=first.dtypes, check=first.check
        )
    return slices
