"""Builds the output of a request from its finished sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nanovllm.engine.sequence import Sequence, SequenceGroup
from nanovllm.outputs import CompletionOutput, Logprob, Logprobs, RequestMetrics, RequestOutput
from nanovllm.runner.messages import TokenLogprobs


def request_output(group: SequenceGroup) -> RequestOutput:
    """Return the output, without text, of a request whose sequences are finished."""
    first = group[0]
    # The field accepts an array as well.
    tokens: Any = first.request.token_ids
    return RequestOutput(
        request_id=first.seq_id,
        prompt=None,
        prompt_token_ids=tokens,
        outputs=[_completion_output(seq) for seq in group],
        finished=True,
        prompt_logprobs=_prompt_logprobs(first),
        num_cached_tokens=first.num_cached_tokens or 0,
        metrics=_metrics(group),
        hidden_states=_hidden_states(first),
    )


def _hidden_states(seq: Sequence) -> Any:
    return seq.prompt_outputs and [part for part in seq.prompt_outputs if isinstance(part, np.ndarray)]


def _metrics(seqs: list[Sequence]) -> RequestMetrics:
    """Return the times of a request, which ends with its last output."""
    first = seqs[0].metrics
    if len(seqs) == 1:
        return first
    return replace(first, total_time=max(seq.metrics.total_time or 0.0 for seq in seqs))


def _completion_output(seq: Sequence) -> CompletionOutput:
    logprobs, cumulative = None, None
    if seq.params.logprobs is not None:
        logprobs = Logprobs[dict[int, Logprob]](seq.logprobs, 1 + seq.params.logprobs)
        cumulative = logprobs.sum()
    return CompletionOutput(
        seq.index, "", seq.completion_token_ids, cumulative, logprobs, seq.finish_reason, seq.stop_reason
    )


def _prompt_logprobs(seq: Sequence) -> Logprobs[dict[int, Logprob] | None] | None:
    """Return the log-probabilities of a prompt's tokens, None for a token without any.

    Returns None if they were not asked for, or if the request was aborted before its prompt was computed.
    """
    if seq.params.prompt_logprobs is None or seq.wants_prompt_outputs:
        return None
    width = 1 + seq.params.prompt_logprobs
    parts = [part.records() for part in seq.prompt_outputs or () if isinstance(part, TokenLogprobs)]
    records = np.concatenate(parts) if parts else np.empty((0, 1 + 2 * width), dtype=np.int32)
    return Logprobs(records, width, num_missing=seq.num_prompt_tokens - len(records))
