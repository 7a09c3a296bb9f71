"""The base class of all models, as the runner and the loader see them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nanovllm.layers.attention import CachedAttention
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.layers.state import StateLayer
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import shard_of
from nanovllm.quantization.weight import Stream
from nanovllm.weights.names import WeightedModel
from nanovllm.weights.slices import LoadableModule

if TYPE_CHECKING:
    from nanovllm.config import Config
    from nanovllm.configs.model import ModelConfig
    from nanovllm.kernels.policy import KernelPolicy
    from nanovllm.weights.model_weights import ModelWeights


class CausalLM(WeightedModel):
    """One rank's shard of a model of a config's shape; parameters are created on the default device, not yet filled."""

    supports_cuda_graph: bool = True
    """Whether steps can be captured: nothing in them waits for the device or depends on values there."""

    model: nn.Module
    """Embedding, `layers` and the last norm."""
    lm_head: ParallelLMHead

    def __init__(self, config: ModelConfig, communicator: Communicator) -> None:
        super().__init__(config)
        self.communicator = communicator
        self.shard = shard_of(config, communicator.rank, communicator.size)

    def load(
        self, config: Config, folder: str, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> ModelWeights:
        """Allocate the model for `max_model_len` positions, and load its weights as `config.load_format` says.

        ValueError if they do not fit, or the model cannot be run.
        """
        from nanovllm.weights.model_weights import ModelWeights  # noqa: PLC0415

        for module in self.loadable_modules:
            module.allocate(dtype, device)
        weights = ModelWeights(self, device, self.communicator)
        if config.load_format == "dummy":
            weights.draw(config.seed or 0)
        else:
            weights.load_folder(folder)
        self.tabulate_rope(max_model_len, device)
        return weights

    @property
    def attention_layers(self) -> list[CachedAttention]:
        """Layers with a KV cache, in order."""
        return [module for module in self.modules() if isinstance(module, CachedAttention)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """Layers that keep a state of each sequence, in order."""
        return [module for module in self.modules() if isinstance(module, StateLayer)]

    @property
    def loadable_modules(self) -> list[LoadableModule]:
        """Modules with weights."""
        return [module for module in self.modules() if isinstance(module, LoadableModule)]

    @property
    def kernel_rows(self) -> set[int]:
        """Row counts at which the choice of the weights' kernels changes."""
        return {rows for module in self.loadable_modules for rows in module.kernel_sizes[0]}

    @property
    def kernel_tokens(self) -> set[int]:
        """The subset of `kernel_rows` that is also compared with numbers of prompt tokens."""
        return {tokens for module in self.loadable_modules for tokens in module.kernel_sizes[1]}

    def set_kernel_policy(self, policy: KernelPolicy) -> None:
        """Set the policy that chooses the kernels of all weights."""
        for module in self.loadable_modules:
            module.policy = policy

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Keep one layer of each kind inside the `with` block: the others launch the same kernels.

        The first layer stays, since it gets no residual, and the last one, since it outputs few rows.
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
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None,
        hidden_states: dict[int, Any] | None = None,
    ) -> Stream:  # fmt: skip
        """Run the model up to its last norm; return x and residual, [num_rows, hidden_size], see `layers.layernorm`.

        Args:
            token_ids, positions: [num_tokens] int32.
            rows: indices of the tokens whose states are needed: few prompt tokens are sampled from. None for all.
            hidden_states: by layer, to be filled with its input of all tokens, [num_tokens, hidden_size]. Only native
                decoders have them.
        """
        states: Stream = self.model(token_ids, positions, rows, hidden_states or {})
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


def _kind(layer: nn.Module) -> Hashable:
    """Return a key that decoder layers with the same kernels share: modules, sizes, dtypes, and cache options."""
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    params = tuple((name, param.shape, param.dtype) for name, param in layer.named_parameters())
    specs = tuple(
        module.kv_cache_spec(params[0][2]) for module in layer.modules() if isinstance(module, CachedAttention)
    )
    return modules, params, specs
