"""LFM2, dense or with experts: gated short convolutions, with attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from typing_extensions import override

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.weights.slices import WeightTarget


class Lfm2ForCausalLM(DecoderForCausalLM):
    """A decoder of layers with a short convolution, and of layers with attention."""

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
