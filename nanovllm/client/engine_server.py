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
from typing import Any, NamedTuple

import torch

from nanovllm.client.loading import load_model
from nanovllm.client.messages import (
    CONNECT,
    CallEngine,
    CallResult,
    EngineInfo,
    Enqueue,
    Order,
    SendNewTokens,
    StepReport,
    Stop,
    portable,
)
from nanovllm.config import Config
from nanovllm.engine.engine import EngineOutputs, EngineState, NewTokens
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Abort, MakeConstraint
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
    """One front end: its requests, and the messages to send to it, in a thread of their own; `info` is the first.

    Attributes:
        engine_ids: ids of its unfinished requests in the engine, by its own ids.
        preparing: requests whose grammars are being compiled, each with any abort received meanwhile.
        wants_steps: whether it gets every token of each step.
    """

    def __init__(self, connection: Connection, info: EngineInfo) -> None:
        self.connection = connection
        self.engine_ids: dict[int, int] = {}
        self.preparing: dict[int, Abort | None] = {}
        self.wants_steps = False
        # None ends the thread.
        self._messages: SimpleQueue[Any] = SimpleQueue()
        # Sends a message; a report is merged with others that wait, and comes before other waiting messages.
        self.say = self._messages.put
        self.say(info)
        self._sender = threading.Thread(target=self._send, name="nanovllm-sender", daemon=True)
        self._sender.start()

    def close(self, wait: float) -> None:
        """End the sending thread, which gets `wait` seconds for the remaining messages."""
        self.say(None)
        self._sender.join(wait)

    def _send(self) -> None:
        messages: list[Any] = []
        # The thread that reads its orders notices, too, that it has disconnected.
        with suppress(OSError):
            while None not in messages:
                messages = [self._messages.get()]
                while not self._messages.empty():
                    messages.append(self._messages.get())
                reports = [message for message in messages if isinstance(message, StepReport)]
                for report in reports[1:]:
                    reports[0].merge(report)
                others = [message for message in messages if not isinstance(message, StepReport | None)]
                for message in [*reports[:1], *others]:
                    self.connection.send(message)


class Route(NamedTuple):
    """The client that owns a request, the offset between client and engine request ids, and the number of outputs."""

    front_end: FrontEnd
    offset: int
    num_outputs: int


class EngineServer:
    """An engine, and the front ends that it serves; `make_constraint` compiles grammars in separate threads."""

    def __init__(self, engine: LLMEngine, info: EngineInfo, make_constraint: MakeConstraint) -> None:
        self._engine = engine
        self._info = info
        self._make_constraint = make_constraint
        self._compiler = ThreadPoolExecutor(_NUM_COMPILERS, "nanovllm-grammars")
        self._front_ends: set[FrontEnd] = set()
        # Routes of unfinished requests, by the id of each output.
        self._routes: dict[int, Route] = {}
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
                        front_end.preparing[order.request_id] = None
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
            self._abort(front_end, order)
        elif isinstance(order, Stop):
            ids = front_end.engine_ids
            self._engine.stop([(ids[request_id], index) for request_id, index in order.outputs if request_id in ids])
        elif isinstance(order, SendNewTokens):
            front_end.wants_steps = order.wanted
        else:
            front_end.say(self._call(order))

    def _enqueue(self, front_end: FrontEnd, order: Enqueue) -> None:
        if front_end not in self._front_ends:
            return
        request_id, num_outputs = order.request_id, order.request.params.n
        abort = front_end.preparing.pop(request_id, None)
        try:
            engine_id = self._engine.enqueue(order.request)
        except (ValueError, RuntimeError) as error:
            failure = f"request {request_id} failed: {error}", [request_id], portable(error)
            front_end.say(StepReport(failures=[failure], stats=self._engine.stats()))
            return
        front_end.engine_ids[request_id] = engine_id
        route = Route(front_end, request_id - engine_id, num_outputs)
        self._routes.update(dict.fromkeys(range(engine_id, engine_id + num_outputs), route))
        if abort is not None:
            self._abort(front_end, Abort([request_id], abort.keep_outputs))

    def _abort(self, front_end: FrontEnd, order: Abort) -> None:
        for request_id in front_end.preparing.keys() & set(order.request_ids):
            front_end.preparing[request_id] = order
        found = [front_end.engine_ids[i] for i in order.request_ids if i in front_end.engine_ids]
        self._engine.abort(found, keep_outputs=order.keep_outputs)

    def _call(self, order: CallEngine) -> CallResult:
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
        return CallResult(order.call_id, self._engine.stats(), result, error)

    def _leave(self, front_end: FrontEnd) -> None:
        self._front_ends.discard(front_end)
        front_end.close(0.0)
        self._engine.abort(front_end.engine_ids.values())

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
        self._add_steps(reports, tokens)
        self._sort(results, reports)
        stats = self._engine.stats() if reports else {}
        for front_end, report in reports.items():
            report.stats = stats
            front_end.say(report)
        return cause

    def _sort(self, results: EngineOutputs, reports: dict[FrontEnd, StepReport]) -> None:
        """Add results to the reports of their front ends, and forget finished requests."""
        routes = self._routes
        # Tokens of a request that is finished by now come before its end.
        for engine_id, index, token_id, is_end, logprobs in results.new_tokens:
            front_end, offset, _ = routes[engine_id]
            reports[front_end].new_tokens.append((engine_id + offset, index, token_id, is_end, logprobs))
        for engine_id, output in results.finished:
            front_end, request_id = self._forget(engine_id)
            # The front end has the prompt.
            output.request_id, output.prompt_token_ids = request_id, []
            reports[front_end].finished.append((request_id, output))
        for engine_id in results.dropped:
            front_end, request_id = self._forget(engine_id)
            reports[front_end].dropped.append(request_id)
        for failure in results.failures:
            cause = portable(failure.__cause__)
            by_front_end: dict[FrontEnd, list[int]] = defaultdict(list)
            for engine_id in failure.request_ids:
                front_end, request_id = self._forget(engine_id)
                by_front_end[front_end].append(request_id)
            for front_end, request_ids in by_front_end.items():
                reports[front_end].failures.append((str(failure), request_ids, cause))

    def _forget(self, engine_id: int) -> tuple[FrontEnd, int]:
        """Forget a finished request; return its owner, and its id there."""
        front_end, offset, num_outputs = self._routes[engine_id]
        for output_id in range(engine_id, engine_id + num_outputs):
            del self._routes[output_id]
        del front_end.engine_ids[engine_id + offset]
        return front_end, engine_id + offset

    def _add_steps(self, reports: dict[FrontEnd, StepReport], tokens: NewTokens) -> None:
        """Give all tokens of a step to the front ends that want them."""
        for front_end in self._front_ends:
            if front_end.wants_steps:
                own = NewTokens(tokens.num_prefill_tokens)
                for seq_ids, token_ids, dropped in tokens.sampled:
                    found = [(i, self._routes.get(seq_id)) for i, seq_id in enumerate(seq_ids) if seq_id not in dropped]
                    rows = {i: seq_ids[i] + r.offset for i, r in found if r is not None and r.front_end is front_end}
                    own.sampled.append((list(rows.values()), token_ids[list(rows)], set()))
                reports[front_end].steps.append(own)


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
    engine, dtype = model.engine, str(model.dtype).removeprefix("torch.")
    assert isinstance(engine, LLMEngine)
    info = EngineInfo(engine.limits, config.max_num_running, str(model.device), dtype, model.device_name)
    server = EngineServer(engine, info, model.files.constraints)
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
