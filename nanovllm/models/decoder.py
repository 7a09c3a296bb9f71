"""The decoder of Llama (Touvron et al. 2023, arXiv:2302.13971) and of the families that follow its design.

Pre-norm, with grouped-query attention, rotary embedding and a SwiGLU MLP. Differences between families are rows of
`MODELS` in `configs/model.py`, differences between layers are in `ModelConfig.layers`. Activations are
[num_tokens, size]: sequences are concatenated, and only attention knows their boundaries.

Hidden states are a pair `(x, residual)`, as in `layers.layernorm`: the first linear layer of a branch also computes the
norm before it, and the last one the residual addition after it, in one fused kernel where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import nn

from nanovllm.kernels.attention.options import AttentionOptions
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import AllReduceRMSNorm, RMSNorm, normalize_projections
from nanovllm.layers.linear import MLP, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.base import CausalLM
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import ModelShard
from nanovllm.quantization.weight import Stream
from nanovllm.weights.slices import LoadableVector

if TYPE_CHECKING:
    from nanovllm.configs.model import LayerConfig, ModelConfig
    from nanovllm.configs.rope import RopeConfig
    from nanovllm.layers.fused_experts import SparseMLP
    from nanovllm.layers.mixers import ParallelMixer
    from nanovllm.layers.state import StateLayer

    Mixer: TypeAlias = "SelfAttention | StateLayer | ParallelMixer"
    FeedForward: TypeAlias = "MLP | SparseMLP"


class SelfAttention(nn.Module):
    """Self-attention of one layer; in_features: elements of its input if they are not the hidden size."""

    def __init__(
        self, config: ModelConfig, shard: ModelShard, communicator: Communicator, rotary: RotaryEmbedding,
        options: AttentionOptions, prefix: str,
        *, in_features: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        quant_config = config.quantization
        hidden_size, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        architecture = config.architecture
        qkv_bias, qk_norm, has_gates = architecture.qkv_bias, architecture.qk_norm, architecture.gates_attention
        self.qkv_proj = QKVParallelLinear(
            in_features or hidden_size, head_dim, shard.heads.times(2 if has_gates else 1), shard.kv_heads, qkv_bias,
            quant_config=quant_config, prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            shard.heads.times(head_dim), hidden_size, architecture.out_bias,
            quant_config=quant_config, prefix=f"{prefix}.o_proj",
        )  # fmt: skip
        self.sinks = LoadableVector(shard.heads) if architecture.has_sinks else None
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm == "heads":
            self.q_norm, self.k_norm = (RMSNorm(head_dim, eps, architecture.norm_offset) for _ in range(2))
        # Fused into attention's kernels.
        self.head_norms = self.q_norm, self.k_norm
        self.normalize: Callable[[torch.Tensor], None] | None = None
        if qk_norm == "projections":
            self.q_norm = q_norm = RMSNorm(shard.heads.times(head_dim), eps)
            self.k_norm = k_norm = RMSNorm(shard.kv_heads.times(head_dim), eps)
            self.normalize = partial(normalize_projections, q_norm=q_norm, k_norm=k_norm, communicator=communicator)
        scales = None
        if quant_config is not None and quant_config.kv_scales is not None:
            from nanovllm.quantization.fp8 import KVCacheScales  # noqa: PLC0415

            scales = KVCacheScales(shard.kv_heads, quant_config.kv_scales)
        scale = None if config.multipliers is None else config.multipliers.attention
        self.attn = Attention(
            shard.kv_heads.size, head_dim, eps, rotary, options, scales, scale=scale, has_gates=has_gates,
            sinks=self.sinks,
        )  # fmt: skip

    def forward(
        self, x: torch.Tensor, norm: AllReduceRMSNorm | None, residual: torch.Tensor | None, positions: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> Stream:  # fmt: skip
        """Return attention of `norm(x + residual)`, and the residual to add it to, of `rows`, or of all tokens."""
        rope = self.attn.rope(*self.head_norms)
        if self.attn.should_project(self.qkv_proj.weight, len(positions), rope):
            if norm is not None:
                x, residual = norm(x, residual)
            out = self.attn.attend(self.attn.project(x, self.qkv_proj.weight, rope, positions), rows)
        else:
            qkv, residual = self.qkv_proj(x, norm, residual)
            if self.normalize is not None:
                self.normalize(qkv)
            out = self.attn(qkv, rope, positions, rows)
        if rows is not None and residual is not None:
            residual = residual[rows]
        return self.o_proj(out, residual)

    def store(
        self, x: torch.Tensor, norm: AllReduceRMSNorm | None, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> None:
        """Store the keys and values of `norm(x + residual)`, and compute nothing else."""
        assert self.normalize is None
        if norm is not None:
            x, _ = norm(x, residual)
        self.attn.store(x, self.qkv_proj.weight, self.attn.rope(*self.head_norms), positions)


class DecoderLayer(nn.Module):
    """Attention, or a layer with a state in its place, and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, communicator: Communicator, attention: Mixer, mlp: FeedForward) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        size, eps, offset = config.hidden_size, config.rms_norm_eps, config.architecture.norm_offset
        self.input_layernorm = AllReduceRMSNorm(size, eps, communicator, offset)
        self.post_attention_layernorm = AllReduceRMSNorm(size, eps, communicator, offset)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> Stream:
        """Return x and residual, [num_tokens, hidden_size], after the layer, of `rows` or of all tokens."""
        x, residual = self.self_attn(x, self.input_layernorm, residual, positions, rows)
        return self.mlp(x, self.post_attention_layernorm, residual)


class PostNormDecoderLayer(nn.Module):
    """A layer with the same parts, whose outputs are normalised before they are added."""

    def __init__(self, config: ModelConfig, communicator: Communicator, attention: Mixer, mlp: FeedForward) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.post_attention_layernorm = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, communicator)
        self.post_feedforward_layernorm = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, communicator)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> Stream:
        """Return x and residual, [num_tokens, hidden_size], after the layer, of `rows` or of all tokens."""
        total = x if residual is None else residual + x
        branch, _ = self.self_attn(total, None, None, positions, rows)
        branch, _ = self.post_attention_layernorm(branch)
        total = (total if rows is None else total[rows]) + branch
        branch, _ = self.mlp(total)
        branch, _ = self.post_feedforward_layernorm(branch)
        return branch, total


class SingleDecoderLayer(nn.Module):
    """Attention, a layer with a state, or an MLP, after a norm and added to the residual stream; mixes: not an MLP."""

    def __init__(
        self, config: ModelConfig, communicator: Communicator, mixer: Mixer | FeedForward, mixes: bool
    ) -> None:
        super().__init__()
        self.norm = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, communicator)
        self.mixer, self.mixes = mixer, mixes

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> Stream:
        """Return x and residual, [num_tokens, hidden_size], after the layer, of `rows` or of all tokens."""
        if self.mixes:
            return self.mixer(x, self.norm, residual, positions, rows)
        if rows is not None:
            x, residual = x[..., rows, :], None if residual is None else residual[rows]
        return self.mixer(x, self.norm, residual)


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: ModelConfig, shard: ModelShard, communicator: Communicator) -> None:
        super().__init__()
        is_post_norm = config.architecture.norms == "after"
        self.embed_tokens = VocabParallelEmbedding(shard.vocab, config.hidden_size)
        # Otherwise the next norm adds up the ranks' parts.
        self.reducer = communicator if is_post_norm else Communicator()
        ropes = {layer.rope for layer in config.layers if layer.attends}
        rotaries = {rope: RotaryEmbedding(config.head_dim, rope) for rope in ropes}
        self.layers = nn.ModuleList()
        for number, layer in enumerate(config.layers):
            prefix = f"model.layers.{number}"
            self.layers.append(make_layer(config, shard, communicator, layer, rotaries, prefix))
        # The outputs of the branches' norms are already equal on all ranks.
        last = Communicator() if is_post_norm else communicator
        offset = config.architecture.norm_offset
        self.norm = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, last, offset)
        self.multiplier = 1.0 if config.multipliers is None else config.multipliers.embedding

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, hidden_states: dict[int, Any]
    ) -> Stream:
        """Return x and residual before the last norm, of `rows` or of all tokens; see `CausalLM.forward`."""
        x, residual = self.reducer.all_reduce_rows(self.embed_tokens(token_ids)), None
        if self.multiplier != 1:
            x = x * self.multiplier
        dtype, last = x.dtype, len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            # There are fewer layers while kernels are compiled.
            if tapped := [number for number in hidden_states if min(number, last) == i]:
                # A norm computes the sum as well, but it is then overwritten.
                total = self.norm.communicator.all_reduce(x.sum(0) if x.dim() == 3 else x.clone())
                total = total if residual is None else total + residual
                hidden_states |= dict.fromkeys(tapped, total.to(dtype))
            # After the last layer's attention only the rows to sample from are needed.
            x, residual = layer(x, residual, positions, rows if i == last else None)
        return x, residual


def make_layer(
    config: ModelConfig, shard: ModelShard, communicator: Communicator, layer: LayerConfig,
    rotaries: dict[RopeConfig | None, RotaryEmbedding], prefix: str, in_features: int | None = None,
) -> nn.Module:  # fmt: skip
    """Return a decoder layer; prefix: its name in the checkpoint; in_features: see `SelfAttention`."""
    is_single = config.architecture.has_single_blocks
    mixer: Mixer | None = None
    if layer.is_linear:
        from nanovllm.layers.mixers import ParallelMixer, make_mixer  # noqa: PLC0415

        mixer = make_mixer(config, shard, prefix)
    if layer.attends:
        rotary, options = rotaries[layer.rope], AttentionOptions(window=layer.window)
        name = f"{prefix}.{'mixer' if is_single else 'self_attn'}"
        attention = SelfAttention(config, shard, communicator, rotary, options, name, in_features=in_features)
        mixer = attention if mixer is None else ParallelMixer(attention, mixer)
    if is_single and mixer is not None:
        return SingleDecoderLayer(config, communicator, mixer, mixes=True)
    name = f"{prefix}.{'mixer' if is_single else 'mlp'}"
    mlp: FeedForward
    if layer.has_experts:
        from nanovllm.layers.fused_experts import SparseMLP  # noqa: PLC0415

        mlp = SparseMLP(config, shard, communicator, name)
    else:
        mlp = MLP(config, shard.intermediate, name)
    if mixer is None:
        return SingleDecoderLayer(config, communicator, mlp, mixes=False)
    kind = PostNormDecoderLayer if config.architecture.norms == "after" else DecoderLayer
    return kind(config, communicator, mixer, mlp)


class DecoderForCausalLM(CausalLM):
    """A decoder with its LM head."""

    fused_modules_mapping: Mapping[str, tuple[str, ...]] = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")}
    packed_modules_mapping: ClassVar = {
        "q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"), "up_proj": ("gate_up_proj", "up"),
        "w1": ("gate_up_proj", "gate"), "w3": ("gate_up_proj", "up"), "w2": ("down_proj", None),
    }  # fmt: skip
    renamed_modules: ClassVar = {"block_sparse_moe": "mlp", "router": "gate"}

    def __init__(self, config: ModelConfig, communicator: Communicator) -> None:
        super().__init__(config, communicator)
        self.model = Decoder(config, self.shard, communicator)
        embedding = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(self.shard.vocab, config.hidden_size, embedding, config.quantization)
