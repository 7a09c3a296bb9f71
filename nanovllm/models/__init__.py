"""Makes and loads models by the architecture name in config.json, from the table `MODELS` in `configs/model.py`."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import torch

from nanovllm.config import Config
from nanovllm.configs.model import Architecture, ModelConfig
from nanovllm.models.base import CausalLM
from nanovllm.parallel.communicator import Communicator
from nanovllm.weights.files import stored_tensors
from nanovllm.weights.model_weights import ModelWeights


def model_class(architecture: Architecture) -> type[CausalLM]:
    """Import the class named in a row of the table."""
    file, _, name = architecture.model.partition(".")
    found: type[CausalLM] = getattr(import_module(f"{__name__}.{file}"), name)
    return found


def make_model(config: ModelConfig, communicator: Communicator) -> CausalLM:
    """Return this rank's shard of a config's model, with uninitialised parameters."""
    return model_class(config.architecture)(config, communicator)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a config's whole model; tied parameters count once."""
    with torch.device("meta"):
        parameters = list(make_model(config, Communicator()).parameters())
    # A byte has two weights in four bits.
    return sum(one.numel() * (2 if one.dtype == torch.uint8 else 1) for one in parameters)


def load_model(
    model_config: ModelConfig, communicator: Communicator, config: Config, folder: str, max_model_len: int,
    dtype: torch.dtype, device: torch.device,
) -> tuple[CausalLM, ModelWeights]:  # fmt: skip
    """Make this rank's shard of a model for `max_model_len` positions, and load it; see `CausalLM.load`."""
    if config.load_format == "dummy" and model_config.quantization is not None:
        # Random weights are quantised after they are drawn.
        model_config = replace(model_config, quantization=model_config.quantization.unstored())
    with torch.device("meta"):
        # Report errors in the config before opening files of weights.
        model = make_model(model_config, communicator)
        if config.load_format != "dummy" and (with_head := with_stored_head(model_config, folder)) is not model_config:
            model = make_model(with_head, communicator)
    return model, model.load(config, folder, max_model_len, dtype, device)


def with_stored_head(model_config: ModelConfig, folder: str) -> ModelConfig:
    """Return the config, with a quantised LM head if the files have one: the checkpoint's `ignore` may not tell."""
    quantization = model_config.quantization
    if quantization is None or not quantization.is_stored:
        return model_config
    quantised = "lm_head.weight_scale", "lm_head.qweight"
    if not any(name.startswith(quantised) for _, name, _ in stored_tensors(folder)):
        return model_config
    return replace(model_config, quantization=replace(quantization, has_head=True))
