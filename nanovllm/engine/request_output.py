"""From a finished request's sequences to its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from nanovllm.engine.sequence import RequestGroup, Sequence
from nanovllm.logprobs import Logprob, Logprobs
from nanovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nanovllm.runner.messages import TokenLogprobs

GetText = Callable[[Sequence], str]
DecodeToken = Callable[[int], "str | None"]


def _no_text(seq: Sequence) -> str:
    return ""


def _no_token(token_id: int) -> None:
    return None


def request_output(
    request: RequestGroup, get_text: GetText = _no_text, decode_token: DecodeToken = _no_token
) -> RequestOutput:
    """Return the output of a request that has ended.

    Args:
        request: all of its sequences have ended.
        get_text: returns the text of a sequence.
        decode_token: returns the text of a token.
    """
    seqs, first = request.seqs, request.seqs[0]
    return RequestOutput(
        request_id=first.seq_id,
        prompt=first.features.prompt,
        prompt_token_ids=first.features.prompt_token_ids or first.token_ids[: first.num_prompt_tokens].tolist(),
        outputs=[completion_output(seq, i, get_text(seq), decode_token) for i, seq in enumerate(seqs)],
        finished=True,
        prompt_logprobs=prompt_logprobs(first, decode_token),
        num_cached_tokens=first.num_cached_tokens or 0,
        metrics=_metrics(seqs),
        hidden_states=[part for part in first.prompt_outputs if isinstance(part, np.ndarray)],
    )


def _metrics(seqs: list[Sequence]) -> RequestMetrics:
    """Return the times of a request, which ends with the last of its outputs."""
    first = seqs[0].metrics
    if len(seqs) == 1:
        return first
    return replace(first, total_time=max(seq.metrics.total_time or 0.0 for seq in seqs))


def completion_output(seq: Sequence, index: int, text: str, decode_token: DecodeToken = _no_token) -> CompletionOutput:
    """Return one sequence's output."""
    logprobs, cumulative = None, None
    if seq.params.logprobs is not None:
        logprobs = token_logprobs(seq.logprobs, seq.params.logprobs, decode_token)
        cumulative = float(logprobs.token_logprobs.sum(dtype=np.float64))
    return CompletionOutput(
        index, text, seq.completion_token_ids, cumulative, logprobs, seq.finish_reason, seq.stop_reason
    )


def token_logprobs(
    records: bytes | bytearray, num_logprobs: int, decode_token: DecodeToken
) -> Logprobs[dict[int, Logprob]]:
    """Return the log-probabilities of an output's tokens, each with so many most likely ones."""
    return Logprobs(records, 1 + num_logprobs, decode_token)


def prompt_logprobs(seq: Sequence, decode_token: DecodeToken) -> Logprobs[dict[int, Logprob] | None] | None:
    """Return the log-probabilities of a prompt's tokens, None for those that have none.

    None if they were not asked for, or if the request was aborted before its prompt was computed.
    """
    if seq.params.prompt_logprobs is None or seq.wants_prompt:
        return None
    width = 1 + seq.params.prompt_logprobs
    parts = [part.records() for part in seq.prompt_outputs if isinstance(part, TokenLogprobs)]
    records = np.concatenate(parts) if parts else np.empty((0, 1 + 2 * width), dtype=np.int32)
    return Logprobs(records, width, decode_token, seq.num_prompt_tokens - len(records))


def new_token_ids(steps: Iterable[tuple[list[int], np.ndarray, set[int]]]) -> dict[int, list[int]]:
    """Return the tokens that steps have added to each sequence.

    steps: of each, sequence ids, a token of each, and ids whose token was dropped.
    """
    new: dict[int, list[int]] = {}
    for seq_ids, token_ids, dropped in steps:
        for seq_id, token_id in zip(seq_ids, token_ids.tolist(), strict=True):
            if seq_id not in dropped:
                new.setdefault(seq_id, []).append(token_id)
    return new
