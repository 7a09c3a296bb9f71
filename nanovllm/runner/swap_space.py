"""Sizes the host cache, and measures the cost of loading and of computing."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from nanovllm.config import Config
from nanovllm.parallel.communicator import Communicator
from nanovllm.runner.host_blocks import BlockCopies, CudaBlockCopies, HostBlocks
from nanovllm.runner.kv_cache import KVCache
from nanovllm.runner.memory import prompt_batch
from nanovllm.runner.messages import CacheKind, HostMemory, PagedCache, ScheduledBatch

_GIB = 2**30
_LINK_BYTES = 32 * 2**20
"""Bytes copied to measure the link."""
_CUDA_TOKENS, _CPU_TOKENS = 2304, 8
"""Prompt tokens of the measured step, on CUDA at least this number: larger than any captured step, so that none is
captured for this. A CPU computes few in an acceptable start time, and loads any number faster.
"""
_PROMPT_TOKENS = 2048
"""Tokens of each prompt of that step."""
_LAUNCH_BOUND_GAIN = 1.25
"""If doubling the tokens raises the rate by more than this factor, launches bound the smaller step."""


def make_swap_space(
    config: Config, communicator: Communicator, current_cache: Callable[[], KVCache], cache_kinds: list[CacheKind],
    run_step: Callable[[ScheduledBatch], None],
) -> HostMemory:  # fmt: skip
    """Keep a cache's blocks in host memory until it is unbound; takes some 0.2 s.

    `current_cache` returns the cache, which is still empty; a different one after a sleep. `run_step` waits for a step.

    Raises:
        ValueError: not one block fits, or sequences of this model do not keep all their blocks.
    """
    kind = cache_kinds[0]
    if isinstance(kind, PagedCache) and kind.window is not None:
        raise ValueError(
            f"swap_space={config.swap_space}: all layers of this model have sliding windows (of {kind.window} "
            "tokens), and such a model's blocks are not kept in the host's memory"
        )
    kv_cache = current_cache()
    block_bytes = kv_cache.block_bytes
    num_slots = communicator.all_reduce_min(int(config.swap_space * _GIB / communicator.size) // block_bytes)
    if not num_slots:
        raise ValueError(
            f"swap_space={config.swap_space} GiB holds no block: one has {block_bytes / _GIB:.4f} GiB on each of "
            f"{communicator.size} ranks"
        )
    page = next(kv_cache.pages())
    prompt_tokens = min(_PROMPT_TOKENS, config.max_model_len)
    most_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * prompt_tokens)
    num_tokens = min(_CUDA_TOKENS if page.is_cuda else _CPU_TOKENS, most_tokens)

    def seconds(num_tokens: int, num_runs: int = 1) -> float:
        lens = [min(prompt_tokens, num_tokens - start) for start in range(0, num_tokens, prompt_tokens)]
        batch = prompt_batch(lens, -(-prompt_tokens // config.kvcache_block_size), len(cache_kinds))
        fastest = _fastest(num_runs, lambda: run_step(batch))
        # All ranks must run the same steps.
        return communicator.all_reduce_min(int(fastest * 1e9)) / 1e9

    # The first runs on a GPU load modules, and capture.
    step_seconds = seconds(1, num_runs=3 if page.is_cuda else 1)
    if page.is_cuda:
        seconds(num_tokens)
    tokens_per_second = _prompt_rate(seconds, num_tokens, most_tokens if page.is_cuda else num_tokens)
    link_rate = _link_rate(page)
    keep_blocks(kv_cache, num_slots)

    def host() -> HostBlocks:
        copies = current_cache().copies
        assert copies is not None
        return copies.host

    return HostMemory(
        num_slots, lambda: host().num_ready_slots, lambda: host().has_all_slots, block_bytes, link_rate,
        tokens_per_second, step_seconds,
    )  # fmt: skip


def keep_blocks(kv_cache: KVCache, num_slots: int) -> None:
    """Give a cache `num_slots` slots in host memory, until it is unbound."""
    stacks = kv_cache.stacks()
    blocks = HostBlocks(num_slots, kv_cache.block_bytes, stacks[0].device)
    kv_cache.copies = (CudaBlockCopies if stacks[0].is_cuda else BlockCopies)(stacks, blocks)


def _prompt_rate(seconds: Callable[[int], float], num_tokens: int, most_tokens: int) -> float:
    """Return the rate of prompts with `num_tokens` tokens in total, or with more if launches bound that step."""
    rate = num_tokens / seconds(num_tokens)
    while num_tokens < most_tokens:
        num_tokens = min(2 * num_tokens, most_tokens)
        before, rate = rate, num_tokens / seconds(num_tokens)
        if rate <= _LAUNCH_BOUND_GAIN * before:
            return max(before, rate)
    return rate


def _link_rate(page: torch.Tensor) -> float:
    """Return the bytes per second copied between a cache and host memory."""
    on_device = page[: max(1, _LINK_BYTES // page[0].nbytes)]
    on_host = torch.empty(on_device.shape, dtype=page.dtype, pin_memory=page.is_cuda)

    def copy() -> None:
        on_host.copy_(on_device, non_blocking=page.is_cuda)
        if page.is_cuda:
            torch.cuda.synchronize(page.device)

    return on_host.nbytes / _fastest(3, copy)


def _fastest(num_runs: int, run: Callable[[], None]) -> float:
    """Return the seconds of the fastest of some runs."""
    seconds = []
    for _ in range(num_runs):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
