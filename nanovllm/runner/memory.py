"""How much of the device's memory the KV cache gets."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable

import torch

from nanovllm.config import Config
from nanovllm.distributed.communicator import Communicator
from nanovllm.runner.messages import NewRequest, PromptChunk, PromptScores, SamplingOptions, ScheduledBatch
from nanovllm.sampling_params import SamplingParams

_CPU_MEMORY_SHARE = 0.1
_CPU_MEMORY_LIMIT = 2**30
_MAX_SLOTS = 2**31
"""KV slots are int32 (`slot_mapping`)."""


def free_memory(device: torch.device) -> int:
    """Return the bytes free on the GPU, once torch has given back what it holds for nothing; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def num_cache_blocks(
    config: Config,
    device: torch.device,
    communicator: Communicator,
    *,
    free_before: int,
    block_bytes: int,
    most_blocks: int,
    run_step: Callable[[bool], object],
) -> int:
    """Return the blocks of the KV cache, as many on every rank.

    Args:
        config: the engine's settings.
        device: where the cache is to be; the current one, if it is a GPU.
        communicator: joins the ranks.
        free_before: `free_memory` before anything was loaded.
        block_bytes: bytes of a block on this rank.
        most_blocks: what all running sequences take at their longest.
        run_step: runs the step that takes the most memory, without or with all that requests can ask for.

    Raises:
        ValueError: not one block fits, or the config asks for more than `slot_mapping` can address.
    """
    num_blocks, max_blocks = config.num_kvcache_blocks, _MAX_SLOTS // config.kvcache_block_size
    if num_blocks > max_blocks:
        raise ValueError(
            f"num_kvcache_blocks={num_blocks} is over the limit of {max_blocks} blocks of {config.kvcache_block_size} "
            f"tokens: a cache has at most {_MAX_SLOTS} slots"
        )
    if num_blocks != -1:
        return num_blocks
    if device.type == "cuda":
        # The communicator's memory is the engine's too, and was taken before.
        budget = _gpu_budget(config, device, free_before + communicator.device_bytes, run_step)
    else:
        # More is of use to the prefix cache alone, and the memory is other programs' too.
        budget = min(cpu_cache_budget() // communicator.size, most_blocks * block_bytes)
    if budget < block_bytes:
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (budget, budget)
        raise ValueError(
            f"{budget / 2**30:.2f} GiB are left for the KV cache, less than one block of {block_bytes / 2**30:.3f} "
            f"GiB; with the weights loaded {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free: raise "
            f"gpu_memory_utilization ({config.gpu_memory_utilization}), lower max_num_batched_tokens, or end what else "
            "uses the device"
        )
    return communicator.all_reduce_min(min(budget // block_bytes, max_blocks))


def _gpu_budget(config: Config, device: torch.device, free_before: int, run_step: Callable[[bool], object]) -> int:
    """Bytes for the cache: this engine's share of the GPU less what it takes besides, measured by largest steps.

    Other processes' memory is not charged to the engine; it only limits what is there to take.
    """
    plain = _peak(device, lambda: run_step(False))
    spare = max(plain, _peak(device, lambda: run_step(True)))
    if not config.enforce_eager:
        # The captured graphs keep a pool of their own, no larger than the peak of a plain step.
        spare += plain
    free, total = free_memory(device), torch.cuda.mem_get_info(device)[1]
    return int(min(total * config.gpu_memory_utilization - (free_before - free), free) - spare)


def _peak(device: torch.device, run: Callable[[], object]) -> int:
    """Return the bytes that a step takes from the GPU."""
    free_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    reserved = torch.cuda.memory_reserved(device)
    run()
    return torch.cuda.max_memory_reserved(device) - reserved


def cpu_cache_budget() -> int:
    """Return the bytes for a KV cache in host memory: a tenth of the free memory, at most 1 GiB."""
    # Windows has no `sysconf`.
    if not hasattr(os, "sysconf"):
        return _CPU_MEMORY_LIMIT
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * _CPU_MEMORY_SHARE), _CPU_MEMORY_LIMIT)


def profiling_batch(
    config: Config, vocab_size: int, max_blocks: int, max_model_len: int, extra: bool
) -> ScheduledBatch:
    """Return the batch that takes the most memory: the whole token budget in prompts, sampled in every slot.

    extra: every request asks for a bias, penalties, cutoffs, and log-probabilities of its output and of its prompt, and
        writes to a block that it shares.
    """
    num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_running
    lens = [num_tokens // num_seqs + (slot < num_tokens % num_seqs) for slot in range(num_seqs)]
    prompts = [array("i", [0]) * min(n, max_model_len) for n in lens]
    most = config.most_logprobs(vocab_size)
    params = SamplingParams(logit_bias={0: 1.0}, presence_penalty=1.0, top_p=0.5, logprobs=most, prompt_logprobs=0)
    options = SamplingOptions(params, array("i", [0])) if extra else None
    scores = [PromptScores(0, prompt, most) if extra else None for prompt in prompts]
    return ScheduledBatch(
        new_requests=[NewRequest(slot, [0] * max_blocks, 1, 1.0, 0, options) for slot in range(num_seqs)],
        chunks=[PromptChunk(slot, 0, prompt, False, True, scores[slot]) for slot, prompt in enumerate(prompts)],
        sampled_seq_ids=list(range(num_seqs)),
        sample_apart=extra,
        scored_seq_ids=[(slot, 1) for slot in range(num_seqs)] if extra else [],
        block_copies=[(0, 0)] * num_seqs if extra else [],
    )
