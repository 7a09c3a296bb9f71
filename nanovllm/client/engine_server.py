"""The process of an engine: loads the model, and drives the engine for the front ends that connect.

One thread drives it, and processes orders between two steps. Each front end has a thread that reads its orders and one
that sends its reports, so that no step waits for a front end. The process ends when its parent asks for it or exits,
and ignores Ctrl-C, which its front ends handle.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from queue import SimpleQueue
from typing import Any

import torch

from nanovllm.client.loading import load_model
from nanovllm.client.messages import (
    CONNECT,
    CallEngine,
    CallResult,
    Enqueue,
    Order,
    StepReport,
)
from nanovllm.config import Config
from nanovllm.engine.engine import EngineOutputs, EngineState, NewTokens
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Abort, MakeConstraint
from nanovllm.outputs import StepError, portable
from nanovllm.utils.device import DeviceInfo
from nanovllm.utils.processes import end_with_parent

_MOST_CHARACTERS = 16000
"""Limit on a traceback."""
_SWITCH_SECONDS = 0.0005
"""Longest wait for the interpreter of a thread that serves a front end; see `nanovllm.serve.app`."""
_EXIT_SECONDS = 10.0
_LAST_SECONDS = 2.0
"""Time limit for a front end to receive the last messages."""
_NUM_COMPILERS = 4
"""Threads that compile grammars, so that a slow one does not delay the others."""


class FrontEnd:
    """One front end, and the messages to send to it, in a thread of their own; `first` before all others."""

    def __init__(self, connection: Connection, first: object) -> None:
        self.connection = connection
        # Prompt tokens computed since its last report.
        self.num_prefill_tokens = 0
        # None ends the thread.
        self._messages: SimpleQueue[Any] = SimpleQueue()
        # Sends a message, in order.
        self.say = self._messages.put
        self._sender = threading.Thread(target=self._send, args=(first,), name="nanovllm-sender", daemon=True)
        self._sender.start()

    def close(self, wait: float) -> None:
        """End the sending thread, which gets `wait` seconds for the remaining messages."""
        self.say(None)
        self._sender.join(wait)

    def _send(self, first: object) -> None:
        messages: list[Any] = []
        # The thread that reads its orders notices, too, that it has disconnected.
        with suppress(OSError):
            self.connection.send(first)
            while None not in messages:
                messages = [self._messages.get()]
                while not self._messages.empty():
                    messages.append(self._messages.get())
                self.connection.send([message for message in messages if message is not None])


class EngineServer:
    """An engine, and the front ends that it serves; `make_constraint` compiles grammars in separate threads."""

    def __init__(self, engine: LLMEngine, device: DeviceInfo, make_constraint: MakeConstraint) -> None:
        self._engine = engine
        self._info = engine.limits, device
        self._make_constraint = make_constraint
        self._compiler = ThreadPoolExecutor(_NUM_COMPILERS, "nanovllm-grammars")
        self._front_ends: set[FrontEnd] = set()
        # The front ends of unfinished requests, by id.
        self._owners: dict[int, FrontEnd] = {}
        # Requests whose grammars are being compiled, each with any abort received meanwhile.
        self._preparing: dict[int, Abort | None] = {}
        # Pending work of the driving thread.
        self._work: deque[Callable[[], None]] = deque()
        self._has_work = threading.Event()
        self._is_closing = False
        self._state = EngineState()

    def connect(self, connection: Connection) -> None:
        """Serve a front end, until it closes its end; from any thread."""
        front_end = FrontEnd(connection, self._info)

        def welcome() -> None:
            self._front_ends.add(front_end)
            front_end.say(self._state)

        self._do(welcome)
        threading.Thread(target=self._read, args=(front_end,), name="nanovllm-reader", daemon=True).start()

    def close(self) -> None:
        """End `run` after its step; from any thread."""
        self._is_closing = True
        self._has_work.set()

    def run(self) -> str | None:
        """Drive the engine until `close`; return the error that closed it, already sent to front ends, or None."""
        cause = None
        try:
            while cause is None and not self._is_closing:
                while self._work:
                    self._work.popleft()()
                for tokens in self._engine.steps(self._has_steps):
                    cause = self._report(tokens)
                if not self._work and cause is None:
                    self._has_work.wait()
                    self._has_work.clear()
        except Exception:
            cause = f"an error ended the engine:\n{traceback.format_exc()[-_MOST_CHARACTERS:]}"
        for front_end in self._front_ends:
            if cause is not None:
                front_end.say(cause)
            front_end.close(_LAST_SECONDS)
        return cause

    def _do(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._has_work.set()

    def _read(self, front_end: FrontEnd) -> None:
        try:
            while True:
                for order in front_end.connection.recv():
                    if isinstance(order, Enqueue) and order.request.is_constrained:
                        self._preparing[order.request_id] = None
                        self._compiler.submit(self._prepare, front_end, order)
                    else:
                        self._work.append(partial(self._take, front_end, order))
                self._has_work.set()
        except (EOFError, OSError):
            self._do(partial(self._leave, front_end))

    def _prepare(self, front_end: FrontEnd, order: Enqueue) -> None:
        # The request's grammar keeps its compiled form, and an error is raised once more later.
        with suppress(Exception):
            self._make_constraint(order.request)
        self._do(partial(self._take, front_end, order))

    def _take(self, front_end: FrontEnd, order: Order) -> None:
        if isinstance(order, Enqueue):
            self._enqueue(front_end, order)
        elif isinstance(order, Abort):
            self._abort(order)
        elif order.call_id is None:
            order.function(self._engine, *order.args)
        else:
            front_end.say(self._call(order, order.call_id))

    def _enqueue(self, front_end: FrontEnd, order: Enqueue) -> None:
        request_id, abort = order.request_id, self._preparing.pop(order.request_id, None)
        if front_end not in self._front_ends:
            return
        try:
            self._engine.enqueue(order.request, request_id)
        except (ValueError, RuntimeError) as error:
            failure = StepError(f"request {request_id} failed: {error}", [request_id], error)
            front_end.say(StepReport(failures=[failure], stats=self._engine.stats()))
            return
        self._owners[request_id] = front_end
        if abort is not None:
            self._abort(Abort([request_id], abort.keep_outputs))

    def _abort(self, order: Abort) -> None:
        for request_id in self._preparing.keys() & set(order.request_ids):
            self._preparing[request_id] = order
        self._engine.abort(order.request_ids, keep_outputs=order.keep_outputs)

    def _call(self, order: CallEngine, call_id: int) -> CallResult:
        # Earlier orders come first: aborts would otherwise wait for a step.
        self._engine.stop([])
        try:
            result, error = order.function(self._engine, *order.args), None
        except Exception as raised:
            result, error = None, portable(raised) or RuntimeError(f"{order.function.__name__} failed: {raised}")
        # All front ends get the state if the call has changed it.
        if self._engine.state != self._state:
            self._state = deepcopy(self._engine.state)
            for front_end in self._front_ends:
                front_end.say(self._state)
        return CallResult(call_id, self._engine.stats(), result, error)

    def _leave(self, front_end: FrontEnd) -> None:
        self._front_ends.discard(front_end)
        front_end.close(0.0)
        self._engine.abort(request_id for request_id, owner in self._owners.items() if owner is front_end)

    def _has_steps(self) -> bool:
        engine = self._engine
        return not (self._work or self._is_closing or engine.is_finished()) and engine.is_open

    def _report(self, tokens: NewTokens) -> str | None:
        """Report a step; return the reason if the step has closed the engine."""
        results, cause = self._engine.take_results(), None
        if not self._engine.is_open:
            # Front ends with other replicas run these requests there: they did not fail by themselves.
            failure = results.failures.pop()
            cause = f"{failure}\n{''.join(traceback.format_exception(failure.__cause__))[-_MOST_CHARACTERS:]}"
        reports: dict[FrontEnd, StepReport] = defaultdict(StepReport)
        self._sort(results, reports)
        stats = self._engine.stats() if reports else {}
        for front_end in self._front_ends:
            front_end.num_prefill_tokens += tokens.num_prefill_tokens
        for front_end, report in reports.items():
            report.num_prefill_tokens, front_end.num_prefill_tokens = front_end.num_prefill_tokens, 0
            report.stats = stats
            front_end.say(report)
        return cause

    def _sort(self, results: EngineOutputs, reports: dict[FrontEnd, StepReport]) -> None:
        """Add results to the reports of their front ends, and forget finished requests."""
        owners = self._owners
        # Tokens of a request that is finished by now come before its end.
        for token in results.new_tokens:
            reports[owners[token[0]]].new_tokens.append(token)
        for request_id, output in results.finished:
            # The front end has the prompt.
            output.prompt_token_ids = []
            reports[owners.pop(request_id)].finished.append((request_id, output))
        for request_id in results.dropped:
            reports[owners.pop(request_id)].dropped.append(request_id)
        for failure in results.failures:
            by_front_end: dict[FrontEnd, list[int]] = defaultdict(list)
            for request_id in failure.request_ids:
                by_front_end[owners.pop(request_id)].append(request_id)
            for front_end, request_ids in by_front_end.items():
                reports[front_end].failures.append(StepError(str(failure), request_ids, failure.__cause__))


def run_engine(descriptor: int, parent: int) -> None:
    """Run an engine's process, given the socket to its parent, and the parent's process id."""
    faulthandler.enable()
    end_with_parent(parent)
    control = Connection(descriptor)
    try:
        plan: tuple[Config, int] = control.recv()
    except EOFError:
        return
    config, num_replicas = plan
    torch.set_num_threads(max(1, torch.get_num_threads() // num_replicas))
    try:
        model = load_model(config)
    except Exception as error:
        # A user's mistake needs no traceback.
        mistake = portable(error) if isinstance(error, ValueError) else None
        control.send(mistake or traceback.format_exc()[-_MOST_CHARACTERS:])
        return
    engine = model.engine
    assert isinstance(engine, LLMEngine)
    server = EngineServer(engine, model.device, model.files.constraints)
    threading.Thread(target=_obey, args=(control, server), name="nanovllm-control", daemon=True).start()
    control.send(None)
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Loaded objects stay: scanning them for garbage would delay steps.
    gc.collect()
    gc.freeze()
    cause = server.run()
    if cause is not None:
        # Without clean-up, which could wait for a lost device.
        os._exit(1)
    engine.exit()
    # Libraries that look for leaks at exit would report frozen objects.
    gc.unfreeze()


def _obey(control: Connection, server: EngineServer) -> None:
    """Connect front ends until shutdown."""
    with suppress(EOFError, OSError):
        while control.recv() == CONNECT:
            server.connect(Connection(recv_handle(control)))
    server.close()
    # A step may wait for a device forever.
    time.sleep(_EXIT_SECONDS)
    os._exit(1)
