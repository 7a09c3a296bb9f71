"""Where the parameters of a model of transformers are, once its modules are divided among ranks and replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.models.fused_modules import FusedNorm
from nanovllm.quantization.loading import WeightSlice, WeightTarget


@dataclass(frozen=True)
class SourceSlice(WeightSlice):
    """The slice of a parameter that this rank holds.

    Attributes:
        tied: slices of the same parameter that another module has on this rank.
        norms: whose weights are computed from it.
    """

    tied: tuple[WeightSlice, ...] = ()
    norms: tuple[FusedNorm, ...] = ()

    def fill(self, name: str, tensor: Any) -> torch.dtype:
        """See the base class."""
        for part in self.tied:
            part.fill(name, tensor)
        return super().fill(name, tensor)

    def store(self, name: str, values: torch.Tensor) -> None:
        """See the base class."""
        super().store(name, values)
        for norm in self.norms:
            norm.refresh()


class SourceParameters:
    """The parameters of a model by their names, which stay those of its checkpoint.

    Args:
        head: the model, as it was read.
    """

    def __init__(self, head: nn.Module) -> None:
        first = {parameter: name for name, parameter in reversed(list(head.named_parameters()))}
        every = dict(head.named_parameters(remove_duplicate=False))
        self._shapes = {name: tuple(parameter.shape) for name, parameter in head.named_parameters()}
        self._tied_to = {name: first[parameter] for name, parameter in every.items() if name not in self._shapes}
        self._parameters: dict[str, nn.Parameter] = {}
        self._indices: dict[str, tuple[slice, ...]] = {}

    def find(self, head: nn.Module, indices: dict[str, tuple[slice, ...]]) -> None:
        """Find them in the divided model, from which what does not run has gone; indices: of those not whole."""
        self._parameters, self._indices = dict(head.named_parameters()), indices

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What their values lie in."""
        return list(self._parameters.values())

    def targets(self, name: str) -> list[WeightTarget]:
        """Return where a parameter goes; nothing for one that is tied to another, or does not run."""
        is_needed = name in self._parameters and name in self._shapes
        return [WeightTarget(name)] if is_needed or name not in {*self._shapes, *self._tied_to} else []

    def slices(self, model: nn.Module) -> dict[WeightTarget, WeightSlice]:
        """Return what this rank holds of each; model: as it runs."""
        norms: dict[nn.Parameter, tuple[FusedNorm, ...]] = {}
        for norm in model.modules():
            if isinstance(norm, FusedNorm):
                for parameter in norm.source.parameters():
                    norms[parameter] = (*norms.get(parameter, ()), norm)
        found: dict[WeightTarget, WeightSlice] = {}
        for name, parameter in self._parameters.items():
            if name in self._shapes:
                copies = [copy for copy, own in self._tied_to.items() if own == name and copy in self._parameters]
                tied = tuple(self._slice(name, copy) for copy in copies)
                own = self._slice(name, name)
                found[WeightTarget(name)] = SourceSlice(
                    own.shape, own.index, own.region, tied, norms.get(parameter, ())
                )
        return found

    def _slice(self, name: str, place: str) -> WeightSlice:
        shape, index = self._shapes[name], self._indices.get(place, ())
        return WeightSlice(shape, (*index, *[slice(None)] * (len(shape) - len(index))), self._parameters[place].data)
