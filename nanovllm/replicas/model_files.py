"""What a front end knows of a model without its weights: its folder, shape, tokenizer and limits."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import Any

from nanovllm.config import Config
from nanovllm.model_config import ModelConfig
from nanovllm.text.structured_output import ConstraintFactory
from nanovllm.text.tokenizer import load_tokenizer
from nanovllm.utils.checks import read_json
from nanovllm.utils.hub import resolve_model
from nanovllm.weights.files import stored_tensors


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder, and what was read from it.

    Attributes:
        folder: in the Hub's layout.
        model_config: the model's shape.
        tokenizer: transformers'; None if there is none.
        max_model_len: most tokens of one request: the setting, capped by the model's own limit.
        eos_token_ids: tokens that end an output.
        constraints: makes the constraints of outputs.
    """

    folder: str
    model_config: ModelConfig
    tokenizer: Any
    max_model_len: int
    eos_token_ids: frozenset[int]
    constraints: ConstraintFactory


def read_model_files(config: Config) -> ModelFiles:
    """Find a model's folder, fetch it if need be, and read what is no weight.

    Raises:
        ValueError: the model cannot be had or is not supported.
    """
    folder = resolve_model(config.model, config.revision, config.load_format != "dummy", config.trust_remote_code)
    model_config = ModelConfig.from_folder(folder, config.trust_remote_code, config.model_impl)
    if config.load_format != "dummy" and _lacks_head(folder, model_config):
        model_config = model_config.without_head()
    if config.enable_expert_parallel:
        model_config = model_config.with_expert_parallel()
    if config.quantization is not None:
        model_config = model_config.with_quantization(config.quantization)
    max_model_len = min(config.max_model_len, model_config.max_position)
    if max_model_len < config.max_model_len:
        message = f"max_model_len={config.max_model_len} is capped: the model has {max_model_len}"
        warnings.warn(message, stacklevel=4)
    tokenizer = _read_tokenizer(config, folder)
    tokenizer_eos = getattr(tokenizer, "eos_token_id", None)
    eos_token_ids = model_config.eos_token_ids | frozenset([] if tokenizer_eos is None else [tokenizer_eos])
    constraints = ConstraintFactory(tokenizer, model_config.vocab_size, eos_token_ids)
    return ModelFiles(folder, model_config, tokenizer, max_model_len, eos_token_ids, constraints)


def _lacks_head(folder: str, model_config: ModelConfig) -> bool:
    """Whether a folder is of a model for embeddings alone, which is published without its LM head."""
    names = read_json(os.path.join(folder, "config.json")).get("architectures") or [""]
    is_trunk = str(names[0]).endswith("Model") and not str(names[0]).endswith("LMHeadModel")
    if model_config.has_tied_head or not (is_trunk or os.path.isfile(os.path.join(folder, "modules.json"))):
        return False
    return not any(name.endswith("lm_head.weight") for _, name, _ in stored_tensors(folder))


def _read_tokenizer(config: Config, folder: str) -> Any:
    if config.tokenizer is None:
        return load_tokenizer(folder, config.trust_remote_code)
    try:
        other = resolve_model(os.fspath(config.tokenizer), None, weights=False, code=config.trust_remote_code)
    except ValueError as error:
        raise ValueError(f"tokenizer={config.tokenizer!r}: {error}") from error
    tokenizer = load_tokenizer(other, config.trust_remote_code)
    if tokenizer is None:
        raise ValueError(f"tokenizer={config.tokenizer!r} has no tokenizer's files")
    return tokenizer
