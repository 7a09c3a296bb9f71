"""One rank's share of a model that transformers' code runs, by the plan that comes with the model.

A plan (`base_model_tp_plan`) gives modules styles: of "colwise" linear layers each rank has some outputs, of "rowwise"
ones, which take those, some inputs, so that the ranks' products are added up. Where outputs would be gathered again,
each rank computes them all.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import ModelShard, Shard, even_shard

_WHOLE = {
    "colwise_gather_output", "colwise_rep", "embedding_rowwise", "replicate", "replicated",
    "replicated_with_grad_allreduce", "rowwise_rep", "rowwise_split_input",
}  # fmt: skip
"""Styles of modules that each rank has in whole; the first names are newer ones."""
_DIVIDED = {"colwise", "rowwise"}


class RowParallel(nn.Module):
    """A linear layer of which each rank has some inputs; the products of all ranks are added up."""

    def __init__(self, linear: nn.Linear, inputs: slice, communicator: Communicator) -> None:
        super().__init__()
        self.weight, self.bias = _part(linear.weight[:, inputs]), linear.bias
        self._communicator = communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., inputs of this rank] -> [..., outputs], the same on all ranks."""
        out = self._communicator.all_reduce(functional.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


def shard_model(head: Any, shard: ModelShard, communicator: Communicator) -> dict[str, tuple[slice, ...]]:
    """Leave a model what this rank has of it: heads and MLP columns by its plan, and some of the LM head's tokens.

    Returns the slices of those parameters, by name, that are no longer whole; one a dimension, the last ones may miss.

    Raises:
        ValueError: it has no plan for its layers, or one that is not supported, or a head that is no linear layer.
    """
    plan: dict[str, str] = head.tp_plan or {}
    styles = {name: plan[key] for name, _ in _named_parts(head) if (key := _wildcards(name)) in plan}
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


def _named_parts(head: nn.Module) -> list[tuple[str, Any]]:
    """Return modules and parameters, either of which a plan may name."""
    return [*head.named_modules(), *head.named_parameters()]


def _wildcards(name: str) -> str:
    """Return the name under which a plan has a module: for the numbers of layers it has stars."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _shard_of(name: str, num_items: int, shard: ModelShard, communicator: Communicator) -> Shard:
    """Return this rank's share of a layer's outputs or inputs: whole KV groups of attention, else columns."""
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
    # A copy, so that the whole is freed.
    return nn.Parameter(values.detach().clone(), requires_grad=False)
