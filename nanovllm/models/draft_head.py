"""Drafting heads: one decoder layer that continues a text from a target model's hidden states.

At position i a head takes the embedding of token i + 1 and the hidden state of token i, and predicts token i + 2; its
keys lie where the target model's of token i do. It feeds itself: its own hidden state takes the place of the larger
model's for the next draft.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.model import Architecture, ModelConfig
from nanovllm.kernels import ops
from nanovllm.kernels.attention.options import AttentionOptions
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import MLP, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.base import CausalLM
from nanovllm.models.decoder import DecoderForCausalLM, SelfAttention, make_layer
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import Shard, inputs_shard, shard_of, vocab_shard
from nanovllm.quantization.weight import Stream
from nanovllm.utils.checks import check_int
from nanovllm.utils.folder_faults import read_json
from nanovllm.utils.hub import resolve_model
from nanovllm.weights.files import stored_tensors
from nanovllm.weights.model_weights import ModelWeights
from nanovllm.weights.slices import LoadableVector, WeightTarget

if TYPE_CHECKING:
    from nanovllm.config import Config

_EAGLE3 = Architecture("LlamaForCausalLMEagle3", windows="none", model="draft_head.Eagle3Head")
_EAGLE3_NAMES = (_EAGLE3.name, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
"""Names of the architecture in the config.json of published heads."""
_LEAST_LAYERS = 6
"""Of a model whose hidden states EAGLE-3 reads at its usual layers, which are then three."""
_PICKLED = "pytorch_model.bin"


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 head for one model.

    Attributes:
        model: hyperparameters of its layer.
        layer_ids: see `DraftHead`.
        draft_vocab_size: tokens that it drafts.
        norms_residual: whether the residual stream begins with the norm of the hidden states.
    """

    model: ModelConfig
    layer_ids: tuple[int, ...]
    draft_vocab_size: int
    norms_residual: bool

    @classmethod
    def from_folder(cls, folder: str, target: ModelConfig) -> Eagle3Config:
        """Read the config.json of a head for a model, or raise a ValueError."""
        stored = read_json(os.path.join(folder, "config.json"))
        name = (stored.get("architectures") or [""])[0]
        if name not in _EAGLE3_NAMES or stored.get("model_type") != "llama":
            raise ValueError(
                f"the head in {folder!r} has architecture {name!r} and model_type {stored.get('model_type')!r}, which "
                f"is not supported: only 'llama' and {', '.join(_EAGLE3_NAMES)}"
            )
        from transformers import LlamaConfig  # noqa: PLC0415

        model = ModelConfig.from_hf(LlamaConfig(**(stored | {"architectures": ["LlamaForCausalLM"]})))
        _check_fits(folder, model, target)
        if model.quantization is not None:
            raise ValueError(f"the head in {folder!r} is quantised, which is not supported: use one of 16 bits")
        draft_vocab_size = stored.get("draft_vocab_size") or model.vocab_size
        return cls(
            replace(model, architecture=_EAGLE3, tie_word_embeddings=False),
            _tapped(stored, target.num_layers),
            check_int("draft_vocab_size", draft_vocab_size, 1, model.vocab_size),
            bool(stored.get("norm_before_residual")),
        )


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
    architecture = replace(target.architecture, model="draft_head.MTPHead")
    model = replace(target, architecture=architecture, layers=(attending[-1],))
    return model if is_stored else replace(model, quantization=None)


def _check_fits(folder: str, head: ModelConfig, target: ModelConfig) -> None:
    for name in ("hidden_size", "vocab_size", "num_heads"):
        own, wanted = getattr(head, name), getattr(target, name)
        if own != wanted:
            raise ValueError(
                f"the head in {folder!r} has {name}={own}, the model {wanted}: a head drafts only for the model that "
                "it was trained for"
            )
    if head.num_layers != 1:
        raise ValueError(f"the head in {folder!r} has num_hidden_layers={head.num_layers}: only 1 is supported")


def _tapped(stored: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the numbers of the hidden states that an EAGLE-3 head reads in a model of `num_layers`."""
    name = "eagle_aux_hidden_state_layer_ids"
    nested = (stored.get("eagle_config") or {}).get(name)
    # The nested ones name layers whose outputs are read, the next layer's inputs.
    numbers = stored.get(name) or [number + 1 for number in nested or ()]
    if not numbers:
        if num_layers < _LEAST_LAYERS:
            raise ValueError(f"an EAGLE-3 head without {name} needs a model of {_LEAST_LAYERS} layers or more")
        numbers = [2, num_layers // 2, num_layers - 3]
    return tuple(check_int(f"{name} of the head", number, 0, num_layers - 1) for number in numbers)


class DraftHead(CausalLM):
    """A drafting head for a target model, which lends it the embedding and the LM head that it has not itself.

    Attributes:
        layer_ids: the target model's hidden states that it reads, numbered as in transformers: what layer i takes, or
            with the number of layers, the last norm's output.
        weights: loaded once; only sleep releases them.
    """

    packed_modules_mapping: ClassVar = DecoderForCausalLM.packed_modules_mapping
    fused_modules_mapping: Mapping[str, tuple[str, ...]] = DecoderForCausalLM.fused_modules_mapping
    weights: ModelWeights

    def __init__(self, config: ModelConfig, layer_ids: tuple[int, ...], target: CausalLM) -> None:
        super().__init__(config, target.communicator)
        self.layer_ids = layer_ids
        # In a tuple, since their weights are the target model's.
        self._shared: tuple[Any, ParallelLMHead] = target.model.embed_tokens, target.lm_head

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what `advance` takes of the target model's hidden states, [num_tokens, states * hidden_size]."""
        return hidden

    @abstractmethod
    def store(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Store the layer's keys and values of each token, and compute nothing else; see `advance`."""

    @abstractmethod
    def advance(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on each token's hidden state, and the embedding of the token after it.

        embeds, hidden: [num_tokens, hidden_size], embeds from `embed`; positions: see `CausalLM.forward`. Returns what
        `draft` takes, and the hidden state for the next draft, [num_tokens, hidden_size] each.
        """

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] -> [num_tokens, hidden_size]; of several ranks each returns its part of a sum."""
        embeds: torch.Tensor = self._shared[0](token_ids)
        return embeds

    def draft(self, states: torch.Tensor) -> torch.Tensor:
        """Return the likeliest tokens after states from `advance`, [num_rows] int64, the same on every rank."""
        return self._likeliest(states, self._shared[1], self.shard.vocab)

    def _likeliest(self, states: torch.Tensor, lm_head: ParallelLMHead, vocab: Shard) -> torch.Tensor:
        # Before the product, see `ops.sample`.
        zeros = torch.zeros(len(states) + 1, dtype=torch.int32, device=states.device)
        none, seeds, logits = zeros[:-1], zeros[:2].expand(len(states), 2), lm_head(states)[0]
        found = ops.sample(logits, none.view(torch.float32), seeds, none, vocab.start, vocab.num_present)
        return self.communicator.all_reduce_argmax(*found)

    @override
    def stored_name(self, target: WeightTarget) -> str:
        return super().stored_name(target).removeprefix("model.")

    @override
    def fill(self, weights: ModelWeights, folder: str) -> None:
        """Load all tensors of the head; others, or a lack of some, are a ValueError."""
        try:
            weights.check_folder(folder, strict=True)
        except ValueError as error:
            advice = "give a folder with all of the head, or use method 'ngram' of speculative_config"
            raise ValueError(f"the head in {folder!r} does not fit: {error}; {advice}") from error
        weights.write_folder(folder)


class Eagle3Layer(nn.Module):
    """The layer of an EAGLE-3 head, whose attention takes the norms of embedding and hidden state side by side."""

    def __init__(self, config: Eagle3Config, head: DraftHead) -> None:
        super().__init__()
        model, shard, communicator = config.model, head.shard, head.communicator
        size, eps, self.norms_residual = model.hidden_size, model.rms_norm_eps, config.norms_residual
        # Hidden states are whole on every rank.
        self.hidden_norm = AllReduceRMSNorm(size, eps, Communicator())
        self.input_layernorm = AllReduceRMSNorm(size, eps, communicator)
        self.post_attention_layernorm = AllReduceRMSNorm(size, eps, communicator)
        rotary = RotaryEmbedding(model.head_dim, model.layers[0].rope)
        self.self_attn = SelfAttention(
            model, shard, communicator, rotary, AttentionOptions(), "midlayer.self_attn", in_features=2 * size
        )
        self.mlp = MLP(model, shard.intermediate, "midlayer.mlp")

    def join(self, embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attention takes, [num_tokens, 2 * hidden_size], and the norm of the hidden states."""
        normed, _ = self.hidden_norm(hidden)
        return torch.cat((self.input_layernorm(embeds)[0], normed), 1), normed

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> Stream:
        """Return x and residual, [num_tokens, hidden_size], after the layer; see `DraftHead.advance`."""
        both, normed = self.join(embeds, hidden)
        x, residual = self.self_attn(both, None, normed if self.norms_residual else hidden, positions, None)
        return self.mlp(x, self.post_attention_layernorm, residual)


class Eagle3Model(nn.Module):
    """All of an EAGLE-3 head but its LM head. It may have an embedding, and a part of the vocabulary.

    d2t: what is added to a token of the head's vocabulary to make it one of the target model's.
    """

    def __init__(self, config: Eagle3Config, head: DraftHead, names: Collection[str]) -> None:
        super().__init__()
        size, eps = config.model.hidden_size, config.model.rms_norm_eps
        self.fc = _partial_linear(len(config.layer_ids) * size, config.model, head, "fc")
        self.midlayer = Eagle3Layer(config, head)
        self.norm = AllReduceRMSNorm(size, eps, head.communicator)
        has_embedding, has_part = "embed_tokens.weight" in names, config.draft_vocab_size < config.model.vocab_size
        self.embed_tokens = VocabParallelEmbedding(head.shard.vocab, size) if has_embedding else None
        tokens = Shard.whole(config.draft_vocab_size)
        self.d2t = LoadableVector(tokens, torch.int64) if has_part or "d2t" in names else None


class Eagle3Head(DraftHead):
    """An EAGLE-3 head (Li et al. 2025, arXiv:2503.01840), which reads several layers' hidden states.

    names: of the tensors that are stored; none for random weights.
    """

    model: Eagle3Model

    def __init__(self, config: Eagle3Config, target: CausalLM, names: Collection[str]) -> None:
        super().__init__(config.model, config.layer_ids, target)
        self.model = Eagle3Model(config, self, names)
        self.vocab = vocab_shard(config.draft_vocab_size, self.communicator.rank, self.communicator.size)
        self.lm_head = ParallelLMHead(self.vocab, config.model.hidden_size, None)

    @override
    def weight_targets(self, name: str) -> list[WeightTarget]:
        # The inverse of `d2t`.
        return [] if name == "t2d" else super().weight_targets(name)

    @override
    def folder_tensors(self, folder: str) -> Iterator[tuple[str, Any]]:
        return eagle3_tensors(folder)

    @override
    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.communicator.all_reduce_rows(_multiply_part(hidden, self.model.fc))

    @override
    def store(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        layer = self.model.midlayer
        layer.self_attn.store(layer.join(embeds, hidden)[0], positions)

    @override
    def advance(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.norm(*self.model.midlayer(embeds, hidden, positions))

    @override
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(token_ids) if self.model.embed_tokens is None else self.model.embed_tokens(token_ids)

    @override
    def draft(self, states: torch.Tensor) -> torch.Tensor:
        drafted = self._likeliest(states, self.lm_head, self.vocab)
        return drafted if self.model.d2t is None else drafted + self.model.d2t.values[drafted]


class MTPModel(nn.Module):
    """The layer that Qwen3.5 and Qwen3-Next were trained with to predict the token after the next."""

    def __init__(self, config: ModelConfig, head: DraftHead) -> None:
        super().__init__()
        size, eps, offset = config.hidden_size, config.rms_norm_eps, config.architecture.norm_offset
        self.fc = _partial_linear(2 * size, config, head, "mtp.fc")
        self.pre_fc_norm_embedding = AllReduceRMSNorm(size, eps, head.communicator, offset)
        self.pre_fc_norm_hidden = AllReduceRMSNorm(size, eps, Communicator(), offset)
        layer, shard = config.layers[0], head.shard
        rotaries = {layer.rope: RotaryEmbedding(config.head_dim, layer.rope)}
        self.layers = nn.ModuleList([make_layer(config, shard, head.communicator, layer, rotaries, "mtp.layers.0")])
        self.norm = AllReduceRMSNorm(size, eps, head.communicator, offset)

    def join(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's input, [num_tokens, hidden_size]; with several ranks, this rank's part of the sum."""
        both = torch.cat((self.pre_fc_norm_embedding(embeds)[0], self.pre_fc_norm_hidden(hidden)[0]), 1)
        return _multiply_part(both, self.fc)


class MTPHead(DraftHead):
    """The head in a model's own checkpoint, `mtp.*` (multi-token prediction); it reads and feeds normed states."""

    model: MTPModel

    def __init__(self, target: CausalLM) -> None:
        super().__init__(_mtp_config(target.config), (target.config.num_layers,), target)
        self.model = MTPModel(self.config, self)

    @override
    def folder_tensors(self, folder: str) -> Iterator[tuple[str, Any]]:
        for _, name, tensor in stored_tensors(folder):
            if name.startswith("mtp."):
                yield name.removeprefix("mtp."), tensor

    @override
    def store(self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        layer: Any = self.model.layers[0]
        normed, _ = layer.input_layernorm(self.model.join(embeds, hidden))
        layer.self_attn.store(normed, positions)

    @override
    def advance(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        model = self.model
        states, _ = model.norm(*model.layers[0](model.join(embeds, hidden), None, positions, None))
        return states, states


def _partial_linear(in_features: int, config: ModelConfig, head: DraftHead, prefix: str) -> RowParallelLinear:
    """Return a product whose inputs are divided among the ranks."""
    inputs = inputs_shard(config, in_features, head.communicator.rank, head.communicator.size)
    return RowParallelLinear(inputs, config.hidden_size, quant_config=config.quantization, prefix=prefix)


def _multiply_part(x: torch.Tensor, linear: RowParallelLinear) -> torch.Tensor:
    """Return this rank's part of a product with x, [num_tokens, all inputs], which every rank has."""
    return linear(x[:, linear.inputs.start : linear.inputs.stop].contiguous())[0]


def eagle3_tensors(folder: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of an EAGLE-3 head, in safetensors or a file of torch's, by the names of the first ones.

    ValueError if there are none, or a file is damaged.
    """
    path = os.path.join(folder, _PICKLED)
    stored: Iterable[tuple[str, Any]]
    if os.path.isfile(path) and not any(name.endswith(".safetensors") for name in os.listdir(folder)):
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True).items()
        except (RuntimeError, UnpicklingError) as error:
            raise ValueError(f"{path!r} is damaged: {error}") from error
    else:
        stored = ((name, tensor) for _, name, tensor in stored_tensors(folder))
    for name, tensor in stored:
        yield name.removeprefix("model.").replace("layers.0.", "midlayer."), tensor


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
            folder = resolve_model(speculation.model, None)
            is_dummy = config.load_format == "dummy"
            names = () if is_dummy else {name for name, _ in eagle3_tensors(folder)}
            head = Eagle3Head(Eagle3Config.from_folder(folder, target.config), target, names)
    size = target.communicator.size
    own, wanted = ([shard_of(one.config, rank, size).heads for rank in range(size)] for one in (head, target))
    if own != wanted:
        raise ValueError(
            f"the head in {folder!r} has {head.config.num_kv_heads} KV heads, the model {target.config.num_kv_heads}: "
            f"tensor_parallel_size={size} would give their ranks other heads; use another size"
        )
    head.weights = head.load(config, folder, max_model_len + config.num_drafts, dtype, device)
    return head
