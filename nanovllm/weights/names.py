"""Maps names of checkpoint tensors to targets in a model's modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from nanovllm.weights.slices import LoadableModule, Slices, WeightTarget

if TYPE_CHECKING:
    from nanovllm.configs.model import ModelConfig

_UNUSED = {"input_scale", "activation_scale", "input_global_scale", "weight_shape"}
"""What products that round rows by themselves, or not at all, do not need of a quantised checkpoint."""
_KV_SCALES = {
    ("self_attn", "k_scale"): "k_scale", ("k_proj", "output_scale"): "k_scale", ("k_proj", "k_scale"): "k_scale",
    ("self_attn", "v_scale"): "v_scale", ("v_proj", "output_scale"): "v_scale", ("v_proj", "v_scale"): "v_scale",
}  # fmt: skip
"""Scales of a cache in e4m3: module and name there -> name here."""


class WeightedModel(nn.Module):
    """A model whose weights are loaded and updated by their names in a checkpoint.

    Its only subclass is `CausalLM`. The two are apart because `weights` imports nothing of `models`, a layer above.
    """

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, str | None]]]
    """Checkpoint projections that are merged here: name there -> (name here, part of its weight)."""
    renamed_modules: ClassVar[Mapping[str, str]] = {}
    """Modules that have another name in some checkpoints: name there -> name here."""
    fused_modules_mapping: Mapping[str, tuple[str, ...]]
    """Projections that some checkpoints, such as Phi-3's, merge too: name -> parts of its weight, in order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def weight_slices(self) -> Slices:
        """Return this rank's slice of each tensor in the model."""
        slices: Slices = {}
        for name, module in self.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                assert isinstance(module, LoadableModule)
                slices |= module.weight_slices(name)
        return slices

    def weight_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that store the values of `weight_slices`."""
        # Buffers are scales.
        return [*self.parameters(), *self.buffers()]

    def folder_tensors(self, folder: str) -> Iterator[tuple[str, str, Any]]:
        """Return the tensors of a folder as `ModelWeights` expects them, with file and name; see `stored_tensors`."""
        from nanovllm.weights.files import stored_tensors  # noqa: PLC0415

        return stored_tensors(folder)

    def weight_targets(self, name: str) -> list[WeightTarget]:
        """Map a checkpoint tensor to its targets, which may not exist: consecutive rows; none if it is not needed."""
        # A tied head is the embedding; many checkpoints store it all the same.
        is_tied = self.config.tie_word_embeddings and name == "lm_head.weight"
        if is_tied or (self.config.quantization is not None and name.rpartition(".")[2] in _UNUSED):
            return []
        # Embedding models are published without a head, and their tensors lack the prefix.
        if not name.startswith(("model.", "lm_head.")):
            name = f"model.{name}"
        path = [self.renamed_modules.get(module, module) for module in name.split(".")]
        path[-1] = path[-1].replace("weight_scale_inv", "weight_scale")
        module = path[-2] if len(path) >= 2 else ""
        if module == "experts" and self.config.experts is not None:
            # All experts in one tensor, as in transformers' modules and so from trainers.
            return self._stacked_experts(path)
        if (scale := _KV_SCALES.get((module, path[-1]))) is not None:
            attention = path[:-2] if module.endswith("_proj") else path[:-1]
            return [WeightTarget(".".join([*attention, "attn.scales", scale]))]
        if (parts := self.fused_modules_mapping.get(module)) is not None:
            return [WeightTarget(".".join(path), part) for part in parts]
        part = None
        if module in self.packed_modules_mapping:
            path[-2], part = self.packed_modules_mapping[module]
        expert = None
        if len(path) >= 4 and path[-4] == "experts" and path[-3].isdecimal():
            # One tensor for each of the experts that are stacked here.
            expert = int(path.pop(-3))
        return [WeightTarget(".".join(path), part, expert)]

    def _stacked_experts(self, path: list[str]) -> list[WeightTarget]:
        assert self.config.experts is not None
        experts, (name, _, kind) = self.config.experts, path[-1].partition("_proj_")
        name = f"{name}_proj" if kind else name
        param = ".".join([*path[:-1], name, {"": "weight", "scale_inv": "weight_scale"}.get(kind, kind)])
        parts = (None,) if experts.alternates else self.fused_modules_mapping.get(name, (None,))
        return [WeightTarget(param, part, i) for i in range(experts.num_experts) for part in parts]

    def stored_name(self, target: WeightTarget) -> str:
        """Return the checkpoint name of a target's tensor."""
        *path, name = target.param.split(".")
        if target.part is not None:
            packed = self.packed_modules_mapping.items()
            path[-1] = next((there for there, here in packed if here == (path[-1], target.part)), path[-1])
        path[-1:-1] = [] if target.expert is None else [str(target.expert)]
        return ".".join([*path, name])
