"""How much of the device's memory is left for the KV cache."""

from __future__ import annotations

from array import array

import torch

from nanovllm.config import Config
from nanovllm.runner.messages import NewRequest, PromptChunk, ScheduledBatch


def check_cache_budget(budget: int, block_bytes: int, config: Config, device: torch.device) -> None:
    """Check that the bytes left for the KV cache hold one block.

    Raises:
        ValueError: they do not.
    """
    if budget >= block_bytes:
        return
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (budget, budget)
    raise ValueError(
        f"{budget / 2**30:.2f} GiB are left for the KV cache, less than one block of {block_bytes / 2**30:.3f} GiB; "
        f"with the weights loaded {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free: raise gpu_memory_utilization "
        f"({config.gpu_memory_utilization}), lower max_num_batched_tokens, or end what else uses the device"
    )


def profiling_batch(config: Config, max_blocks: int, max_model_len: int) -> ScheduledBatch:
    """Return the batch that takes the most memory: the whole token budget in prompts, sampled in every slot."""
    num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_running
    lens = [num_tokens // num_seqs + (slot < num_tokens % num_seqs) for slot in range(num_seqs)]
    return ScheduledBatch(
        new_requests=[NewRequest(slot, [0] * max_blocks, 1, 1.0, 0) for slot in range(num_seqs)],
        chunks=[
            PromptChunk(slot, 0, array("i", [0]) * min(n, max_model_len), False, True) for slot, n in enumerate(lens)
        ],
        sampled_seq_ids=list(range(num_seqs)),
    )
