"""Decoders whose layers, or some of them, keep a state: gated delta nets, short convolutions and Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from typing_extensions import override

from nanovllm.configs.model import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.parallel.communicator import Communicator
from nanovllm.weights.slices import Slices, WeightTarget

_SKIPPED = ("visual.", "mtp.")
"""Vision towers, and layers of multi-token prediction (MTP)."""


class DeltaNetForCausalLM(DecoderForCausalLM):
    """Qwen3-Next, and the text half of Qwen3.5: gated delta nets, with gated attention in every fourth layer."""

    packed_modules_mapping: ClassVar = DecoderForCausalLM.packed_modules_mapping | {
        "in_proj_z": ("in_proj_qkvz", "z"), "in_proj_b": ("in_proj_ba", "b"), "in_proj_a": ("in_proj_ba", "a"),
    }  # fmt: skip
    renamed_modules: ClassVar = {"linear_attn": "self_attn", "in_proj_qkv": "in_proj_qkvz", "out_proj": "o_proj"}

    def __init__(self, config: ModelConfig, communicator: Communicator) -> None:
        super().__init__(config, communicator)
        assert config.delta_net is not None
        mapping: dict[str, tuple[str, ...]] = {"conv1d": ("q", "k", "v")}
        if config.architecture.delta_net == "parts":
            mapping |= {"in_proj_qkvz": ("q", "k", "v")}
        else:
            for module, names in (("in_proj_qkvz", "qkvz"), ("in_proj_ba", "ba")):
                heads = range(config.delta_net.num_key_heads)
                mapping[module] = tuple(f"{name}.{head}" for head in heads for name in names)
        self.fused_modules_mapping = {**DecoderForCausalLM.fused_modules_mapping, **mapping}

    @override
    def weight_targets(self, name: str) -> list[WeightTarget]:
        # The text half of a larger model has a prefix.
        name = name.removeprefix("model.").removeprefix("language_model.")
        return [] if name.startswith(_SKIPPED) else super().weight_targets(name)


class Lfm2ForCausalLM(DecoderForCausalLM):
    """LFM2, dense or with experts: gated short convolutions, with attention in some layers."""

    fused_modules_mapping: Mapping[str, tuple[str, ...]] = {
        **DecoderForCausalLM.fused_modules_mapping, "in_proj": ("b", "c", "x"),
    }  # fmt: skip
    renamed_modules: ClassVar = {
        "conv": "self_attn", "feed_forward": "mlp", "operator_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "embedding_norm": "norm", "q_layernorm": "q_norm",
        "k_layernorm": "k_norm", "out_proj": "o_proj",
    }  # fmt: skip

    @override
    def weight_targets(self, name: str) -> list[WeightTarget]:
        name = name.replace(".conv.conv.", ".conv.conv1d.").replace(".expert_bias", ".gate.expert_bias")
        return super().weight_targets(name)


class MambaForCausalLM(DecoderForCausalLM):
    """Bamba and Granite 4: Mamba-2, with attention in some layers."""

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
    """Nemotron-H: one block a layer, which is Mamba-2, attention, or an MLP without a gate, or a mixture of them."""

    packed_modules_mapping: ClassVar = {
        name: target for name, target in MambaForCausalLM.packed_modules_mapping.items() if name != "up_proj"
    }
    renamed_modules: ClassVar = {
        "embeddings": "embed_tokens", "norm_f": "norm", "out_proj": "o_proj", "shared_experts": "shared_expert",
        "e_score_correction_bias": "expert_bias",
    }  # fmt: skip

    @override
    def weight_targets(self, name: str) -> list[WeightTarget]:
        # Layers of multi-token prediction.
        return [] if name.startswith("mtp.") else super().weight_targets(name.replace("backbone.", "model.", 1))


class FalconH1ForCausalLM(MambaForCausalLM):
    """Falcon-H1: attention beside Mamba-2 in each layer, and constant factors, which become part of weights."""

    renamed_modules: ClassVar = MambaForCausalLM.renamed_modules | {
        "mamba": "self_attn.mamba", "self_attn": "self_attn.attention",
    }  # fmt: skip

    @override
    def weight_slices(self) -> Slices:
        assert self.config.multipliers is not None
        slices, factors = super().weight_slices(), self.config.multipliers.weights
        for target, part in slices.items():
            module = ".".join(target.param.split(".")[-3:-1])
            slices[target] = replace(part, factor=factors.get((module, target.part), 1.0))
        return slices
