"""Steps with rows that ask for more than a temperature, or prompts that ask for more than a token.

Such a step computes its hidden states as any other and is then sampled apart from the forward pass, row by row as far
as its requests ask for it.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.logits import LogitsEdits, edit_logits, token_logprobs
from nanovllm.layers.sampler import Sampler
from nanovllm.models.base import CausalLM
from nanovllm.runner.batch import DeviceBatch
from nanovllm.runner.messages import PromptScores, ScheduledBatch
from nanovllm.runner.sampling_state import SamplingRows
from nanovllm.runner.step_results import DeviceLogprobs, StepExtras

_LOGITS_BYTES = 2**28
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
    edited = sampler.edit(logits, rows.rows, sampling, rows.edits, rows.cutoffs)
    token_ids = sampler(logits, *sampling, edited)
    if not rows.logprob_rows:
        return token_ids, StepExtras()
    asked = rows.rows[rows.logprobs]
    if processed_logprobs:
        x, temperatures = edited.logits[rows.logprobs], edited.temperatures[rows.logprobs]
    else:
        x, temperatures = edit_logits(*sampler.gather(logits, asked), sampler.vocab.total, LogitsEdits()), None
    logprobs = token_logprobs(x, token_ids[asked], rows.num_logprobs, temperatures)
    return token_ids, StepExtras(rows.logprob_rows, logprobs)


def prompt_outputs(
    model: CausalLM, sampler: Sampler, batch: ScheduledBatch, hidden: torch.Tensor
) -> list[DeviceLogprobs | torch.Tensor]:
    """Return what the chunks of a step ask for besides a token; hidden: [num_prompt_tokens, hidden_size]."""
    outputs: list[DeviceLogprobs | torch.Tensor] = []
    start = 0
    for chunk in batch.chunks:
        states = hidden[start : start + len(chunk.token_ids)]
        if chunk.scores is not None:
            outputs.append(_score(model, sampler, states, chunk.scores))
        elif chunk.pooling == "mean":
            outputs.append(states.sum(0, dtype=torch.float32))
        elif chunk.pooling == "last":
            outputs.append(states[-1].float())
        start += len(chunk.token_ids)
    return outputs


def _score(model: CausalLM, sampler: Sampler, states: torch.Tensor, scores: PromptScores) -> DeviceLogprobs:
    """Compute log-probabilities in slices of rows, whose logits fit into `_LOGITS_BYTES`."""
    targets = torch.tensor(scores.token_ids, dtype=torch.int64).to(states.device)
    slice_rows = max(1, _LOGITS_BYTES // (4 * sampler.vocab.total))
    found = []
    for first in range(0, len(targets), slice_rows):
        rows = targets[first : first + slice_rows]
        asked = states[scores.first + first : scores.first + first + len(rows)]
        indices = torch.arange(len(rows), device=rows.device)
        gathered = sampler.gather(model.project_logits(asked), indices)
        x = edit_logits(*gathered, sampler.vocab.total, LogitsEdits())
        found.append(token_logprobs(x, rows, scores.num_logprobs))
    values, token_ids, ranks = (torch.cat(parts) for parts in zip(*found, strict=True))
    return values, token_ids, ranks
