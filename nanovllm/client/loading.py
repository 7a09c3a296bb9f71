"""Loads a model: its files for front ends, and the engine, in this process or in others."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.configs.model import ModelConfig
from nanovllm.engine.engine import Engine
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.text.constraints import ConstraintFactory
from nanovllm.text.tokenizer import load_tokenizer
from nanovllm.utils.device import DeviceInfo, resolve_device, resolve_dtype
from nanovllm.utils.folder_faults import read_json
from nanovllm.utils.host import check_swap_space
from nanovllm.utils.hub import resolve_model


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder, in the Hub's layout, and the data read from it; `max_model_len` is capped by the model's."""

    folder: str
    model_config: ModelConfig
    tokenizer: Any
    max_model_len: int
    eos_token_ids: frozenset[int]
    constraints: ConstraintFactory


def read_model_files(config: Config) -> ModelFiles:
    """Find a model's folder, downloaded if necessary, and read all but the weights; ValueError if that fails."""
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
    known_eos = [*model_config.eos_token_ids, *([] if tokenizer_eos is None else [tokenizer_eos])]
    # Ids outside the vocabulary, which some configs have, are never sampled, and cannot be masked.
    eos_token_ids = frozenset(token for token in known_eos if token < model_config.vocab_size)
    constraints = ConstraintFactory(tokenizer, model_config.vocab_size, eos_token_ids)
    return ModelFiles(folder, model_config, tokenizer, max_model_len, eos_token_ids, constraints)


def _lacks_head(folder: str, model_config: ModelConfig) -> bool:
    """Whether a folder's model is for embeddings only, and published without its LM head."""
    names = read_json(os.path.join(folder, "config.json")).get("architectures") or [""]
    is_trunk = str(names[0]).endswith("Model") and not str(names[0]).endswith("LMHeadModel")
    if model_config.has_tied_head or not (is_trunk or os.path.isfile(os.path.join(folder, "modules.json"))):
        return False
    from nanovllm.weights.files import stored_tensors  # noqa: PLC0415

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


@dataclass(frozen=True)
class LoadedModel:
    """An engine, or replicas of it, with its model's files and its device."""

    engine: Engine
    files: ModelFiles
    device: DeviceInfo


def load_model(config: Config) -> LoadedModel:
    """Load a model; a single engine into this process. Replicas exit with the engine that represents them.

    ValueError for too few GPUs, or see `LLM`; RuntimeError if a rank or a replica has failed.
    """
    if config.data_parallel_size == 1:
        return _load_here(config)
    from nanovllm.client.engine_process import EngineProcesses  # noqa: PLC0415
    from nanovllm.client.replicated_engine import ReplicatedEngine  # noqa: PLC0415

    processes = EngineProcesses(config)
    with processes.stopped_on_error():
        # While the ranks import.
        files = read_model_files(config)
        processes.load(files.folder)
        connections = [process.connect() for process in processes.all]
        exit_texts = [process.exit_text for process in processes.all]
        engine = ReplicatedEngine(config, connections, exit_texts, processes.exit)
    return LoadedModel(engine, files, engine.device)


def _load_here(config: Config) -> LoadedModel:
    """Load a model into this process and the ranks that it starts."""
    # Front ends of engines in other processes need no runner.
    from nanovllm.runner.model_runner import ModelRunner  # noqa: PLC0415
    from nanovllm.runner.parallel_runner import ParallelRunner, start_ranks  # noqa: PLC0415

    check_swap_space(config.swap_space)
    with start_ranks(config) as ranks:
        files = read_model_files(config)
        make_runner = ModelRunner if ranks is None else partial(ParallelRunner, ranks)
        runner = make_runner(config, files.model_config, files.folder, max_model_len=files.max_model_len)
        device = resolve_device(config.device, size=config.tensor_parallel_size)
        dtype = resolve_dtype(config.dtype, files.model_config.dtype, device.type == "cuda")
    engine = LLMEngine(
        config,
        runner,
        vocab_size=files.model_config.vocab_size,
        max_model_len=files.max_model_len,
        eos_token_ids=files.eos_token_ids,
        num_layers=files.model_config.num_layers if files.model_config.hf is None else None,
        make_constraint=files.constraints,
        weights=runner.weights_loader(),
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    name = name if config.tensor_parallel_size == 1 else f"{config.tensor_parallel_size} x {name}"
    return LoadedModel(engine, files, DeviceInfo(device, dtype, name))
