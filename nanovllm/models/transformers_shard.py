"""Shards a transformers model by the tensor-parallel plan that comes with it.

A plan (`base_model_tp_plan`) maps modules to styles: each rank holds some outputs of a "colwise" linear layer, and the
corresponding inputs of the following "rowwise" layer, whose products are summed over the ranks. If a plan gathers
outputs again, each rank computes all of them instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from nanovllm.models.fuse import FusedNorm
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import ModelShard, Shard, even_shard
from nanovllm.weights.slices import Slices, WeightSlice, WeightTarget

_WHOLE = {
    "colwise_gather_output", "colwise_rep", "embedding_rowwise", "replicate", "replicated",
    "replicated_with_grad_allreduce", "rowwise_rep", "rowwise_split_input",
}  # fmt: skip
"""Styles of modules that every rank holds completely; newer names first."""
_DIVIDED = {"colwise", "rowwise"}


class RowParallel(nn.Module):
    """A linear layer whose inputs are divided among the ranks; the products are summed."""

    def __init__(self, linear: nn.Linear, inputs: slice, communicator: Communicator) -> None:
        super().__init__()
        self.weight, self.bias = _part(linear.weight[:, inputs]), linear.bias
        self._communicator = communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., inputs of this rank] -> [..., outputs], the same on all ranks."""
        out = self._communicator.all_reduce(functional.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


def shard_model(head: Any, shard: ModelShard, communicator: Communicator) -> dict[str, tuple[slice, ...]]:
    """Reduce a model to this rank's shard: heads and MLP columns by its plan, and a part of the LM head's tokens.

    Returns the slices of sharded parameters by name, one slice per dimension; trailing ones may be omitted. ValueError
    if the plan is missing or not supported, or the head is not a linear layer.
    """
    plan: dict[str, str] = head.tp_plan or {}
    # A plan names modules or parameters, with stars for layer numbers.
    names = [name for name, _ in [*head.named_modules(), *head.named_parameters()]]
    styles = {name: plan[key] for name in names if (key := re.sub(r"\.\d+(?=\.|$)", ".*", name)) in plan}
    if unknown := sorted(set(styles.values()) - _WHOLE - _DIVIDED):
        raise ValueError(f"its base_model_tp_plan has styles that are not supported: {', '.join(unknown)}")
    divided = {name: style for name, style in styles.items() if style in _DIVIDED}
    if not divided:
        raise ValueError("it has no base_model_tp_plan that divides its layers among ranks")
    slices: dict[str, tuple[slice, ...]] = {}
    for name, style in divided.items():
        parent, _, child = name.rpartition(".")
        owner, linear = head.get_submodule(parent), head.get_submodule(name)
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"its base_model_tp_plan divides {name}, a {type(linear).__name__}")
        num_items = linear.out_features if style == "colwise" else linear.in_features
        part = _shard_of(name, num_items, shard, communicator)
        if style == "colwise":
            _keep_outputs(linear, part.present)
            slices |= {f"{name}.weight": (part.present,), f"{name}.bias": (part.present,)}
        else:
            setattr(owner, child, RowParallel(linear, part.present, communicator))
            slices[f"{name}.weight"] = (slice(None), part.present)
    lm_head = head.get_output_embeddings()
    if not isinstance(lm_head, nn.Linear):
        raise ValueError(f"its head is a {type(lm_head).__name__}")
    _keep_outputs(lm_head, shard.vocab.present)
    (name,) = (name for name, module in head.named_modules() if module is lm_head)
    return slices | {f"{name}.weight": (shard.vocab.present,), f"{name}.bias": (shard.vocab.present,)}


def _shard_of(name: str, num_items: int, shard: ModelShard, communicator: Communicator) -> Shard:
    """Return this rank's share of a layer's outputs or inputs: whole KV groups in attention, else columns."""
    if "attn" not in name and "attention" not in name:
        return even_shard(num_items, communicator.rank, communicator.size)
    each, rest = divmod(num_items, shard.kv_heads.total)
    if rest:
        raise ValueError(f"{name} has {num_items} columns, which {shard.kv_heads.total} KV heads do not divide")
    return shard.kv_heads.times(each)


def _keep_outputs(linear: nn.Linear, outputs: slice) -> None:
    linear.weight = _part(linear.weight[outputs])
    if linear.bias is not None:
        linear.bias = _part(linear.bias[outputs])
    linear.out_features = len(linear.weight)


def _part(values: torch.Tensor) -> nn.Parameter:
    # Copy, so that the whole tensor is freed.
    return nn.Parameter(values.detach().clone(), requires_grad=False)


@dataclass(frozen=True)
class SourceSlice(WeightSlice):
    """This rank's slice of a parameter, with tied modules' slices, and norms whose weights it determines."""

    tied: tuple[WeightSlice, ...] = ()
    norms: tuple[FusedNorm, ...] = ()

    @property
    @override
    def places(self) -> tuple[WeightSlice, ...]:
        return (*self.tied, self)

    @override
    def store(self, name: str, values: torch.Tensor) -> None:
        super().store(name, values)
        for norm in self.norms:
            norm.refresh()


class SourceParameters:
    """The parameters of a model, which is not sharded yet, by their checkpoint names."""

    def __init__(self, head: nn.Module) -> None:
        first = {parameter: name for name, parameter in reversed(list(head.named_parameters()))}
        every = dict(head.named_parameters(remove_duplicate=False))
        self._shapes = {name: tuple(parameter.shape) for name, parameter in head.named_parameters()}
        self._tied_to = {name: first[parameter] for name, parameter in every.items() if name not in self._shapes}
        self._parameters: dict[str, nn.Parameter] = {}
        self._indices: dict[str, tuple[slice, ...]] = {}

    def find(self, head: nn.Module, indices: dict[str, tuple[slice, ...]]) -> None:
        """Locate the parameters in the sharded model without unused parts; indices: slices of sharded parameters."""
        self._parameters, self._indices = dict(head.named_parameters()), indices

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold the parameters."""
        return list(self._parameters.values())

    def targets(self, name: str) -> list[WeightTarget]:
        """Return a parameter's targets; empty if it is tied to another one or unused."""
        is_needed = name in self._parameters and name in self._shapes
        return [WeightTarget(name)] if is_needed or name not in {*self._shapes, *self._tied_to} else []

    def slices(self, model: nn.Module) -> Slices:
        """Return this rank's slice of each parameter; model: the final model."""
        norms: dict[nn.Parameter, tuple[FusedNorm, ...]] = {}
        for norm in model.modules():
            if isinstance(norm, FusedNorm):
                for parameter in norm.source.parameters():
                    norms[parameter] = (*norms.get(parameter, ()), norm)
        found: Slices = {}
        for name, parameter in self._parameters.items():
            if name in self._shapes:
                copies = [copy for copy, own in self._tied_to.items() if own == name and copy in self._parameters]
                tied = tuple(self._slice(name, copy) for copy in copies)
                own = self._slice(name, name)
                of_norms = norms.get(parameter, ())
                found[WeightTarget(name)] = SourceSlice(own.shape, own.index, own.region, tied, of_norms)
        return found

    def _slice(self, name: str, place: str) -> WeightSlice:
        shape, index = self._shapes[name], self._indices.get(place, ())
        return WeightSlice(shape, (*index, *[slice(None)] * (len(shape) - len(index))), self._parameters[place].data)
