"""A request as it is told to a runner, and what the runner returns beside its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from nanovllm.engine.sequence import Sequence
from nanovllm.runner.messages import NewRequest, PromptScores, ScheduledBatch, StepOutput
from nanovllm.sampling_params import SamplingExtra


def new_request(seq: Sequence) -> NewRequest:
    """Return what the slot of a sequence must hold, as it is admitted."""
    return NewRequest(
        seq.slot,
        [table[:] for table in seq.block_tables],
        seq.num_prompt_tokens,
        seq.params.temperature,
        seq.seed,
        _sampling_extra(seq) if seq.has_extra else None,
    )


def _sampling_extra(seq: Sequence) -> SamplingExtra:
    """Return what a sequence asks of sampling beyond its temperature."""
    params = seq.params
    return SamplingExtra(
        params,
        seq.token_ids[:] if params.uses_penalties else array("i"),
        seq.num_prompt_tokens,
        tuple(seq.end_token_ids) if params.min_tokens else (),
        seq.request.bad_token_ids,
        seq.constraint is not None,
    )


def prompt_scores(seq: Sequence, start: int, end: int) -> PromptScores | None:
    """Return which tokens of the prompt are scored by its chunk `start ... end - 1`."""
    params = seq.params
    if params.prompt_logprobs is None or not seq.wants_prompt_outputs:
        return None
    # A token is scored by the hidden state before it.
    first, last = max(start + 1, params.prompt_logprobs_start), min(end, seq.num_prompt_tokens - 1)
    if first > last:
        return None
    return PromptScores(first - 1 - start, seq.token_ids[first : last + 1], params.prompt_logprobs)


def pooling_of(seq: Sequence, end: int) -> str | None:
    """Return which hidden states are asked for of a chunk that ends at `end`: "last", or "mean" of all."""
    pooling = seq.request.pooling
    return pooling if pooling == "mean" or end == seq.num_prompt_tokens else None


def take_in_logprobs(batch: ScheduledBatch, output: StepOutput, sequences: Mapping[int, Sequence]) -> None:
    """Give sequences their log-probabilities, and what chunks of their prompts were asked for.

    sequences: the unfinished ones by id.
    """
    if output.logprobs is not None:
        records = output.logprobs.records()
        packed, size = records.tobytes(), records[:1].nbytes
        for i, row in enumerate(output.logprob_rows):
            seq = sequences.get(batch.sampled_seq_ids[row])
            if seq is not None:
                seq.logprobs += packed[i * size : i * size + seq.record_bytes]
    for (seq_id, num_admissions), item in zip(batch.scored_seq_ids, output.prompt_outputs, strict=True):
        seq = sequences.get(seq_id)
        # A preempted prompt is computed again from its start.
        if seq is not None and seq.num_admissions == num_admissions:
            assert seq.prompt_outputs is not None
            seq.prompt_outputs.append(item)
