"""Base class of models of all families, for the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from nanovllm.config import Config
from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import shard_of
from nanovllm.layers.attention import CachedAttention
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import ModelConfig
from nanovllm.weights.names import WeightedModel
from nanovllm.weights.slices import LoadableModule


class HiddenStates(Protocol):
    """What comes out of a model's last norm, perhaps not computed yet."""

    def compute(self) -> torch.Tensor:
        """Return the states, [num_tokens, hidden_size]."""


class CausalLM(WeightedModel):
    """One rank's shard of a model. Parameters are made on whatever device is the default, and filled by the loader.

    Args:
        config: the shape of the whole.
        communicator: says which rank this is, and connects it with the others.
    """

    supports_cuda_graph: bool = True
    """Whether steps can be captured: nothing in them waits for the device, or depends on values there."""

    model: nn.Module
    """Embedding, `layers` and the last norm."""
    lm_head: ParallelLMHead

    def __init__(self, config: ModelConfig, communicator: Communicator) -> None:
        super().__init__(config)
        self.shard = shard_of(config, communicator.rank, communicator.size)

    @property
    def attention_layers(self) -> list[CachedAttention]:
        """The layers that have a cache, in order."""
        return [module for module in self.modules() if isinstance(module, CachedAttention)]

    @property
    def kernel_rows(self) -> set[int]:
        """Row counts at which the choice of the weights' kernels changes."""
        return {rows for module in self.modules() if isinstance(module, LoadableModule) for rows in module.kernel_rows}

    @property
    def kernel_tokens(self) -> set[int]:
        """The subset of `kernel_rows` that is compared with prompt tokens, too."""
        modules = [module for module in self.modules() if isinstance(module, LoadableModule)]
        return {tokens for module in modules for tokens in module.kernel_tokens}

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
    ) -> HiddenStates:
        """token_ids, positions: [num_tokens] int32 -> the last norm, not computed yet, for `compute_logits`.

        It is of [num_tokens, hidden_size], or of `rows` of it: few tokens of a prompt have one sampled after them.
        """
        hidden: HiddenStates = self.model(token_ids, positions, rows)
        return hidden

    def compute_logits(self, hidden: HiddenStates) -> torch.Tensor:
        """hidden: of num_rows tokens, from `forward` -> [num_rows, vocabulary entries of this rank]."""
        logits: torch.Tensor = self.lm_head(hidden).compute()
        return logits

    def project_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [num_rows, hidden_size], after the last norm -> [num_rows, vocabulary entries of this rank]."""
        return self.lm_head.multiply(hidden)


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
