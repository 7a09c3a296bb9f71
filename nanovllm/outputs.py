"""What an `LLM` returns."""

from __future__ import annotations

from typing import NamedTuple, TypedDict


class RequestOutput(TypedDict):
    """A finished request.

    Attributes:
        text: without special tokens; empty without a tokenizer.
        token_ids: the generated tokens, with the EOS that stopped them.
        finish_reason: "stop" or "length".
        num_cached_tokens: prompt tokens found in the prefix cache.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    num_cached_tokens: int


class StepResult(NamedTuple):
    """One step.

    Attributes:
        finished: finished requests by id, also those of earlier steps that nobody has had yet.
        new_token_ids: tokens that this step added to each request, by id.
        num_prefill_tokens: prompt tokens that were computed: those not in the prefix cache, and those that preempted
            requests compute again.
        num_output_tokens: how many new tokens there are.
    """

    finished: list[tuple[int, RequestOutput]]
    new_token_ids: dict[int, list[int]]
    num_prefill_tokens: int
    num_output_tokens: int


class StepError(RuntimeError):
    """A step failed, and with it the requests `request_ids`; the cause is the exception's `__cause__`."""

    def __init__(self, message: str, request_ids: list[int], cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.request_ids = request_ids
        self.__cause__ = cause
