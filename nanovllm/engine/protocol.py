"""What a front end knows of an engine: requests in, results out, both plain data that pickles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from nanovllm.engine.call_guard import Call
from nanovllm.engine.engine_outputs import EngineOutputs, NewTokens
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.request import Request, RequestLimits
from nanovllm.engine.stats_history import StatsSample


class Engine(Protocol):
    """An engine, in this process (`LLMEngine`) or in others (`ReplicatedEngine`), driven by one front end.

    Requests and aborts may come from any thread, and so may `call`, `wake` and what only reads. What does steps, from
    `run_step` to `drop`, belongs to the call that drives the engine, between `begin` and `end`.
    """

    @property
    def limits(self) -> RequestLimits:
        """What requests must keep to."""

    def enqueue(self, request: Request) -> int:
        """Queue a request that `limits` has passed, and return its id."""

    def enqueue_all(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests that come together, in the order in which they should run, and return their ids."""

    def abort(self, request_ids: Iterable[int], *, keep_outputs: bool = False) -> None:
        """Drop requests, or finish them with what they have; see `LLMEngine.abort`."""

    def wake(self) -> None:
        """Let a step that waits for another process end, since there is something to do."""

    def begin(self, call: Call) -> bool:
        """Let a call drive the engine, until `end`; returns False if another one does. See `drive`."""

    def end(self, call: Call) -> None:
        """End a call, which may never have begun."""

    def run_step(self) -> NewTokens:
        """Do a step, or wait for one; keep its results. Handles signals when it ends.

        Its tokens are returned to a call that wants them.

        Raises:
            RuntimeError: the engine is closed.
        """

    @property
    def has_results(self) -> bool:
        """Whether `take_results` has anything."""

    def take_results(self) -> EngineOutputs:
        """Return, once, what steps have brought."""

    def stop(self, outputs: list[tuple[int, int]]) -> None:
        """End outputs, by request and index, whose text has come to a stop string; ignores those that have ended."""

    def drop(self, request_ids: set[int]) -> None:
        """Abort requests, and forget their results."""

    @property
    def request_ids(self) -> set[int]:
        """Ids of unfinished requests."""

    def is_finished(self) -> bool:
        """Whether no request is left, no step is under way, and every result has been taken."""

    @property
    def state(self) -> EngineState:
        """What holds steps up, as it was after the last call that has changed it."""

    @property
    def is_in_process(self) -> bool:
        """Whether the engine is in this process, and takes what does not pickle."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `LLMEngine` with values that pickle, on every engine that is alive.

        An engine in another process does it between two steps.

        Returns:
            The results, one for each engine, in order.

        Raises:
            RuntimeError: the engine is closed, or one ends before it has answered; all others have by then.
            Exception: what the method raises.
        """

    def stats(self, *, now: bool = False) -> dict[str, int]:
        """Return the counters since the engine began, and the blocks in use, of all engines together.

        now: ask engines in other processes, which may wait for a step; else as they were when something came last.
        """

    def stats_history(self) -> list[StatsSample]:
        """Return the counters over time, oldest first; the last sample is of now."""

    def require_open(self) -> object:
        """Raise a RuntimeError if the engine is closed."""

    def exit(self) -> None:
        """Free the device; a second call does nothing."""
