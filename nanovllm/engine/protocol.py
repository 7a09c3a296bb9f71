"""What a front end knows of an engine: requests in, results out, both plain data that pickles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from nanovllm.engine.call_guard import Call
from nanovllm.engine.engine_outputs import EngineOutputs, NewTokens
from nanovllm.engine.request import Request
from nanovllm.engine.request_limits import RequestLimits


class Engine(Protocol):
    """An engine, in this process (`LLMEngine`) or in another, driven by one front end.

    Requests and aborts may come from any thread. The other methods belong to the call that drives the engine, between
    `begin` and `end`.
    """

    @property
    def limits(self) -> RequestLimits:
        """What requests must keep to."""

    @property
    def is_open(self) -> bool:
        """Whether the engine takes requests and steps."""

    @property
    def has_results(self) -> bool:
        """Whether `take_results` has anything."""

    def enqueue(self, request: Request) -> int:
        """Queue a request that `limits` has passed, and return its id."""

    def abort(self, request_ids: Iterable[int], *, keep_outputs: bool = False) -> None:
        """Drop requests, or finish them with what they have; see `LLMEngine.abort`."""

    def begin(self, call: Call) -> None:
        """Let a call drive the engine, until `end`; a RuntimeError if another one does."""

    def end(self, call: Call) -> None:
        """End a call, which may never have begun."""

    def run_step(self) -> NewTokens:
        """Do a step, or wait for one; keep its results. Handles signals when it ends.

        Raises:
            RuntimeError: the engine is closed.
        """

    def take_results(self) -> EngineOutputs:
        """Return, once, what steps have brought."""

    def stop(self, outputs: list[tuple[int, int]]) -> None:
        """End outputs, by request and index, whose text has come to a stop string; ignores those that have ended."""

    def drop(self, request_ids: set[int]) -> None:
        """Abort requests, and forget their results."""

    def is_finished(self) -> bool:
        """Whether no request is left, no step is under way, and every result has been taken."""

    def require_open(self) -> object:
        """Raise a RuntimeError if the engine is closed."""

    def stats(self) -> dict[str, int]:
        """Counters since the engine began, and the blocks in use now."""
