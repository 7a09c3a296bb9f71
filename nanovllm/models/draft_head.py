"""Drafting heads: one decoder layer that continues a text from a target model's hidden states.

At position i a head takes the embedding of token i + 1 and the hidden state of token i, and predicts token i + 2; its
keys lie where the target model's of token i do. It feeds itself: its own hidden state takes the place of the larger
model's for the next draft.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.model import ModelConfig
from nanovllm.kernels import ops
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.base import CausalLM
from nanovllm.models.decoder import DecoderForCausalLM, make_layer
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import Shard, inputs_shard, shard_of, vocab_shard
from nanovllm.utils.checks import check_int
from nanovllm.utils.folder_faults import read_json
from nanovllm.utils.hub import resolve_model
from nanovllm.weights.files import stored_tensors
from nanovllm.weights.model_weights import ModelWeights
from nanovllm.weights.slices import LoadableVector, WeightTarget

if TYPE_CHECKING:
    from nanovllm.config import Config

LayerInput: TypeAlias = tuple[torch.Tensor, AllReduceRMSNorm | None, torch.Tensor | None]
"""The input of attention: x, the norm before it (None if x is normed) and residual; see `SelfAttention`."""
_EAGLE3_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
"""Names of the architecture in the config.json of published heads."""
_PICKLED = "pytorch_model.bin"


class HeadParts(NamedTuple):
    """The modules that a head runs; in a tuple, since some have other names or are the target model's."""

    layer: Any
    embed_tokens: Any
    lm_head: ParallelLMHead


class DraftHead(CausalLM):
    """A drafting head for a target model, which lends it the embedding and the LM head that it has not itself.

    Attributes:
        layer_ids: the target model's hidden states that it reads, numbered as in transformers: what layer i takes, or
            with the number of layers, the last norm's output.
        weights: loaded once; only sleep releases them.
    """

    packed_modules_mapping: ClassVar = DecoderForCausalLM.packed_modules_mapping
    fused_modules_mapping: Mapping[str, tuple[str, ...]] = DecoderForCausalLM.fused_modules_mapping
    feeds_normed: ClassVar[bool]
    """Whether the hidden state for the next draft is the last norm's output, or its input."""
    weights: ModelWeights

    def __init__(
        self, config: ModelConfig, layer_ids: tuple[int, ...], target: CausalLM, *, fc_inputs: int, layer_inputs: int
    ) -> None:
        """fc_inputs, layer_inputs: elements of the input of `fc`, a product that both kinds have, and of the layer."""
        super().__init__(config, target.communicator)
        self.layer_ids, rope = layer_ids, config.layers[0].rope
        inputs = inputs_shard(config, fc_inputs, self.communicator.rank, self.communicator.size)
        self.fc = RowParallelLinear(inputs, config.hidden_size, quant_config=config.quantization, prefix="mtp.fc")
        self.norm = self.make_norm(self.communicator)
        layer: Any = make_layer(
            config, self.shard, self.communicator, config.layers[0], {rope: RotaryEmbedding(config.head_dim, rope)},
            "mtp.layers.0", layer_inputs,
        )  # fmt: skip
        embedding: Any = target.model.embed_tokens
        self.parts = HeadParts(layer, embedding, target.lm_head)
        self.d2t: LoadableVector | None = None

    def make_norm(self, communicator: Communicator) -> AllReduceRMSNorm:
        """Return a norm of hidden states; a single rank's communicator if they are whole on every rank."""
        config = self.config
        return AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, communicator, config.architecture.norm_offset)

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what `advance` takes of the target model's hidden states, [num_tokens, states * hidden_size]."""
        return hidden

    @abstractmethod
    def join(self, embeds: torch.Tensor, hidden: torch.Tensor) -> LayerInput:
        """Return what the layer's attention takes; see `advance`."""

    def multiply_part(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the product `fc` of x, [num_tokens, all inputs], which every rank has."""
        return self.fc(x[:, self.fc.inputs.start : self.fc.inputs.stop].contiguous())[0]

    def store(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Store the layer's keys and values of each token, and compute nothing else; see `advance`."""
        x, norm, residual = self.join(embeds, hidden)
        self.parts.layer.self_attn.store(x, norm, residual, positions)

    def advance(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on each token's hidden state, and the embedding of the token after it.

        embeds, hidden: [num_tokens, hidden_size], embeds from `embed`; positions: see `CausalLM.forward`. Returns what
        `draft` takes, and the hidden state for the next draft, [num_tokens, hidden_size] each.
        """
        layer, (x, norm, residual) = self.parts.layer, self.join(embeds, hidden)
        x, residual = layer.self_attn(x, norm, residual, positions, None)
        x, residual = layer.mlp(x, layer.post_attention_layernorm, residual)
        states, total = self.norm(x, residual)
        return states, states if self.feeds_normed else total

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] -> [num_tokens, hidden_size]; of several ranks each returns its part of a sum."""
        embeds: torch.Tensor = self.parts.embed_tokens(token_ids)
        return embeds

    def draft(self, states: torch.Tensor) -> torch.Tensor:
        """Return the likeliest tokens after states from `advance`, [num_rows] int64, the same on every rank."""
        lm_head = self.parts.lm_head
        vocab = lm_head.weight.shard.outputs[None]
        # Before the product, see `ops.sample`.
        zeros = torch.zeros(len(states) + 1, dtype=torch.int32, device=states.device)
        none, seeds, logits = zeros[:-1], zeros[:2].expand(len(states), 2), lm_head(states)[0]
        found = ops.sample(logits, none.view(torch.float32), seeds, none, vocab.start, vocab.num_present)
        drafted = self.communicator.all_reduce_argmax(*found)
        return drafted if self.d2t is None else drafted + self.d2t.values[drafted]

    @override
    def weight_targets(self, name: str) -> list[WeightTarget]:
        return [target._replace(param=target.param.removeprefix("model.")) for target in super().weight_targets(name)]


class Eagle3Head(DraftHead):
    """An EAGLE-3 head (Li et al. 2025, arXiv:2503.01840), which reads several layers' hidden states.

    It may have an embedding, and a part of the vocabulary: d2t is what is added to a token of that part to make it one
    of the target model's. Its attention takes the norms of embedding and hidden state side by side.

    names: of the tensors that are stored; none for random weights.
    """

    feeds_normed: ClassVar = False

    def __init__(self, folder: str, target: CausalLM, names: Collection[str]) -> None:
        stored, config = _eagle3_config(folder, target.config)
        layer_ids, size = _tapped(stored, target.config.num_layers), config.hidden_size
        super().__init__(config, layer_ids, target, fc_inputs=len(layer_ids) * size, layer_inputs=2 * size)
        self.midlayer, embedding, _ = self.parts
        self.midlayer.hidden_norm = self.make_norm(Communicator())
        # Whether the residual stream begins with the norm of the hidden states.
        self.norms_residual = bool(stored.get("norm_before_residual"))
        vocab_size = stored.get("draft_vocab_size") or config.vocab_size
        vocab_size = check_int("draft_vocab_size", vocab_size, 1, config.vocab_size)
        vocab = vocab_shard(vocab_size, self.communicator.rank, self.communicator.size)
        self.lm_head = ParallelLMHead(vocab, size, None)
        if "embed_tokens.weight" in names:
            self.embed_tokens = embedding = VocabParallelEmbedding(self.shard.vocab, size)
        self.parts = HeadParts(self.midlayer, embedding, self.lm_head)
        if vocab_size < config.vocab_size or "d2t" in names:
            self.d2t = LoadableVector(Shard.whole(vocab_size), torch.int64)

    @override
    def folder_tensors(self, folder: str) -> Iterator[tuple[str, str, Any]]:
        return eagle3_tensors(folder)

    @override
    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.communicator.all_reduce_rows(self.multiply_part(hidden))

    @override
    def join(self, embeds: torch.Tensor, hidden: torch.Tensor) -> LayerInput:
        normed, _ = self.midlayer.hidden_norm(hidden)
        both = torch.cat((self.midlayer.input_layernorm(embeds)[0], normed), 1)
        return both, None, normed if self.norms_residual else hidden


def _eagle3_config(folder: str, target: ModelConfig) -> tuple[dict[str, Any], ModelConfig]:
    """Return the config.json of an EAGLE-3 head for a model, and the hyperparameters of its layer, or a ValueError."""
    stored = read_json(os.path.join(folder, "config.json"))
    name = (stored.get("architectures") or [""])[0]
    if name not in _EAGLE3_NAMES or stored.get("model_type") != "llama":
        raise ValueError(
            f"the head in {folder!r} has architecture {name!r} and model_type {stored.get('model_type')!r}, which "
            f"is not supported: only 'llama' and {', '.join(_EAGLE3_NAMES)}"
        )
    from transformers import LlamaConfig  # noqa: PLC0415

    config = ModelConfig.from_hf(LlamaConfig(**(stored | {"architectures": ["LlamaForCausalLM"]})))
    for name in ("hidden_size", "vocab_size", "num_heads"):
        own, wanted = getattr(config, name), getattr(target, name)
        if own != wanted:
            raise ValueError(
                f"the head in {folder!r} has {name}={own}, the model {wanted}: a head drafts only for the model that "
                "it was trained for"
            )
    if config.num_layers != 1:
        raise ValueError(f"the head in {folder!r} has num_hidden_layers={config.num_layers}: only 1 is supported")
    if config.quantization is not None:
        raise ValueError(f"the head in {folder!r} is quantised, which is not supported: use one of 16 bits")
    return stored, replace(config, tie_word_embeddings=False)


def _tapped(stored: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the numbers of the hidden states that an EAGLE-3 head reads in a model of `num_layers`."""
    name = "eagle_aux_hidden_state_layer_ids"
    nested = (stored.get("eagle_config") or {}).get(name)
    # The nested ones name layers whose outputs are read, the next layer's inputs.
    numbers = stored.get(name) or [number + 1 for number in nested or ()] or [2, num_layers // 2, num_layers - 3]
    return tuple(check_int(f"{name} of the head", number, 0, num_layers - 1) for number in numbers)


class MTPHead(DraftHead):
    """The layer that Qwen3.5 and Qwen3-Next were trained with to predict the token after the next.

    It is `mtp.*` (multi-token prediction) in a model's own checkpoint, and reads and feeds normed states.
    """

    feeds_normed: ClassVar = True

    def __init__(self, target: CausalLM) -> None:
        config, size = _mtp_config(target.config), target.config.hidden_size
        super().__init__(config, (target.config.num_layers,), target, fc_inputs=2 * size, layer_inputs=size)
        self.pre_fc_norm_embedding = self.make_norm(self.communicator)
        self.pre_fc_norm_hidden = self.make_norm(Communicator())
        self.layers = nn.ModuleList([self.parts.layer])

    @override
    def folder_tensors(self, folder: str) -> Iterator[tuple[str, str, Any]]:
        for file, name, tensor in stored_tensors(folder):
            if name.startswith("mtp."):
                yield file, name.removeprefix("mtp."), tensor

    @override
    def join(self, embeds: torch.Tensor, hidden: torch.Tensor) -> LayerInput:
        both = torch.cat((self.pre_fc_norm_embedding(embeds)[0], self.pre_fc_norm_hidden(hidden)[0]), 1)
        return self.multiply_part(both), self.parts.layer.input_layernorm, None


def _mtp_config(target: ModelConfig) -> ModelConfig:
    """Return the config of a model's own head, `mtp.*` in its checkpoint; without such a family a ValueError."""
    if target.delta_net is None:
        raise ValueError(
            "method 'mtp' of speculative_config needs a model of a family with mtp.* tensors, Qwen3.5, Qwen3.6 or "
            f"Qwen3-Next, not {target.architecture.name}: use 'ngram', or 'eagle3' with a head for this model"
        )
    # What is quantised here is in 16 bits there.
    is_stored = target.quantization is not None and target.quantization.is_stored
    attending = [layer for layer in target.layers if not layer.is_linear]
    return replace(target, layers=(attending[-1],), quantization=target.quantization if is_stored else None)


def eagle3_tensors(folder: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the tensors of an EAGLE-3 head as `stored_tensors` does, also of a file of torch's, by their usual names.

    ValueError if there are none, or a file is damaged.
    """
    path, stored = os.path.join(folder, _PICKLED), stored_tensors(folder)
    if os.path.isfile(path) and not any(name.endswith(".safetensors") for name in os.listdir(folder)):
        try:
            pickled = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, UnpicklingError) as error:
            raise ValueError(f"{path!r} is damaged: {error}") from error
        stored = ((path, name, tensor) for name, tensor in pickled.items())
    for file, name, tensor in stored:
        # The inverse of `d2t`.
        if not name.endswith("t2d"):
            yield file, name.removeprefix("model.").replace("layers.0.", "midlayer."), tensor


def load_draft_head(
    config: Config, target: CausalLM, folder: str, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> DraftHead | None:
    """Load the head that `speculative_config` asks for; None for other methods, ValueError if it does not fit.

    The folder is the target model's. Drafts may be beyond `max_model_len`.
    """
    speculation = config.speculation
    if speculation is None or speculation.method == "ngram":
        return None
    if not isinstance(target, DecoderForCausalLM):
        raise ValueError(f"method {speculation.method!r} of speculative_config needs model_impl='native': use 'ngram'")
    head: DraftHead
    with torch.device("meta"):
        if speculation.method == "mtp":
            head = MTPHead(target)
        else:
            assert speculation.model is not None
            folder = resolve_model(os.fspath(speculation.model), None)
            names = () if config.load_format == "dummy" else {name for _, name, _ in eagle3_tensors(folder)}
            head = Eagle3Head(folder, target, names)
    size = target.communicator.size
    own, wanted = ([shard_of(one.config, rank, size).heads for rank in range(size)] for one in (head, target))
    if own != wanted:
        raise ValueError(
            f"the head in {folder!r} has {head.config.num_kv_heads} KV heads, the model {target.config.num_kv_heads}: "
            f"tensor_parallel_size={size} would give their ranks other heads; use another size"
        )
    try:
        head.weights = head.load(config, folder, max_model_len + config.num_drafts, dtype, device)
    except ValueError as error:
        advice = "give a folder with all of the head, or use method 'ngram' of speculative_config"
        raise ValueError(f"the head in {folder!r}: {error}; {advice}") from error
    return head
