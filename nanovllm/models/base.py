"""What the runner and the loader know of a model, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import shard_of
from nanovllm.kernels.policy import KernelPolicy
from nanovllm.layers.attention import CachedAttention
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import ModelConfig
from nanovllm.models.stored_tensors import stored_tensors
from nanovllm.quantization.loading import LoadableModule, WeightSlice, WeightTarget

_SCALES = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}
"""Other names of scales, all of which multiply."""
_KV_SCALES = {
    ("self_attn", "k_scale"): "k_scale", ("k_proj", "output_scale"): "k_scale",
    ("self_attn", "v_scale"): "v_scale", ("v_proj", "output_scale"): "v_scale",
}  # fmt: skip
"""Scales of a cache in e4m3: module and name there -> name here."""


class CausalLM(nn.Module):
    """One rank's shard of a model. Parameters are made on whatever device is the default, and filled by the loader.

    Args:
        config: the shape of the whole.
        communicator: says which rank this is, and connects it with the others.
    """

    supports_cuda_graph: bool = True
    """Whether steps can be captured: nothing in them waits for the device, or depends on values there."""

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, str | None]]]
    """Projections of the checkpoint that are one here: name there -> (name here, part of its weight)."""
    renamed_modules: ClassVar[Mapping[str, str]] = {}
    """Modules that have another name in some checkpoints: name there -> name here."""
    fused_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]]
    """Projections that are one in some checkpoints, too, as Phi-3's are: name -> parts of its weight, in order."""

    model: nn.Module
    """Embedding, `layers` and the last norm."""
    lm_head: ParallelLMHead

    def __init__(self, config: ModelConfig, communicator: Communicator) -> None:
        super().__init__()
        self.config = config
        self.shard = shard_of(config, communicator.rank, communicator.size)

    @property
    def attention_layers(self) -> list[CachedAttention]:
        """The layers that have a cache, in order."""
        return [module for module in self.modules() if isinstance(module, CachedAttention)]

    @property
    def kernel_rows(self) -> set[int]:
        """Numbers of rows at which the choice of the weights' kernels changes."""
        return {rows for module in self.modules() if isinstance(module, LoadableModule) for rows in module.kernel_rows}

    @property
    def kernel_tokens(self) -> set[int]:
        """Those of them that are looked at as numbers of prompt tokens, too."""
        modules = [module for module in self.modules() if isinstance(module, LoadableModule)]
        return {tokens for module in modules for tokens in module.kernel_tokens}

    def set_kernel_policy(self, policy: KernelPolicy) -> None:
        """Let a policy choose the kernels of all weights."""
        for module in self.modules():
            if isinstance(module, LoadableModule):
                module.policy = policy

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Leave out, inside the `with` block, the layers that launch the same kernels as others.

        The first stays, since no residual is added before it, and the last, whose outputs are of few rows.
        """
        decoder: Any = self.model
        layers = decoder.layers
        kept: dict[Hashable, nn.Module] = {}
        for layer in reversed(layers[1:]):
            kept.setdefault(_kind(layer), layer)
        decoder.layers = nn.ModuleList([layers[0], *reversed(kept.values())])
        try:
            yield
        finally:
            decoder.layers = layers

    def tabulate_rope(self, max_position: int, device: torch.device) -> None:
        """Compute the tables of the rotary embeddings for positions below `max_position`."""
        for module in self.modules():
            if isinstance(module, RotaryEmbedding):
                module.tabulate(max_position, device)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the model up to its last norm, for `compute_logits` or `hidden_states`.

        Args:
            token_ids, positions: [num_tokens] int32.
            rows: the tokens whose states are wanted; few tokens of a prompt have one sampled after them. None for all.

        Returns:
            x and residual, [num_rows, hidden_size] each; see `layers.layernorm`.
        """
        states: tuple[torch.Tensor, torch.Tensor | None] = self.model(token_ids, positions, rows)
        return states

    def hidden_states(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the states after the last norm, [num_rows, hidden_size]; x, residual: from `forward`."""
        states: torch.Tensor = self.model.norm(x, residual)[0]  # type: ignore[operator]
        return states

    def compute_logits(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """x, residual: from `forward` -> [num_rows, vocabulary entries of this rank]."""
        logits: torch.Tensor = self.lm_head(x, self.model.norm, residual)[0]
        return logits

    def project_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_rows, hidden_size], from `hidden_states` -> [num_rows, vocabulary entries of this rank]."""
        logits: torch.Tensor = self.lm_head(hidden)[0]
        return logits

    def weight_slices(self) -> dict[WeightTarget, WeightSlice]:
        """Return what this rank holds of each tensor that the model is made of."""
        slices: dict[WeightTarget, WeightSlice] = {}
        for name, module in self.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                assert isinstance(module, LoadableModule)
                slices |= module.weight_slices(name)
        return slices

    def weight_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the values of `weight_slices` lie in."""
        # Buffers are scales.
        return [*self.parameters(), *self.buffers()]

    def folder_tensors(self, folder: str) -> Iterator[tuple[str, Any]]:
        """Yield the tensors of a folder, by name, as `LiveWeights` takes them.

        Raises:
            ValueError: no weights there, or a file missing or damaged.
        """
        for _, name, tensor in stored_tensors(folder):
            yield name, tensor

    def weight_targets(self, name: str) -> list[WeightTarget]:
        """Map the name of a checkpoint tensor to its targets, which may not exist; none for one that is not needed.

        Several targets are consecutive rows of the tensor.
        """
        # A tied head is the embedding; many checkpoints store it all the same.
        if self.config.tie_word_embeddings and name == "lm_head.weight":
            return []
        # Embedding models are published without their head, and the rest without the name that it has beside one.
        if not name.startswith(("model.", "lm_head.")):
            name = f"model.{name}"
        path = [self.renamed_modules.get(module, module) for module in name.split(".")]
        path[-1] = _SCALES.get(path[-1], path[-1])
        module = path[-2] if len(path) >= 2 else ""
        if module == "experts" and self.config.experts is not None:
            # All experts in one tensor, as transformers' modules and so trainers have them.
            return self._stacked_experts(path)
        if (scale := _KV_SCALES.get((module, path[-1]))) is not None:
            return [WeightTarget(".".join([*path[: path.index("self_attn") + 1], "attn.scales", scale]))]
        if module in self.fused_modules_mapping:
            return [WeightTarget(".".join(path), part) for part in self.fused_modules_mapping[module]]
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
        param, parts = ".".join([*path, "weight"]), self.fused_modules_mapping.get(path[-1], (None,))
        return [WeightTarget(param, part, i) for i in range(self.config.experts.num_experts) for part in parts]

    def stored_name(self, target: WeightTarget) -> str:
        """Return the name of the checkpoint's tensor for a target."""
        *path, module, name = target.param.split(".")
        if target.part is not None:
            packed = self.packed_modules_mapping.items()
            module = next(there for there, here in packed if here == (module, target.part))
        return ".".join([*path, *([] if target.expert is None else [str(target.expert)]), module, name])


class LoadableCausalLM(CausalLM, ABC):
    """A model whose code is another library's, which reads and converts its weights, too."""

    @abstractmethod
    def load(self, config: Config, folder: str, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """Fill the model, for `max_model_len` positions, as `config.load_format` says.

        Raises:
            ValueError: weights that do not fit, or a model that cannot be run.
        """


def _kind(layer: nn.Module) -> Hashable:
    """What is equal of decoder layers that launch the same kernels: modules, sizes and dtypes, and what is cached."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    params = tuple((name, param.shape, param.dtype) for name, param in layer.named_parameters())
    specs = tuple(
        module.kv_cache_spec(params[0][2]) for module in layer.modules() if isinstance(module, CachedAttention)
    )
    return modules, params, specs
