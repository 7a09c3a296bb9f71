"""Keeps what steps have brought until a caller has it, so that no exception and no signal loses any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nanovllm.outputs import RequestOutput, StepError, StepResult


class StreamedToken(NamedTuple):
    """A token of a request that reports them as they come.

    Attributes:
        request_id, output_index: of the request, and of the output in it.
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
"""The fields of a `StreamedToken`, which is one."""


@dataclass
class NewTokens:
    """The tokens of one step, or of two if the one before it had failed to be launched.

    Attributes:
        num_prefill_tokens: prompt tokens that were computed.
        sampled: sequence ids, a token of each, and ids whose token was dropped.
    """

    num_prefill_tokens: int = 0
    sampled: list[tuple[list[int], np.ndarray, set[int]]] = field(default_factory=list)


@dataclass
class EngineOutputs:
    """Plain data that pickles, causes of failures apart.

    Attributes:
        new_tokens: of requests that report them, in order.
        finished: finished requests by id; their outputs have no text.
        failures: steps that failed, and requests that failed alone.
        dropped: ids of requests that were aborted, and have no output.
    """

    new_tokens: list[TokenFields] = field(default_factory=list)
    finished: list[tuple[int, RequestOutput]] = field(default_factory=list)
    failures: list[StepError] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    # Of calls of `step` that have not returned them: they have raised.
    _unreported: list[NewTokens] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether a caller of `step` has something to be told."""
        return bool(self.finished or self.failures)

    @property
    def is_empty(self) -> bool:
        """Whether a front end has nothing to take in."""
        return not (self.new_tokens or self.finished or self.failures or self.dropped)

    def fail(self, error: StepError) -> None:
        """Keep a step's failure, unless one before it has taken all of its requests along."""
        if error.request_ids or not self.failures:
            self.failures.append(error)

    def take_step(self, tokens: NewTokens | None) -> StepResult:
        """Return, once, everything that has finished, or raise the oldest failure, once.

        tokens: of the step that was done; those of steps whose call has raised come with them.
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
    """Return the tokens that steps have added to each sequence."""
    new: dict[int, list[int]] = {}
    for step in steps:
        for seq_ids, token_ids, dropped in step.sampled:
            for seq_id, token_id in zip(seq_ids, token_ids.tolist(), strict=True):
                if seq_id not in dropped:
                    new.setdefault(seq_id, []).append(token_id)
    return new
