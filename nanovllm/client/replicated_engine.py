"""Engines in other processes behind the interface `Engine`: one, or several with the same model.

The driving call sends pending orders, and processes messages; the engines step by themselves. If one dies, its requests
run again on the others: a request carries its seed, so that its tokens are the same (in float32; in other dtypes unless
a different batch changes them).
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from typing_extensions import Unpack, override

from nanovllm.client.messages import CallEngine, Enqueue, Order, StepReport
from nanovllm.client.placement import Placement
from nanovllm.config import Config
from nanovllm.engine.engine import Engine, EngineOutputs, EngineState, NewTokens, T, Ts
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Abort, Request, RequestLimits, RequestSeeds, check_request_ids
from nanovllm.outputs import StepError
from nanovllm.utils.device import DeviceInfo
from nanovllm.utils.interrupt import deferred_signals
from nanovllm.weights.report import LoadedWeights, LoadFailedError

_WAIT_SECONDS = 0.2
"""Longest wait of a step for news; signals and `wake` end it at once."""
_MOMENTARY = {
    "num_running", "num_waiting", "num_used_blocks", "num_free_blocks", "num_host_blocks", "num_used_states",
    "num_kept_states",
}  # fmt: skip
"""Counters of the present state, which are 0 once a replica is dead."""


class Replica:
    """An engine in another process; RuntimeError if it has exited.

    A thread reads its messages and calls `receive` with each report, and with None when the engine has exited. Orders
    go out together, with `flush`. `exit_text` returns how the process exited, once the connection is closed.

    Attributes:
        limits, device: the engine's.
        stats, state: its counters and state as of its last message.
        has_ended: whether no more messages come.
    """

    def __init__(
        self, index: int, connection: Connection, receive: Callable[[Replica, StepReport | None], None],
        exit_text: Callable[[], str],
    ) -> None:  # fmt: skip
        self.index = index
        try:
            first: tuple[RequestLimits, DeviceInfo] = connection.recv()
        except (EOFError, OSError):
            raise RuntimeError(exit_text()) from None
        self.limits, self.device = first
        self.stats: dict[str, Any] = {}
        self.state = EngineState()
        self._connection = connection
        self._receive = receive
        self._exit_text = exit_text
        self._cause = ""
        self._orders: list[Order] = []
        self._lock = threading.Lock()
        # By id, since an interrupted call may have no order.
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = count()
        self.has_ended = False
        threading.Thread(target=self._read, name="nanovllm-replica", daemon=True).start()

    def exit_text(self) -> str:
        """Return how the engine exited."""
        return self._cause or self._exit_text()

    def add(self, order: Order) -> None:
        """Send an order with the next `flush`."""
        self._orders.append(order)

    def flush(self) -> None:
        """Send pending orders; from any thread. If the engine has exited, `has_ended` becomes true soon."""
        if not self._orders:
            return
        # A message that a signal's handler cuts off would spoil all later ones.
        with deferred_signals(), self._lock:
            orders, self._orders = self._orders, []
            with suppress(OSError):
                self._connection.send(orders)

    def call(self, function: Callable[..., T], args: tuple[Any, ...]) -> Future[T]:
        """Call a function with the engine and other arguments."""
        future: Future[T] = Future()
        call_id = next(self._call_ids)
        self._calls[call_id] = future
        self.add(CallEngine(call_id, function, args))
        self.flush()
        if self.has_ended:
            self._end_calls()
        return future

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                for message in self._connection.recv():
                    self._take(message)
        # Before `has_ended`: an engine whose replicas have all ended is open as long as a death is to be processed.
        self._receive(self, None)
        self.has_ended = True
        with self._lock:
            self._connection.close()
        self._end_calls()

    def _take(self, message: Any) -> None:
        if isinstance(message, str):
            self._cause = message
        elif isinstance(message, EngineState):
            self.state = message
        elif isinstance(message, StepReport):
            self.stats = message.stats
            self._receive(self, message)
        else:
            self.stats = message.stats
            future = self._calls.pop(message.call_id)
            if message.error is not None:
                future.set_exception(message.error)
            else:
                future.set_result(message.result)

    def _end_calls(self) -> None:
        while self._calls:
            with suppress(KeyError):
                _, future = self._calls.popitem()
                future.set_exception(RuntimeError(self.exit_text()))


class ReplicatedEngine(Engine):
    """Engines in other processes, all with the settings `config` but for the device; RuntimeError if one has exited.

    Args:
        connections: to the engines, from `EngineProcess.connect`.
        exit_texts: for each, returns how its process exited, once its connection is closed.
        close: ends the processes, if this engine owns them.
        number: of this front end, among all that the engines have had; sets its requests' ids and noise apart.
    """

    is_in_process = False

    def __init__(
        self, config: Config, connections: Sequence[Connection], exit_texts: Sequence[Callable[[], str]],
        close: Callable[[], None], number: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        first = number << 40
        self.seeds, self._request_ids = RequestSeeds(config.seed, first), count(first)
        # Messages of the replicas that are not processed yet.
        self._inbox = inbox = deque[tuple[Replica, StepReport | None]]()
        self._has_news = has_news = threading.Event()

        # Called in the replicas' threads, which must not keep this engine alive.
        def receive(replica: Replica, report: StepReport | None) -> None:
            inbox.append((replica, report))
            has_news.set()

        self._replicas = [
            Replica(index, connection, receive, exit_text)
            for index, (connection, exit_text) in enumerate(zip(connections, exit_texts, strict=True))
        ]
        size, device = len(self._replicas), self._replicas[0].device
        self.device = device if size == 1 else replace(device, name=f"{size} x {device.name}")
        # Their caches may differ a little.
        self.limits = min((replica.limits for replica in self._replicas), key=lambda limits: limits.max_stored_tokens)
        self._placement = Placement([config.max_num_running] * size, config.kvcache_block_size)
        self._close_processes = close
        self._closed_by = ""
        self._is_closed = False
        # Id of the request, by the ids of its further outputs.
        self._first_ids: dict[int, int] = {}
        # Requests come from any thread.
        self._lock = threading.RLock()
        self.call(LLMEngine.is_finished)

    @property
    @override
    def is_open(self) -> bool:
        if self._is_closing or not self._placement.shares:
            return False
        # Messages of the last engine before its exit must still be processed.
        return any(not replica.has_ended for replica in self._replicas) or bool(self._inbox)

    @property
    @override
    def state(self) -> EngineState:
        # A replica that died at rest is noticed by the next step, which it must not hold up.
        alive = [self._replicas[index] for index in list(self._placement.shares)]
        states = [replica.state for replica in alive if not replica.has_ended] or [EngineState()]
        return next((state for state in states if state.holds_steps), states[0])

    @property
    @override
    def request_ids(self) -> set[int]:
        with self._lock:
            return set(self._placement.requests)

    @override
    def enqueue(self, request: Request) -> int:
        self.require_open()
        with self._lock:
            request_id = self._new_id(request)
            index = self._placement.route(request_id, request)
            self._replicas[index].add(Enqueue(request_id, request))
        self.wake()
        return request_id

    @override
    def enqueue_all(self, requests: Sequence[Request]) -> list[int]:
        self.require_open()
        with self._lock:
            request_ids = [self._new_id(request) for request in requests]
            self._placement.spread(dict(zip(request_ids, requests, strict=True)))
        self.wake()
        return request_ids

    @override
    def abort(self, request_ids: Iterable[int], *, keep_outputs: bool = False) -> None:
        with deferred_signals(), self._lock:
            for request_id in {self._first_ids.get(i, i) for i in check_request_ids(request_ids)}:
                if request_id in self._placement.requests:
                    self._abort(request_id, keep_outputs)
        self._flush()
        self.wake()

    @override
    def wake(self) -> None:
        self._has_news.set()

    @override
    def run_step(self) -> NewTokens:
        with self._alone():
            return self._step()

    def _step(self) -> NewTokens:
        self.require_open()
        self._send_orders()
        if self._placement.requests and not (self._inbox or self.has_results):
            self._has_news.wait(_WAIT_SECONDS)
        self._has_news.clear()
        tokens = NewTokens()
        with deferred_signals(), self._lock:
            # Stop strings in a dead replica's last tokens are found first: another would end its outputs without any.
            while self._inbox and not (self._inbox[0][1] is None and self._results.new_tokens):
                replica, report = self._inbox.popleft()
                if report is not None:
                    self._take_in(replica, report, tokens)
                else:
                    self._lose(replica)
        # A replica that has finished requests gets more before the results are processed.
        self._send_orders()
        self._history.sample_if_due(self.stats)
        return tokens

    @override
    def take_results(self) -> EngineOutputs:
        with self._lock:
            results, self._results = self._results, EngineOutputs()
        return results

    @override
    def stop(self, outputs: list[tuple[int, int]]) -> None:
        with self._lock:
            for request_id, index in outputs:
                holder = self._placement.holder(request_id)
                if holder is not None:
                    self._replicas[holder].add(CallEngine(None, LLMEngine.stop, ([(request_id, index)],)))

    @override
    def is_finished(self) -> bool:
        # The driving call must notice a death, even without work.
        alive = self._placement.shares
        has_died = any(replica.has_ended and replica.index in alive for replica in self._replicas)
        return not (self._placement.requests or self._results or has_died)

    @override
    def require_open(self) -> None:
        if not self.is_open:
            raise RuntimeError(f"the engine is closed{f': {self._closed_by}' if self._closed_by else ''}")

    @override
    def call(self, function: Callable[[Any, Unpack[Ts]], T], *args: Unpack[Ts]) -> list[T]:
        self.require_open()
        calls = [replica.call(function, args) for replica in self._replicas if not replica.has_ended]
        # If one raises, the others have still finished their calls.
        wait(calls)
        return [call.result() for call in calls]

    @override
    def load_weights(self, weights: Any, strict: bool) -> LoadedWeights:
        with ExitStack() as stack:
            if not isinstance(weights, str):
                from nanovllm.weights.files import write_tensors  # noqa: PLC0415
                from nanovllm.weights.model_weights import counted  # noqa: PLC0415

                folder = stack.enter_context(TemporaryDirectory(prefix="nanovllm-weights-"))
                with counted([]):
                    weights = write_tensors(folder, weights.items() if isinstance(weights, Mapping) else weights)
            try:
                loaded = self.call(LLMEngine.load_weights, weights, strict)
            except LoadFailedError:
                # Replicas that have merged an adapter would otherwise differ from ones that have removed it.
                self.call(LLMEngine.unload_adapter)
                raise
        nan_names = dict.fromkeys(name for replica in loaded for name in replica.nan_names)
        return LoadedWeights(loaded[0].count, loaded[0].missing, list(nan_names))

    @override
    def stats(self, *, now: bool = False) -> dict[str, Any]:
        if now and self.is_open:
            # A replica that has just died keeps its last counters.
            with suppress(RuntimeError):
                self.call(LLMEngine.is_finished)
        total: dict[str, Any] = {}
        for name, value in (item for replica in self._replicas for item in replica.stats.items()):
            # Lists are added position by position.
            total[name] = np.add(total.get(name, 0), value).tolist()
        return total

    def __del__(self) -> None:
        # A constructor that raised leaves nothing behind.
        if "_lock" in vars(self):
            self.exit()

    @override
    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with deferred_signals():
                self._close_processes()

    def _new_id(self, request: Request) -> int:
        first, *others = (next(self._request_ids) for _ in range(request.params.n))
        self._first_ids.update(dict.fromkeys(others, first))
        return first

    def _send_orders(self) -> None:
        """Give replicas the requests that they have room for, and send them."""
        with deferred_signals(), self._lock:
            placement = self._placement
            for request_id, index in placement.take():
                self._replicas[index].add(Enqueue(request_id, placement.requests[request_id]))
        self._flush()

    def _flush(self) -> None:
        for index in list(self._placement.shares):
            self._replicas[index].flush()

    def _abort(self, request_id: int, keep_outputs: bool) -> None:
        holder = self._placement.holder(request_id)
        if keep_outputs:
            if holder is None:
                # Only an engine can make the output of a request that has not started.
                holder = self._placement.send_now(request_id)
                self._replicas[holder].add(Enqueue(request_id, self._placement.requests[request_id]))
        else:
            self._end(request_id)
            self._results.dropped.append(request_id)
        if holder is not None:
            self._replicas[holder].add(Abort([request_id], keep_outputs))

    def _end(self, request_id: int) -> Request:
        request = self._placement.end(request_id)
        for index in range(request.params.n):
            self._first_ids.pop(request_id + index, None)
        return request

    def _take_in(self, replica: Replica, report: StepReport, tokens: NewTokens) -> None:
        """Keep an engine's results for requests that it still has."""
        results, holder = self._results, self._placement.holder
        results.new_tokens += report.new_tokens
        tokens.streamed += report.new_tokens
        tokens.num_prefill_tokens += report.num_prefill_tokens
        for request_id, output in report.finished:
            if holder(request_id) == replica.index:
                # The field accepts an array as well.
                token_ids: Any = self._end(request_id).token_ids
                output.prompt_token_ids = token_ids
                results.finished.append((request_id, output))
        for failure in report.failures:
            failed = [request_id for request_id in failure.request_ids if holder(request_id) == replica.index]
            for request_id in failed:
                self._end(request_id)
            if failed:
                results.fail(StepError(str(failure), failed, failure.__cause__))

    def _lose(self, replica: Replica) -> None:
        """Give a dead engine's unfinished work to the others; if there are no others, everything fails."""
        if replica.index not in self._placement.shares:
            return
        again = self._placement.lose(replica.index)
        replica.stats |= dict.fromkeys(_MOMENTARY & replica.stats.keys(), 0)
        cause = replica.exit_text()
        if self._placement.shares:
            warnings.warn(f"{cause}; its {len(again)} requests run again on the others", stacklevel=3)
            return
        self._closed_by = cause
        left = list(self._placement.requests)
        for request_id in left:
            self._end(request_id)
        self._results.fail(StepError(cause, left, RuntimeError(cause)))
