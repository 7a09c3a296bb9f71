"""Models by the architecture name of their config.json; their table is `MODELS` in `model_config.py`."""

from __future__ import annotations

from importlib import import_module

import torch

from nanovllm.distributed.communicator import Communicator
from nanovllm.model_config import Architecture, ModelConfig
from nanovllm.models.base import CausalLM


def model_class(architecture: Architecture) -> type[CausalLM]:
    """Import the class that a row of the table names."""
    file, _, name = architecture.model.partition(".")
    found: type[CausalLM] = getattr(import_module(f"{__name__}.{file}"), name)
    return found


def make_model(config: ModelConfig, communicator: Communicator) -> CausalLM:
    """Return this rank's shard of the model of a config, its parameters not yet filled."""
    return model_class(config.architecture)(config, communicator)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a config's whole model; tied ones count once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make_model(config, Communicator()).parameters())
