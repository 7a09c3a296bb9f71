"""Keeps the results of steps until a caller has them, so that no exception or signal loses any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nanovllm.outputs import RequestOutput, StepError, StepResult


class StreamedToken(NamedTuple):
    """A token of a request that streams its tokens.

    Attributes:
        request_id, output_index: the request, and the index of the output in it.
        token_id: the token.
        is_end: whether it is EOS or a stop token.
        logprobs: its record of log-probabilities, see `nanovllm.outputs`; empty unless asked for.
    """

    request_id: int
    output_index: int
    token_id: int
    is_end: bool
    logprobs: bytes


TokenFields = tuple[int, int, int, bool, bytes]
"""A `StreamedToken` as a plain tuple."""


@dataclass
class NewTokens:
    """The tokens of one step, or of two after a failed launch.

    Attributes:
        num_prefill_tokens: prompt tokens that were computed.
        sampled: sequence ids, one per token, and the ids whose token was dropped.
    """

    num_prefill_tokens: int = 0
    sampled: list[tuple[list[int], np.ndarray, set[int]]] = field(default_factory=list)


@dataclass
class EngineOutputs:
    """Plain data that pickles, except for causes of failures.

    Attributes:
        new_tokens: tokens of requests that stream, in order.
        finished: finished requests by id; their outputs have no text.
        failures: steps that failed, and requests that failed alone.
        dropped: ids of requests that were aborted and have no output.
    """

    new_tokens: list[TokenFields] = field(default_factory=list)
    finished: list[tuple[int, RequestOutput]] = field(default_factory=list)
    failures: list[StepError] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    # Tokens of `step` calls that raised instead of returning them.
    _unreported: list[NewTokens] = field(default_factory=list)

    def __bool__(self) -> bool:
        """True if there are finished requests or failures to report."""
        return bool(self.finished or self.failures)

    @property
    def is_empty(self) -> bool:
        """Whether a front end has nothing to process."""
        return not (self.new_tokens or self.finished or self.failures or self.dropped)

    def fail(self, error: StepError) -> None:
        """Keep a step's failure, unless an earlier failure already covers all its requests."""
        if error.request_ids or not self.failures:
            self.failures.append(error)

    def take_step(self, tokens: NewTokens | None) -> StepResult:
        """Return everything that has finished, or raise the oldest failure; each once.

        tokens: of the step just run; tokens of steps whose call raised are added.
        """
        if tokens is not None:
            self._unreported.append(tokens)
        self.new_tokens.clear()
        self.dropped.clear()
        if self.failures:
            raise self.failures.pop(0)
        finished, self.finished = self.finished, []
        steps, self._unreported = self._unreported, []
        new = _new_token_ids(steps)
        return StepResult(finished, new, sum(s.num_prefill_tokens for s in steps), sum(map(len, new.values())))


def _new_token_ids(steps: list[NewTokens]) -> dict[int, list[int]]:
    """Return the tokens that steps added to each sequence."""
    new: dict[int, list[int]] = {}
    for step in steps:
        for seq_ids, token_ids, dropped in step.sampled:
            for seq_id, token_id in zip(seq_ids, token_ids.tolist(), strict=True):
                if seq_id not in dropped:
                    new.setdefault(seq_id, []).append(token_id)
    return new
