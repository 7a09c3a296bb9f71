"""Qwen3-Next, and the text half of Qwen3.5: gated delta nets, with gated attention in every fourth layer."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from nanovllm.configs.model import ModelConfig
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.parallel.communicator import Communicator
from nanovllm.weights.slices import WeightTarget

_SKIPPED = ("visual.", "mtp.")
"""Towers, and layers that predict more than the next token."""


class HybridForCausalLM(DecoderForCausalLM):
    """A decoder of layers with a state, and of layers with attention."""

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
