"""Steps with rows that ask for more than a temperature, or prompts that ask for more than a token.

Such a step computes its hidden states as any other and is then sampled apart from the forward pass, row by row as far
as its requests ask for it.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.kernels.logits import LogitsEdits, edit_logits, token_logprobs
from nanovllm.layers.sampler import Sampler
from nanovllm.models.base import CausalLM
from nanovllm.runner.batch import DeviceBatch
from nanovllm.runner.messages import PromptScores, ScheduledBatch
from nanovllm.runner.sampling_state import SamplingRows
from nanovllm.runner.step_results import DeviceLogprobs, StepExtras

LOGITS_BYTES = 2**28
"""Most bytes of a prompt's logits in float32 at a time."""


def sample_rows(
    sampler: Sampler, inputs: DeviceBatch, logits: torch.Tensor, rows: SamplingRows, processed_logprobs: bool
) -> tuple[torch.Tensor, StepExtras]:
    """Sample a step of which some rows ask for more.

    Args:
        sampler: the engine's.
        inputs: of the step.
        logits: [num_samples, vocabulary entries of this rank].
        rows: those that ask.
        processed_logprobs: whether log-probabilities are of the edited logits over the temperature, or of raw ones.

    Returns:
        Token ids, [num_samples] int64, and the log-probabilities that are asked for.
    """
    sampling = inputs.temperatures, inputs.seeds, inputs.output_index
    edited = None
    if rows.indices is not None:
        edited = sampler.edit(logits, rows.indices, sampling, rows.edits, rows.cutoffs)
    token_ids = sampler(logits, *sampling, edited)
    if rows.logprob_indices is None:
        return token_ids, StepExtras()
    asked, temperatures = rows.logprob_indices, None
    if processed_logprobs and edited is not None and rows.logprobs is not None:
        kept = edited.rows if edited.cutoffs is None else edited.rows.above(edited.cutoffs)
        found, temperatures = kept[rows.logprobs], edited.temperatures[rows.logprobs]
    else:
        found = edit_logits(*sampler.gather(logits, asked), sampler.vocab.total, LogitsEdits())
    logprobs = token_logprobs(found, token_ids[asked], rows.num_logprobs, temperatures)
    return token_ids, StepExtras(rows.logprob_rows, logprobs)


def rows_asked_for(rows: SamplingRows, logprobs: DeviceLogprobs) -> StepExtras:
    """Return, of the log-probabilities of all rows, those that are asked for."""
    values, token_ids, ranks = (tensor[rows.logprob_indices] for tensor in logprobs)
    return StepExtras(rows.logprob_rows, (values, token_ids, ranks))


def prompt_outputs(
    model: CausalLM, sampler: Sampler, batch: ScheduledBatch, hidden: torch.Tensor
) -> list[DeviceLogprobs | torch.Tensor]:
    """Return what the chunks of a step ask for besides a token; hidden: [num_prompt_tokens, hidden_size]."""
    ends = np.cumsum([len(chunk.token_ids) for chunk in batch.chunks])
    starts = [0, *ends[:-1].tolist()]
    scored = [(start, chunk.scores) for start, chunk in zip(starts, batch.chunks, strict=True) if chunk.scores]
    logprobs = iter(_score(model, sampler, hidden, scored))
    outputs: list[DeviceLogprobs | torch.Tensor] = []
    for start, chunk in zip(starts, batch.chunks, strict=True):
        states = hidden[start : start + len(chunk.token_ids)]
        if chunk.scores is not None:
            outputs.append(next(logprobs))
        elif chunk.pooling is not None:
            outputs.append(states.sum(0, dtype=torch.float32) if chunk.pooling == "mean" else states[-1].float())
    return outputs


def scored_rows_at_once(vocab_size: int) -> int:
    """Return the rows of a prompt whose logits are computed at a time."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def _score(
    model: CausalLM, sampler: Sampler, hidden: torch.Tensor, scored: list[tuple[int, PromptScores]]
) -> list[DeviceLogprobs]:
    """Compute the log-probabilities of all chunks, in slices of rows whose logits fit into `LOGITS_BYTES`.

    scored: each chunk's first row of the hidden states, and what is asked for.
    """
    if not scored:
        return []
    indices = [range(start + scores.first, start + scores.first + len(scores.token_ids)) for start, scores in scored]
    rows = torch.tensor([index for part in indices for index in part]).to(hidden.device)
    targets = torch.tensor([token_id for _, scores in scored for token_id in scores.token_ids]).to(hidden.device)
    num_logprobs = max(scores.num_logprobs for _, scores in scored)
    slice_rows = scored_rows_at_once(sampler.vocab.total)
    found = []
    for first in range(0, len(rows), slice_rows):
        part = rows[first : first + slice_rows]
        gathered = sampler.gather(model.project_logits(hidden[part]), torch.arange(len(part), device=hidden.device))
        edited = edit_logits(*gathered, sampler.vocab.total, LogitsEdits())
        found.append(token_logprobs(edited, targets[first : first + slice_rows], num_logprobs))
    sizes = [len(part) for part in indices]
    values, token_ids, ranks = (torch.cat(parts).split(sizes) for parts in zip(*found, strict=True))
    return [
        (v[:, : 1 + scores.num_logprobs], t[:, : 1 + scores.num_logprobs], r)
        for v, t, r, (_, scores) in zip(values, token_ids, ranks, scored, strict=True)
    ]
