"""Bamba, Granite 4, Nemotron-H and Falcon-H1: Mamba-2, with attention in some layers, or next to it in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from typing_extensions import override

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.weights.slices import WeightSlice, WeightTarget


class MambaForCausalLM(DecoderForCausalLM):
    """A decoder of layers with Mamba-2, and of layers with attention."""

    fused_modules_mapping: Mapping[str, tuple[str, ...]] = {
        **DecoderForCausalLM.fused_modules_mapping, "in_proj": ("z", "x", "b", "c", "dt"), "conv1d": ("x", "b", "c"),
    }  # fmt: skip
    renamed_modules: ClassVar = {
        "mamba": "self_attn", "feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm",
        "final_layernorm": "norm", "block_sparse_moe": "mlp", "router": "gate", "input_linear": "gate_up_proj",
        "output_linear": "down_proj", "out_proj": "o_proj",
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
    """A decoder of layers with one block each: Mamba-2, attention, or an MLP without a gate, or a mixture of them."""

    packed_modules_mapping: ClassVar = {
        name: target for name, target in MambaForCausalLM.packed_modules_mapping.items() if name != "up_proj"
    }
    renamed_modules: ClassVar = {
        "embeddings": "embed_tokens", "norm_f": "norm", "out_proj": "o_proj", "shared_experts": "shared_expert",
        "e_score_correction_bias": "expert_bias",
    }  # fmt: skip

    @override
    def weight_targets(self, name: str) -> list[WeightTarget]:
        # Layers that predict more than the next token.
        return [] if name.startswith("mtp.") else super().weight_targets(name.replace("backbone.", "model.", 1))


class FalconH1ForCausalLM(MambaForCausalLM):
    """A decoder of layers with both attention and Mamba-2, and of constant factors, which become part of weights."""

    renamed_modules: ClassVar = MambaForCausalLM.renamed_modules | {
        "mamba": "self_attn.mamba", "self_attn": "self_attn.attention",
    }  # fmt: skip

    @override
    def weight_slices(self) -> dict[WeightTarget, WeightSlice]:
        assert self.config.multipliers is not None
        slices, factors = super().weight_slices(), self.config.multipliers.weights
        for target, part in slices.items():
            module = ".".join(target.param.split(".")[-3:-1])
            slices[target] = replace(part, factor=factors.get((module, target.part), 1.0))
        return slices
