"""Streams of outputs, joined, and compared with whole outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from nanovllm import RequestOutput


def joined(parts: Iterable[RequestOutput]) -> list[RequestOutput]:
    """The outputs of streams, in order of their requests, whole."""
    texts: dict[Any, str] = {}
    tokens: dict[Any, list[int]] = {}
    logprobs: dict[Any, list[Any]] = {}
    ended: dict[Any, RequestOutput] = {}
    for part in parts:
        assert part.request_id not in ended
        for item in part.outputs:
            key = part.request_id, item.index
            texts[key] = texts.get(key, "") + item.text
            tokens.setdefault(key, []).extend(item.token_ids)
            logprobs.setdefault(key, []).extend(item.logprobs or [])
            assert part.finished == (item.finish_reason is not None)
        if part.finished:
            ended[part.request_id] = part
    assert {request_id for request_id, _ in texts} == set(ended), "some have no end"
    for request_id, output in ended.items():
        for item in output.outputs:
            key = request_id, item.index
            item.text, item.token_ids = texts[key], tokens[key]
            item.logprobs = None if item.logprobs is None else logprobs[key]
    return sorted(ended.values(), key=lambda output: str(output.request_id).zfill(9))


def check_same(outputs: Iterable[RequestOutput], whole: Iterable[RequestOutput]) -> None:
    """Assert that outputs are the same, log-probabilities as far as the batches of their steps do not change them."""
    for output, want in zip(outputs, whole, strict=True):
        assert (output.prompt, output.prompt_token_ids) == (want.prompt, want.prompt_token_ids)
        assert rounded(output.prompt_logprobs) == rounded(want.prompt_logprobs)
        for item, other in zip(output.outputs, want.outputs, strict=True):
            assert rounded(item.logprobs) == rounded(other.logprobs)
            assert item.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
            plain = [replace(each, logprobs=None, cumulative_logprob=None) for each in (item, other)]
            assert plain[0] == plain[1]


def rounded(logprobs: Any) -> list[Any]:
    """Log-probabilities that compare equal if only the batch differs."""
    found = [position or {} for position in logprobs or []]
    return [{i: (pytest.approx(p.logprob, abs=1e-3), p.rank, p.decoded_token) for i, p in at.items()} for at in found]
