"""Models by the architecture name of their config.json."""

from __future__ import annotations

import torch

from nanovllm.distributed.communicator import Communicator
from nanovllm.model_config import ModelConfig
from nanovllm.models.base import CausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[CausalLM]] = {"Qwen3ForCausalLM": Qwen3ForCausalLM, "Qwen2ForCausalLM": Qwen3ForCausalLM}


def make_model(config: ModelConfig, communicator: Communicator) -> CausalLM:
    """Return this rank's shard of the model of a config, its parameters not yet filled."""
    return MODELS[config.architecture.name](config, communicator)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a config's whole model; tied ones count once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make_model(config, Communicator()).parameters())
