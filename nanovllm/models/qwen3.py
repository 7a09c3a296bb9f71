"""Qwen3, dense (Qwen Team 2025, arXiv:2505.09388), and with other switches Qwen2 and Qwen2.5.

Pre-norm decoder with grouped-query attention, rotary embedding and a SwiGLU MLP. Qwen3 normalises each head of queries
and keys; Qwen2 has biases on them instead. Activations are [num_tokens, size]: sequences lie one after the other, and
only attention knows where one ends.

Of several ranks each holds a shard of the model. The results of embedding, attention and MLP are then one rank's part
of a sum, which the norm that follows takes first; the residual stream is the same on all.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import ModelShard, shard_of
from nanovllm.kernels.qkv_rope_store import should_use_fused_qkv
from nanovllm.layers.attention import Attention
from nanovllm.layers.embed_head import Embedding
from nanovllm.layers.layernorm import AllReduceRMSNorm, RMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import cos_sin_table
from nanovllm.model_config import ModelConfig


class Qwen3Attention(nn.Module):
    """Self-attention of one layer."""

    def __init__(self, config: ModelConfig, shard: ModelShard) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_outputs = shard.kv_heads.times(config.head_dim)
        q_outputs = shard.heads.times(config.head_dim)
        self.qkv_proj = MergedColumnParallelLinear(
            config.hidden_size, {"q": q_outputs, "k": kv_outputs, "v": kv_outputs}, bias=config.qkv_bias
        )
        self.o_proj = RowParallelLinear(q_outputs, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.attn = Attention(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm: AllReduceRMSNorm,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from the normalised `x + residual`; returns the result and `x + residual`, of `rows` or of all.

        Or their sum and None, as all that follow may; no residual stands for zero.

        x, residual: [num_tokens, hidden_size], or x in parts of a sum; positions: [num_tokens]; cos_sin: [max_position,
        head_dim].
        """
        weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        if norms is not None and should_use_fused_qkv(x, weight, bias, self.head_dim):
            normed, residual = norm(x, residual)
            out = self.attn.project_and_attend(normed, weight, norms, positions, cos_sin, rows).flatten(1)
        else:
            qkv, residual = self.qkv_proj.project(x, residual, norm)
            # [num_tokens, num_heads + 2 * num_kv_heads, head_dim], of this rank's heads
            qkv = qkv.view(len(positions), -1, self.head_dim)
            out = self.attn(qkv, norms, positions, cos_sin, rows).flatten(1)
        if rows is not None:
            residual = residual[rows]
        return self.o_proj(out, residual)


class Qwen3MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, shard: ModelShard) -> None:
        super().__init__()
        size = shard.intermediate
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, {"gate": size, "up": size}, gated=True)
        self.down_proj = RowParallelLinear(size, config.hidden_size)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: AllReduceRMSNorm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Work on the normalised `x + residual`, [num_tokens, hidden_size]; returns the result and `x + residual`."""
        x, residual = self.gate_up_proj.project(x, residual, norm)
        return self.down_proj(x, residual)


class Qwen3DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm that also adds the branch before it to the residual stream."""

    def __init__(self, config: ModelConfig, shard: ModelShard, communicator: Communicator) -> None:
        super().__init__()
        self.self_attn = Qwen3Attention(config, shard)
        self.mlp = Qwen3MLP(config, shard)
        self.input_layernorm = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, communicator)
        self.post_attention_layernorm = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, communicator)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the MLP's output and the residual stream that it is still to be added to, for `rows` or for all."""
        x, residual = self.self_attn(x, residual, self.input_layernorm, positions, cos_sin, rows)
        return self.mlp(x, residual, self.post_attention_layernorm)


class Qwen3Model(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: ModelConfig, shard: ModelShard, communicator: Communicator) -> None:
        super().__init__()
        self.embed_tokens = Embedding(shard.vocab, config.hidden_size)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, shard, communicator) for _ in range(config.num_layers))
        self.norm = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, communicator)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """token_ids, positions: [num_tokens] -> the last branch and the residual of `rows`; `norm` is for their sum."""
        x, residual = self.embed_tokens(token_ids), None
        for i, layer in enumerate(self.layers, 1):
            # What the last layer stores is all that anything needs of the other rows.
            x, residual = layer(x, residual, positions, cos_sin, rows if i == len(self.layers) else None)
        return x, residual


class Qwen3ForCausalLM(nn.Module):
    """One rank's shard of the model. Parameters are made on whatever device is the default, and filled by the loader.

    Args:
        config: the shape of the whole.
        communicator: says which rank this is, and joins it with the others.
    """

    # Projections of the checkpoint that are one here: name there -> (name here, shard).
    packed_modules_mapping: ClassVar[dict[str, tuple[str, str]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }

    def __init__(self, config: ModelConfig, communicator: Communicator) -> None:
        super().__init__()
        self.config = config
        self.shard = shard_of(config, communicator.rank, communicator.size)
        self.model = Qwen3Model(config, self.shard, communicator)
        tied = config.tie_word_embeddings
        self.lm_head = self.model.embed_tokens if tied else Embedding(self.shard.vocab, config.hidden_size)
        self.cos_sin: torch.Tensor | None = None

    def init_rope(self, max_position: int, device: torch.device) -> None:
        """Tabulate the rotary embedding for positions below `max_position`."""
        config = self.config
        self.cos_sin = cos_sin_table(config.head_dim, max_position, config.rope_theta, config.yarn, device)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """token_ids, positions: [num_tokens] int32 -> the last branch and the residual, which `compute_logits` takes.

        Most rows of a prompt give no token: `rows` says which do, all if None.
        """
        assert self.cos_sin is not None
        return self.model(token_ids, positions, self.cos_sin, rows)

    def compute_logits(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """x, residual: of num_rows tokens, from `forward` -> [num_rows, tokens of this rank]."""
        return self.lm_head.logits(x, residual, self.model.norm)
