"""Models by the architecture name of their config.json; their table is `MODELS` in `model_config.py`."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import torch

from nanovllm.config import Config
from nanovllm.configs.model import Architecture, ModelConfig
from nanovllm.models.base import CausalLM, LoadableCausalLM
from nanovllm.parallel.communicator import Communicator
from nanovllm.weights.files import stored_tensors, weight_files
from nanovllm.weights.model_weights import ModelWeights
from nanovllm.weights.slices import LoadableModule


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


def load_model(
    model_config: ModelConfig,
    communicator: Communicator,
    config: Config,
    folder: str,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalLM:
    """Make this rank's shard of a model for `max_model_len` positions, and fill it as `config.load_format` says.

    Raises:
        ValueError: weights that do not fit; see `ModelWeights.load_folder`.
    """
    if config.load_format == "dummy" and model_config.quantization is not None:
        # What is drawn is quantised.
        model_config = replace(model_config, quantization=model_config.quantization.unstored())
    with torch.device("meta"):
        # What is wrong with a config is said before a file of weights is looked at.
        model = make_model(model_config, communicator)
        if config.load_format != "dummy" and (with_head := with_stored_head(model_config, folder)) is not model_config:
            model = make_model(with_head, communicator)
    if isinstance(model, LoadableCausalLM):
        if config.load_format != "dummy":
            weight_files(folder)
        model.load(config, folder, max_model_len, dtype, device)
        return model
    for module in model.modules():
        if isinstance(module, LoadableModule):
            module.allocate(dtype, device)
    weights = ModelWeights(model, device, communicator)
    if config.load_format == "dummy":
        weights.draw(config.seed or 0)
    else:
        weights.load_folder(folder)
    model.tabulate_rope(max_model_len, device)
    return model


def with_stored_head(model_config: ModelConfig, folder: str) -> ModelConfig:
    """Return the config of a quantised checkpoint with what its files say of the LM head, since `ignore` need not."""
    quantization = model_config.quantization
    if quantization is None or not quantization.is_stored:
        return model_config
    if not any(name.startswith("lm_head.weight_scale") for _, name, _ in stored_tensors(folder)):
        return model_config
    return replace(model_config, quantization=replace(quantization, has_head=True))
