"""Computes the requested outputs of prompt chunks besides a token: log-probabilities of their tokens, or hidden
states.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.models.base import CausalLM
from nanovllm.runner.messages import Chunk, PromptScores
from nanovllm.sampling.sampler import DeviceLogprobs, Sampler

LOGITS_BYTES = 2**28
"""Most bytes of a prompt's float32 logits at a time."""


def prompt_outputs(
    model: CausalLM, sampler: Sampler, chunks: list[Chunk], hidden: torch.Tensor
) -> list[DeviceLogprobs | torch.Tensor]:
    """Return the outputs of chunks with `scores` or `pooling`, in order; hidden: [num_prompt_tokens, hidden_size]."""
    ends = np.cumsum([len(chunk.token_ids) for chunk in chunks])
    starts = [0, *ends[:-1].tolist()]
    scored = [(start, chunk.scores) for start, chunk in zip(starts, chunks, strict=True) if chunk.scores]
    logprobs = iter(_score(model, sampler, hidden, scored))
    outputs: list[DeviceLogprobs | torch.Tensor] = []
    for start, chunk in zip(starts, chunks, strict=True):
        states = hidden[start : start + len(chunk.token_ids)]
        if chunk.scores is not None:
            outputs.append(next(logprobs))
        elif chunk.pooling is not None:
            outputs.append(states.sum(0, dtype=torch.float32) if chunk.pooling == "mean" else states[-1].float())
    return outputs


def scored_rows_at_once(vocab_size: int) -> int:
    """Return the number of prompt rows whose logits are computed at a time."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def _score(
    model: CausalLM, sampler: Sampler, hidden: torch.Tensor, scored: list[tuple[int, PromptScores]]
) -> list[DeviceLogprobs]:
    """Compute the log-probabilities of all chunks, in slices of rows whose logits fit into `LOGITS_BYTES`.

    scored: each chunk's first row of the hidden states, and its request.
    """
    if not scored:
        return []
    indices = [range(start + scores.first, start + scores.first + len(scores.token_ids)) for start, scores in scored]
    rows = torch.tensor([index for part in indices for index in part]).to(hidden.device)
    targets = torch.tensor([token_id for _, scores in scored for token_id in scores.token_ids]).to(hidden.device)
    num_logprobs = max(scores.num_logprobs for _, scores in scored)
    size = scored_rows_at_once(sampler.vocab.total)
    found = [
        sampler.score(model.project_logits(hidden[part]), part_targets, num_logprobs)
        for part, part_targets in zip(rows.split(size), targets.split(size), strict=True)
    ]
    sizes = [len(part) for part in indices]
    values, token_ids, ranks = (torch.cat(parts).split(sizes) for parts in zip(*found, strict=True))
    return [
        (v[:, : 1 + scores.num_logprobs], t[:, : 1 + scores.num_logprobs], r)
        for v, t, r, (_, scores) in zip(values, token_ids, ranks, scored, strict=True)
    ]
