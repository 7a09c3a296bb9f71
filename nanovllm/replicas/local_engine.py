"""An engine in this process, made of its settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch

from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.prefix_files import PrefixFiles
from nanovllm.kernels.compilers import Compilers
from nanovllm.models.model_digest import model_digest
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

    def prefix_files(self, folder: str) -> PrefixFiles:
        """Return the files of a folder that are this model's; a RuntimeError if it has other weights by now."""
        if not self.engine.has_own_weights:
            raise RuntimeError("the model has other weights than its folder, which files of prefixes belong to")
        return PrefixFiles(self.runner, folder, self._digest, self.engine.config.kvcache_block_size)

    @cached_property
    def _digest(self) -> bytes:
        config, files = self.engine.config, self.files
        return model_digest(config, files.model_config, files.folder, str(self.dtype), files.max_model_len)


def make_local_engine(config: Config, compilers: Compilers | None = None) -> LocalEngine:
    """Load a model into this process and the ranks that it starts; see `LLM` for what it raises.

    Args:
        config: of one engine.
        compilers: that a process with threads has made before it had any.
    """
    check_swap_space(config.swap_space)
    # The compilers come first: what follows begins CUDA, and threads.
    with compilers or Compilers(config.device) as opened, start_ranks(config) as ranks:
        files = read_model_files(config)
        make_runner = ModelRunner if ranks is None else partial(ParallelRunner, ranks)
        runner = make_runner(
            config, files.model_config, files.folder, max_model_len=files.max_model_len, compilers=opened
        )
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
    local = LocalEngine(engine, runner, files, device, dtype)
    if config.prefix_cache is not None:
        engine.block_manager.source = local.prefix_files(config.prefix_cache)
    return local
