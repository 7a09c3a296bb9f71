"""From a finished request's sequences to its output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain

import numpy as np

from nanovllm.engine.sequence import RequestGroup, Sequence, TokenRow
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.runner.messages import TokenLogprobs

GetText = Callable[[Sequence], str]
DecodeToken = Callable[[int], "str | None"]


def _no_text(seq: Sequence) -> str:
    return ""


def _no_token(token_id: int) -> None:
    return None


def request_output(
    group: RequestGroup, get_text: GetText = _no_text, decode_token: DecodeToken = _no_token
) -> RequestOutput:
    """Return the output of a request.

    Args:
        group: its sequences, all of them finished.
        get_text: returns the text of a sequence.
        decode_token: returns the text of a token.
    """
    seqs = [group.finished[seq_id] for seq_id in group.seq_ids]
    first = seqs[0]
    return RequestOutput(
        request_id=first.seq_id,
        prompt=first.features.prompt,
        prompt_token_ids=first.token_ids[: first.num_prompt_tokens].tolist(),
        outputs=[completion_output(seq, i, get_text(seq), decode_token) for i, seq in enumerate(seqs)],
        finished=True,
        prompt_logprobs=prompt_logprobs(first, decode_token),
        num_cached_tokens=first.num_cached_tokens or 0,
        metrics=replace(first.metrics, total_time=max(seq.metrics.total_time or 0.0 for seq in seqs)),
        hidden_states=[part for part in first.prompt_outputs if isinstance(part, np.ndarray)],
    )


def completion_output(seq: Sequence, index: int, text: str, decode_token: DecodeToken = _no_token) -> CompletionOutput:
    """Return one sequence's output."""
    token_ids, logprobs, cumulative = seq.completion_token_ids, None, None
    if seq.params.logprobs is not None:
        logprobs = token_logprobs(seq.logprobs, decode_token)
        cumulative = sum(at[token_id].logprob for at, token_id in zip(logprobs, token_ids, strict=True))
    return CompletionOutput(index, text, token_ids, cumulative, logprobs, seq.finish_reason, seq.stop_reason)


def token_logprobs(rows: Iterable[TokenRow], decode_token: DecodeToken) -> list[dict[int, Logprob]]:
    """Return for each position the log-probabilities of its token and of the most likely ones, by token id.

    rows: values, token ids and the rank of the position's token, whose value comes first. Tokens that cannot come are
        left out of the most likely ones: there may be fewer possible ones, and the rest need not even be tokens.
    """
    result = []
    for values, token_ids, rank in rows:
        own = token_ids[0]
        at = {own: Logprob(values[0], rank, decode_token(own))}
        # The most likely tokens are in order; the position's own may be one of them.
        for place in range(1, len(token_ids)):
            token_id, value = token_ids[place], values[place]
            if token_id not in at and value > -math.inf:
                at[token_id] = Logprob(value, place, decode_token(token_id))
        result.append(at)
    return result


def prompt_logprobs(seq: Sequence, decode_token: DecodeToken) -> list[dict[int, Logprob] | None] | None:
    """Return the log-probabilities of a prompt's tokens, None for those that have none; None unless asked for."""
    if seq.params.prompt_logprobs is None:
        return None
    parts = [part for part in seq.prompt_outputs if isinstance(part, TokenLogprobs)]
    rows = chain.from_iterable(part.rows() for part in parts)
    scored: list[dict[int, Logprob] | None] = [*token_logprobs(rows, decode_token)]
    return [None] * (seq.num_prompt_tokens - len(scored)) + scored


def new_token_ids(steps: Iterable[tuple[list[int], list[int], set[int]]]) -> dict[int, list[int]]:
    """Return the tokens that steps have added to each sequence.

    steps: of each, sequence ids, a token of each, and ids whose token was dropped.
    """
    new: dict[int, list[int]] = {}
    for seq_ids, token_ids, dropped in steps:
        for seq_id, token_id in zip(seq_ids, token_ids, strict=True):
            if seq_id not in dropped:
                new.setdefault(seq_id, []).append(token_id)
    return new
