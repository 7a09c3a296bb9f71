"""What an engine returns."""

from __future__ import annotations

from typing import NamedTuple, TypedDict


class RequestOutput(TypedDict):
    """A finished request: its text without special tokens, its tokens, why it ended, and what the cache saved."""

    text: str
    token_ids: list[int]
    finish_reason: str
    num_cached_tokens: int


class StepResult(NamedTuple):
    """What a step finished, by request id, how many tokens it prefilled, and how many it got out.

    Prefilled are tokens of prompts that were not in the prefix cache, and those that preempted requests compute again.
    """

    finished: list[tuple[int, RequestOutput]]
    num_prefill_tokens: int
    num_output_tokens: int


class StepError(RuntimeError):
    """A step failed, and with it the requests `request_ids`; the cause is the exception's `__cause__`."""

    def __init__(self, message: str, request_ids: list[int], cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.request_ids = request_ids
        self.__cause__ = cause
