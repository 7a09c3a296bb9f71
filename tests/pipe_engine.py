"""An engine in a process of its own, behind a pipe: requests one way, the results of steps the other."""

from __future__ import annotations

import multiprocessing
import threading
from collections import deque
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from nanovllm import LLM
from nanovllm.engine.call_guard import Call, CallGuard
from nanovllm.engine.engine_outputs import EngineOutputs, NewTokens
from nanovllm.engine.request import Request
from nanovllm.engine.request_limits import RequestLimits


class PipeEngine:
    """The front end's end: an `Engine`. It may not run ahead: what it knows of the other process is what has come."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=run_engine, args=(other, model, settings), daemon=True)
        self.process.start()
        other.close()
        self.limits: RequestLimits = self._pipe.recv()
        self._lock = threading.Lock()
        self._guard = CallGuard()
        self._next_id = 0
        self._unfinished: set[int] = set()
        self._results = EngineOutputs()
        self._stats: dict[str, int] = {"num_prompt_tokens": 0, "num_output_tokens": 0}
        # They go out with the next message that comes, so that the engine always goes on past a stop string.
        self._stops: list[tuple[int, int]] = []
        # Tokens that have come, those past a stop string too.
        self.num_new_tokens = 0

    @property
    def is_open(self) -> bool:
        return self.process.is_alive()

    def require_open(self) -> None:
        if not self.is_open:
            raise RuntimeError("the engine's process has ended")

    def enqueue(self, request: Request) -> int:
        self.require_open()
        with self._lock:
            request_id, self._next_id = self._next_id, self._next_id + request.params.n
            self._unfinished.add(request_id)
            self._pipe.send(("enqueue", request))
        return request_id

    def abort(self, request_ids: Iterable[int], *, keep_outputs: bool = False) -> None:
        with self._lock:
            self._pipe.send(("abort", list(request_ids), keep_outputs))

    def stop(self, outputs: list[tuple[int, int]]) -> None:
        self._stops += outputs

    def drop(self, request_ids: set[int]) -> None:
        self.abort(request_ids)
        self._results.drop(request_ids)

    def begin(self, call: Call) -> None:
        if not self._guard.begin(call):
            raise RuntimeError("the engine is already running")

    def end(self, call: Call) -> None:
        self._guard.end(call, lambda: None)

    def run_step(self) -> NewTokens:
        tokens = NewTokens()
        # Other messages may have to go out meanwhile.
        if self._unfinished and self._pipe.poll(0.02):
            tokens, new, self._stats = self._pipe.recv()
            with self._lock:
                self._pipe.send(("stop", self._stops))
            self._stops = []
            self.num_new_tokens += len(new.new_tokens)
            self._results.new_tokens += new.new_tokens
            self._results.finished += new.finished
            self._results.failures += new.failures
            self._results.dropped += new.dropped
            failed = (request_id for failure in new.failures for request_id in failure.request_ids)
            self._unfinished.difference_update(dict(new.finished), failed, new.dropped)
        self.require_open()
        return tokens

    @property
    def has_results(self) -> bool:
        return not self._results.is_empty

    def take_results(self) -> EngineOutputs:
        results, self._results = self._results, EngineOutputs()
        return results

    def is_finished(self) -> bool:
        return not (self._unfinished or self.has_results)

    def stats(self) -> dict[str, int]:
        return self._stats

    def exit(self) -> None:
        self._pipe.close()
        self.process.join(30)
        assert self.process.exitcode == 0


def run_engine(pipe: Connection, model: str, settings: dict[str, Any]) -> None:
    """Drive an engine until the other end of the pipe is closed."""
    with LLM(model, **settings) as llm:
        engine, call = llm.llm_engine, Call()
        has_messages, is_closed = threading.Event(), threading.Event()
        stops: deque[list[tuple[int, int]]] = deque()

        def read() -> None:
            try:
                while True:
                    kind, *arguments = pipe.recv()
                    if kind == "enqueue":
                        engine.enqueue(*arguments)
                    elif kind == "abort":
                        engine.abort(arguments[0], keep_outputs=arguments[1])
                    else:
                        stops.append(*arguments)
                    has_messages.set()
            except EOFError:
                is_closed.set()
                has_messages.set()

        engine.begin(call)
        pipe.send(engine.limits)
        threading.Thread(target=read, daemon=True).start()
        while not is_closed.is_set():
            has_messages.clear()
            while stops:
                engine.stop(stops.popleft())
            tokens = engine.run_step()
            if engine.has_results:
                pipe.send((tokens, engine.take_results(), engine.stats()))
            elif engine.is_finished():
                has_messages.wait()
        engine.end(call)
