"""An engine in this process, made of its settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.replicas.model_files import ModelFiles, read_model_files
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.utils.device import resolve_device, resolve_dtype
from nanovllm.utils.host_memory import check_swap_space
from nanovllm.workers.parallel_runner import ParallelRunner, start_ranks


@dataclass(frozen=True)
class LocalEngine:
    """An engine of this process with what it was made of.

    Attributes:
        engine: it.
        runner: what runs its batches.
        files: of its model.
        device: where the model runs; of several ranks, the first one's.
        dtype: of weights and KV cache.
    """

    engine: LLMEngine
    runner: ModelRunner | ParallelRunner
    files: ModelFiles
    device: torch.device
    dtype: torch.dtype


def make_local_engine(config: Config) -> LocalEngine:
    """Load a model into this process and the ranks that it starts; see `LLM` for what it raises."""
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
        make_constraint=files.constraints,
        weights=runner,
    )
    return LocalEngine(engine, runner, files, device, dtype)
