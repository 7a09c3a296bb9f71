"""The decoder of Llama (Touvron et al. 2023, arXiv:2302.13971) and of the families that took its shape over.

Pre-norm, with grouped-query attention, rotary embedding and a SwiGLU MLP. How families differ stands in rows of
`MODELS` in `model_config.py`: Qwen3 normalises each head of queries and keys, Qwen2 has biases on them, OLMo 2 has its
norms after attention and MLP; and what differs between layers, in `ModelConfig.layers`: sliding windows, rotary
embeddings, and mixtures of experts in the MLP's place. Activations are [num_tokens, size]: sequences lie one after the
other, and only attention knows where one ends.

Norms and linear layers are lazy: they return a deferred result (`Normed`, `Projection`, `DeferredBranch`), and the
layer that takes it runs one fused kernel for both where there is one.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import ModelShard
from nanovllm.kernels.attention.options import AttentionOptions
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.fused_experts import FusedExperts, Router
from nanovllm.layers.layernorm import (
    AllReduceRMSNorm,
    DeferredBranch,
    LinearInput,
    Normed,
    ResidualStream,
    RMSNorm,
)
from nanovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanovllm.layers.qk_norm import NormedQKV, ParallelRMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import ModelConfig
from nanovllm.models.base import CausalLM
from nanovllm.quantization.kv_scales import KVCacheScales


class SelfAttention(nn.Module):
    """Self-attention of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        shard: ModelShard,
        communicator: Communicator,
        rotary: RotaryEmbedding,
        options: AttentionOptions,
        prefix: str,
    ) -> None:
        super().__init__()
        self.communicator = communicator
        quant_config = config.quantization
        hidden_size, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        qkv_bias, qk_norm = config.architecture.qkv_bias, config.architecture.qk_norm
        self.qkv_proj = QKVParallelLinear(
            hidden_size, head_dim, shard.heads, shard.kv_heads, qkv_bias,
            quant_config=quant_config, prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            shard.heads.times(head_dim), hidden_size, quant_config=quant_config, prefix=f"{prefix}.o_proj"
        )
        self.q_norm, self.k_norm = None, None
        if qk_norm == "heads":
            self.q_norm, self.k_norm = RMSNorm(head_dim, eps), RMSNorm(head_dim, eps)
        elif qk_norm == "projections":
            self.q_norm = ParallelRMSNorm(shard.heads.times(head_dim), eps)
            self.k_norm = ParallelRMSNorm(shard.kv_heads.times(head_dim), eps)
        scales = None
        if quant_config is not None and quant_config.kv_scales is not None:
            scales = KVCacheScales(shard.kv_heads, quant_config.kv_scales)
        self.attn = Attention(shard.kv_heads.size, head_dim, eps, rotary, options, scales)

    def forward(self, x: LinearInput, positions: torch.Tensor, rows: torch.Tensor | None) -> DeferredBranch:
        """Attend from x, [num_tokens, hidden_size], at `positions`, [num_tokens]; returns `rows`, or all."""
        qkv, q_norm, k_norm = self.qkv_proj(x), self.q_norm, self.k_norm
        product = None if rows is not None else self.o_proj.weight.rounded_product(qkv.num_rows, x.dtype)
        rounding = None if product is None else product.rounding
        if isinstance(q_norm, ParallelRMSNorm) and isinstance(k_norm, ParallelRMSNorm):
            qkv, q_norm, k_norm = NormedQKV(qkv, (q_norm, k_norm), self.communicator), None, None
        out = self.attn(qkv, q_norm, k_norm, positions, rows, rounding)
        return self.o_proj(out, rows, product)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, shard: ModelShard, prefix: str) -> None:
        super().__init__()
        size, quant_config = shard.intermediate, config.quantization
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, {"gate": size, "up": size}, quant_config=quant_config, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            size, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.down_proj"
        )

    def forward(self, x: LinearInput) -> DeferredBranch:
        """x: [num_tokens, hidden_size] -> the same shape, computed when it is added to the residual stream."""
        return self.down_proj(self.gate_up_proj(x))


class SparseMLP(nn.Module):
    """A mixture of SwiGLU experts, of which a router chooses some for each token."""

    def __init__(self, config: ModelConfig, shard: ModelShard, communicator: Communicator, prefix: str) -> None:
        super().__init__()
        assert config.experts is not None and shard.experts is not None
        self.gate = Router(config.hidden_size, config.experts)
        self.experts = FusedExperts(
            config.hidden_size, shard.experts, communicator,
            quant_config=config.quantization, prefix=f"{prefix}.experts",
        )  # fmt: skip

    def forward(self, x: Normed) -> DeferredBranch:
        """x: [num_tokens, hidden_size] -> the same shape, computed when it is added to the residual stream."""
        rows, routing = self.gate(x)
        return self.experts(rows, routing)


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm, each added to the residual stream."""

    def __init__(
        self, config: ModelConfig, communicator: Communicator, attention: SelfAttention, mlp: MLP | SparseMLP
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, communicator)
        self.post_attention_layernorm = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, communicator)

    def forward(self, x: ResidualStream, positions: torch.Tensor, rows: torch.Tensor | None) -> ResidualStream:
        """x: [num_tokens, hidden_size] -> the same shape, or only `rows`."""
        x += self.self_attn(self.input_layernorm(x), positions, rows)
        x += self.mlp(self.post_attention_layernorm(x))
        return x


class PostNormDecoderLayer(nn.Module):
    """Attention and MLP, each added to the residual stream after a norm."""

    def __init__(
        self, config: ModelConfig, communicator: Communicator, attention: SelfAttention, mlp: MLP | SparseMLP
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.post_attention_layernorm = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, communicator)
        self.post_feedforward_layernorm = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, communicator)

    def forward(self, x: ResidualStream, positions: torch.Tensor, rows: torch.Tensor | None) -> ResidualStream:
        """x: [num_tokens, hidden_size] -> the same shape, or only `rows`."""
        x += self.post_attention_layernorm.of(self.self_attn(x.total(), positions, rows))
        x += self.post_feedforward_layernorm.of(self.mlp(x.total()))
        return x


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: ModelConfig, shard: ModelShard, communicator: Communicator) -> None:
        super().__init__()
        is_post_norm = config.architecture.norms == "after"
        make_layer = PostNormDecoderLayer if is_post_norm else DecoderLayer
        reducer = communicator if is_post_norm else None
        self.embed_tokens = VocabParallelEmbedding(shard.vocab, config.hidden_size, reducer)
        rotaries = {rope: RotaryEmbedding(config.head_dim, rope) for rope in {layer.rope for layer in config.layers}}
        self.layers = nn.ModuleList()
        for number, layer in enumerate(config.layers):
            prefix, options = f"model.layers.{number}", AttentionOptions(window=layer.window)
            attention = SelfAttention(config, shard, communicator, rotaries[layer.rope], options, f"{prefix}.self_attn")
            mlp_prefix, is_sparse = f"{prefix}.mlp", layer.has_experts
            mlp = SparseMLP(config, shard, communicator, mlp_prefix) if is_sparse else MLP(config, shard, mlp_prefix)
            self.layers.append(make_layer(config, communicator, attention, mlp))
        # What norms of branches return is the same on every rank.
        last = Communicator() if is_post_norm else communicator
        self.norm = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, last)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None) -> Normed:
        """token_ids, positions: [num_tokens] -> [num_tokens, hidden_size], or only `rows`."""
        x = ResidualStream(self.embed_tokens(token_ids))
        for i, layer in enumerate(self.layers, 1):
            # After the last layer's attention only the rows to sample from are needed.
            x = layer(x, positions, rows if i == len(self.layers) else None)
        return self.norm(x)


class DecoderForCausalLM(CausalLM):
    """The model with its LM head; see the base class."""

    fused_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q", "k", "v"),
        "gate_up_proj": ("gate", "up"),
    }
    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | None]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
        "w1": ("gate_up_proj", "gate"),
        "w3": ("gate_up_proj", "up"),
        "w2": ("down_proj", None),
    }
    renamed_modules: ClassVar[dict[str, str]] = {"block_sparse_moe": "mlp"}

    def __init__(self, config: ModelConfig, communicator: Communicator) -> None:
        super().__init__(config, communicator)
        self.model = Decoder(config, self.shard, communicator)
        embedding = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(self.shard.vocab, config.hidden_size, embedding, config.quantization)
