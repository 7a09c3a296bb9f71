"""What an engine and an `LLM` return."""

from __future__ import annotations

from typing import NamedTuple, TypedDict


class TokenOutput(TypedDict):
    """A finished request: its tokens (with the EOS that stopped it), why it ended, and what the prefix cache saved."""

    token_ids: list[int]
    finish_reason: str
    num_cached_tokens: int


class RequestOutput(TokenOutput):
    """The same with its text, without special tokens."""

    text: str


class EngineStepResult(NamedTuple):
    """One step of an engine.

    Attributes:
        finished: finished requests by id, also those of earlier steps that nobody has had yet.
        new_token_ids: tokens that this step added to each request, by id.
        num_prefill_tokens: prompt tokens that were computed: those not in the prefix cache, and those that preempted
            requests compute again.
    """

    finished: list[tuple[int, TokenOutput]]
    new_token_ids: dict[int, list[int]]
    num_prefill_tokens: int


class StepResult(NamedTuple):
    """The same with texts; `num_output_tokens` is how many new tokens there are."""

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
