"""Specs of what a layer caches: keys and values of tokens in pages, or a state of fixed size per sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 64
"""Bytes: of the tensors in a state."""


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


StateSpec = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""The state that one layer keeps of each sequence on this rank: shapes and dtypes of its tensors, by name."""


@dataclass(frozen=True)
class StateLayout:
    """The places of all layers' tensors in one sequence's state.

    Attributes:
        places: for each layer, where its tensors begin, in elements of their dtypes, by name.
        num_bytes: bytes of a state.
    """

    places: tuple[Mapping[str, int], ...]
    num_bytes: int

    @classmethod
    def of(cls, specs: Sequence[StateSpec]) -> StateLayout:
        """Lay out the tensors of layers with equal names: all layers' first ones, all second ones, and so on.

        Rows of a recurrence, whose tensor is the first, therefore begin at multiples of their length.
        """
        places: list[dict[str, int]] = [{} for _ in specs]
        end = 0
        for name in specs[0] if specs else ():
            for spec, own in zip(specs, places, strict=True):
                shape, dtype = spec[name]
                own[name] = end // dtype.itemsize
                end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(places), end)


NO_STATES = StateLayout((), 0)
