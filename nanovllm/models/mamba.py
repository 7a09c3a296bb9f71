"""Bamba, Granite 4 and Nemotron-H: Mamba-2, with attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from typing_extensions import override

from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.weight import Stream
from nanovllm.weights.slices import WeightTarget

if TYPE_CHECKING:
    from nanovllm.configs.model import ModelConfig
    from nanovllm.models.decoder import Mixer


class Relu2MLP(nn.Module):
    """An MLP of squares of positive values (So et al. 2021, arXiv:2109.08668); size: its columns of this rank."""

    def __init__(self, config: ModelConfig, size: Shard, prefix: str) -> None:
        super().__init__()
        hidden_size, quant_config = config.hidden_size, config.quantization
        self.up_proj = MergedColumnParallelLinear(
            hidden_size, {None: size}, quant_config=quant_config, prefix=f"{prefix}.up_proj"
        )
        self.down_proj = RowParallelLinear(size, hidden_size, quant_config=quant_config, prefix=f"{prefix}.down_proj")

    def forward(self, x: torch.Tensor, norm: AllReduceRMSNorm, residual: torch.Tensor | None) -> Stream:
        """Return the MLP of `norm(x + residual)`, [num_tokens, hidden_size], and the residual to add it to."""
        up, residual = self.up_proj(x, norm, residual)
        return self.down_proj(up.relu().square(), residual)


class SingleDecoderLayer(nn.Module):
    """Attention, a layer with a state, or an MLP without a gate, after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, communicator: Communicator, mixer: Mixer | Relu2MLP) -> None:
        super().__init__()
        self.norm, self.mixer = AllReduceRMSNorm(config.hidden_size, config.rms_norm_eps, communicator), mixer

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, rows: torch.Tensor | None
    ) -> Stream:
        """Return x and residual, [num_tokens, hidden_size], after the layer, of `rows` or of all tokens."""
        if not isinstance(self.mixer, Relu2MLP):
            return self.mixer(x, self.norm, residual, positions, rows)
        if rows is not None:
            x, residual = x[..., rows, :], None if residual is None else residual[rows]
        return self.mixer(x, self.norm, residual)


class MambaForCausalLM(DecoderForCausalLM):
    """A decoder of layers with Mamba-2, and of layers with attention."""

    fused_modules_mapping: Mapping[str, tuple[str, ...]] = {
        **DecoderForCausalLM.fused_modules_mapping, "in_proj": ("z", "x", "b", "c", "dt"), "conv1d": ("x", "b", "c"),
    }  # fmt: skip
    renamed_modules: ClassVar = {
        "mamba": "self_attn", "feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm",
        "final_layernorm": "norm", "block_sparse_moe": "mlp", "router": "gate", "input_linear": "gate_up_proj",
        "output_linear": "down_proj",
    }  # fmt: skip

    @override
    def weight_targets(self, name: str) -> list[WeightTarget]:
        shared = "mlp" if self.config.experts is None else "mlp.shared_expert"
        name = name.replace(".shared_mlp.", f".{shared}.").replace(".router.layer.", ".router.")
        for projection in ("input_linear", "output_linear"):
            # All experts in one tensor.
            name = name.replace(f"block_sparse_moe.{projection}.weight", f"block_sparse_moe.experts.{projection}")
        return super().weight_targets(name)

    @override
    def compute_logits(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return self._scaled(super().compute_logits(x, residual))

    @override
    def project_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._scaled(super().project_logits(hidden))

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        multipliers = self.config.multipliers
        return logits if multipliers is None else logits / multipliers.logits


class NemotronHForCausalLM(MambaForCausalLM):
    """A decoder of layers with one block each: Mamba-2, attention, or an MLP without a gate."""

    packed_modules_mapping: ClassVar = {
        name: target for name, target in MambaForCausalLM.packed_modules_mapping.items() if name != "up_proj"
    }
    renamed_modules: ClassVar = {"embeddings": "embed_tokens", "norm_f": "norm"}

    @override
    def weight_targets(self, name: str) -> list[WeightTarget]:
        # Layers that predict more than the next token.
        return [] if name.startswith("mtp.") else super().weight_targets(name.replace("backbone.", "model.", 1))
