"""Models by the architecture name of their config.json."""

from __future__ import annotations

from nanovllm.distributed.communicator import Communicator
from nanovllm.model_config import ModelConfig
from nanovllm.models.base import CausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[CausalLM]] = {"Qwen3ForCausalLM": Qwen3ForCausalLM, "Qwen2ForCausalLM": Qwen3ForCausalLM}


def make_model(config: ModelConfig, communicator: Communicator) -> CausalLM:
    """Return this rank's shard of the model of a config, its parameters not yet filled."""
    return MODELS[config.architecture.name](config, communicator)
