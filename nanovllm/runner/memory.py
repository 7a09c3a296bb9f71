"""Sizes the KV cache by the memory of the device, and its copies in host memory by `swap_space`."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable

import torch

from nanovllm.config import Config
from nanovllm.parallel.communicator import Communicator
from nanovllm.runner.cuda_graph import max_draft_rows
from nanovllm.runner.messages import CacheKind, Chunk, NewRequest, PagedCache, ScheduledBatch
from nanovllm.runner.step_outputs import LOGITS_BYTES
from nanovllm.sampling.state import pool_rows
from nanovllm.utils.host import available_memory

_CPU_MEMORY_SHARE = 0.1
_CPU_MEMORY_LIMIT = 2**30
_MAX_SLOTS = 2**31
"""KV slots are int32 (`slot_mapping`)."""


def free_memory(device: torch.device) -> int:
    """Return the bytes free on the GPU, after emptying torch's cache; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def num_cache_blocks(
    config: Config, device: torch.device, communicator: Communicator,
    *, free_before: int, num_groups: int, num_state_blocks: int, block_bytes: int, most_blocks: int,
    run_step: Callable[[], object], extra_bytes: int,
) -> int:  # fmt: skip
    """Return the number of blocks of the KV cache, equal on all ranks.

    Args:
        config, device, communicator: of the engine; a GPU is the current device.
        free_before: `free_memory` before anything was loaded.
        num_groups: groups of attention layers; the config's blocks hold tokens in all of them.
        num_state_blocks, block_bytes: blocks of one sequence's state; bytes of a block of one group on this rank.
        most_blocks: blocks of all running sequences at their longest, if no group had a window.
        run_step: runs the step that takes the most memory with temperature as the only sampling option.
        extra_bytes: additional memory of a step with all options; see `most_extra_bytes`.

    Raises:
        ValueError: not one block of each group fits, or the config asks for more than `slot_mapping` can address.
    """
    num_blocks, max_blocks = config.num_kvcache_blocks, _MAX_SLOTS // config.kvcache_block_size
    if num_blocks > max_blocks // num_groups:
        limit = max_blocks // num_groups
        raise ValueError(
            f"num_kvcache_blocks={num_blocks} is over the limit of {limit} blocks of {config.kvcache_block_size} "
            f"tokens: a cache has at most {_MAX_SLOTS} slots"
        )
    if num_blocks != -1:
        return num_blocks * num_groups
    if device.type == "cuda":
        # The communicator's memory belongs to the engine, and was allocated before.
        budget = _gpu_budget(config, device, free_before + communicator.device_bytes, run_step, extra_bytes)
    else:
        # More would only serve the prefix cache, and other programs need memory too.
        budget = min(cpu_cache_budget() // communicator.size, most_blocks * block_bytes)
    least = (num_groups + num_state_blocks) * block_bytes
    if budget < least:
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (budget, budget)
        raise ValueError(
            f"{budget / 2**30:.2f} GiB are left for the KV cache, less than one block of {least / 2**30:.3f} "
            f"GiB; with the weights loaded {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free: raise "
            f"gpu_memory_utilization ({config.gpu_memory_utilization}), lower max_num_batched_tokens, or end what else "
            "uses the device"
        )
    return communicator.all_reduce_min(min(budget // block_bytes, max_blocks))


def _gpu_budget(
    config: Config, device: torch.device, free_before: int, run_step: Callable[[], object], extra_bytes: int
) -> int:
    """Bytes for the cache: this engine's share of the GPU less its other memory, measured by a largest step."""
    free_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    reserved_before_run = torch.cuda.memory_reserved(device)
    run_step()
    peak = torch.cuda.max_memory_reserved(device) - reserved_before_run
    free, total = free_memory(device), torch.cuda.mem_get_info(device)[1]
    # The captured graphs keep a pool of their own, no larger than the peak of an eager step.
    spare = peak * (1 if config.enforce_eager else 2) + extra_bytes
    return int(min(total * config.gpu_memory_utilization - (free_before - free), free) - spare)


def most_extra_bytes(config: Config, vocab_size: int, copied_bytes_per_row: int) -> int:
    """Return the additional bytes of steps whose requests use all options; a test on the GPU compares.

    Calculated, since running such a step would load, and perhaps compile, kernels that most engines never need: on an
    H200 0.4 s, or 3.8 s, of every start. copied_bytes_per_row: bytes of keys or values, in one layer of each group,
    that a row copies at once.
    """
    num_rows, row_bytes, num_drafts = config.max_num_running, 4 * vocab_size, max_draft_rows(config) * config.num_drafts
    # Biases and counts, whose tables grow by doubling while the old ones are copied.
    tables = 2 * pool_rows(num_rows) * row_bytes * 3 // 2
    # One at a time: copies of shared blocks; slices of the prompts' logits, raw, edited, and as candidates; and the
    # edited rows of all samples, with the results of cutoffs and log-probabilities.
    copies, prompts = num_rows * copied_bytes_per_row, 3 * LOGITS_BYTES
    samples = 4 * (num_rows + num_drafts) * row_bytes
    return tables + max(copies, prompts, samples)


def cpu_cache_budget() -> int:
    """Return the bytes for a KV cache in host memory: a tenth of the free memory, at most 1 GiB."""
    # Windows has no `sysconf`, by which memory is measured.
    is_known = hasattr(os, "sysconf")
    return min(int(available_memory() * _CPU_MEMORY_SHARE), _CPU_MEMORY_LIMIT) if is_known else _CPU_MEMORY_LIMIT


def num_host_slots(config: Config, communicator: Communicator, kind: CacheKind, block_bytes: int) -> int:
    """Return the number of blocks that `swap_space` holds, equal on all ranks.

    Args:
        config, communicator: of the engine.
        kind, block_bytes: kind of the first group of layers; bytes of a block on this rank.

    Raises:
        ValueError: not one block fits, or sequences of this model do not keep all their blocks.
    """
    if isinstance(kind, PagedCache) and kind.window is not None:
        raise ValueError(
            f"swap_space={config.swap_space}: all layers of this model have sliding windows (of {kind.window} "
            "tokens), and such a model's blocks are not kept in the host's memory"
        )
    num_bytes = int(config.swap_space * 2**30 / communicator.size)
    num_slots = communicator.all_reduce_min(num_bytes // block_bytes)
    if not num_slots:
        raise ValueError(
            f"swap_space={config.swap_space} GiB holds no block: one has {block_bytes / 2**30:.4f} GiB on each of "
            f"{communicator.size} ranks"
        )
    return num_slots


def profiling_batch(config: Config, max_blocks: int, num_groups: int, max_model_len: int) -> ScheduledBatch:
    """Return the batch that takes the most memory: the whole token budget in prompts, sampled in every slot.

    It stores no keys and values.
    """
    num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_running
    lens = [num_tokens // num_seqs + (slot < num_tokens % num_seqs) for slot in range(num_seqs)]
    prompts = [array("i", [0]) * min(n, max_model_len) for n in lens]
    return ScheduledBatch(
        new_requests=[NewRequest(slot, [[0] * max_blocks] * num_groups, 1, 1.0, 0) for slot in range(num_seqs)],
        chunks=[Chunk(slot, 0, prompt, store=False, samples=True) for slot, prompt in enumerate(prompts)],
        sampled_seq_ids=list(range(num_seqs)),
    )
