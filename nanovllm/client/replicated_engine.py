"""Engines in other processes behind the protocol `Engine`: one, or several with the same model.

Whoever drives it sends the orders that have gathered, and takes in what has come; the engines step by themselves. If
one dies, its requests run again on the others: a request carries its seed, so that its tokens are the same (in float32;
in other dtypes as far as another batch does not change them).
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from nanovllm.client.messages import EngineInfo, Enqueue, SendNewTokens, StepReport, Stop
from nanovllm.client.placement import Placement
from nanovllm.client.replica import Inbox, Replica
from nanovllm.config import Config
from nanovllm.engine.engine import Engine
from nanovllm.engine.engine_outputs import EngineOutputs, NewTokens, TokenFields
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.request import Abort, Request, RequestLimits, check_request_ids
from nanovllm.engine.stats_history import StatsHistory, StatsSample
from nanovllm.outputs import StepError
from nanovllm.utils.interrupt import deferred_signals

_WAIT_SECONDS = 0.2
"""How long a step waits for news; signals, and whoever has been woken, are heard at once."""
_MOMENTARY = ("num_running", "num_waiting", "num_used_blocks", "num_free_blocks")
"""Counters of what is now, which a replica that has died has none of."""
_MOMENTARY_ON_HOST = ("num_host_blocks", "host_bytes_per_second", "prefill_tokens_per_second")
"""Further ones of `swap_space`."""


class ReplicatedEngine(Engine):
    """Engines in other processes.

    Args:
        config: the settings, those of each replica but for its device.
        connections: to the engines, from `EngineProcess.connect`.
        exit_texts: of each, says how its process has ended, once its connection has.
        close: ends the processes, if this is their owner.

    Attributes:
        limits: what requests must keep to.
        info: what the first engine says of itself.
        num_replicas: how many there were at the start.

    Raises:
        RuntimeError: an engine has ended.
    """

    is_in_process = False

    def __init__(
        self,
        config: Config,
        connections: Sequence[Connection],
        exit_texts: Sequence[Callable[[], str]],
        close: Callable[[], None],
    ) -> None:
        super().__init__()
        self._inbox = Inbox()
        self._replicas = [
            Replica(index, connection, self._inbox, exit_text)
            for index, (connection, exit_text) in enumerate(zip(connections, exit_texts, strict=True))
        ]
        self.num_replicas = len(self._replicas)
        infos = [replica.info for replica in self._replicas]
        self.info: EngineInfo = infos[0]
        # Their caches may differ a little.
        self.limits: RequestLimits = min((info.limits for info in infos), key=lambda limits: limits.max_stored_tokens)
        self._placement = Placement([info.max_num_running for info in infos], config.kvcache_block_size)
        # Of those that have died.
        self._past_stats: Counter[str] = Counter()
        self._close_processes = close
        self._closed_by: str | None = None
        self._is_closed = False
        self._request_ids = count()
        # Of the request, by the ids of its further outputs.
        self._first_ids: dict[int, int] = {}
        self._results = EngineOutputs()
        self._wants_steps = False
        # Tokens of each output that have been reported, and those that come again, of replicas that may die.
        self._num_reported: Counter[tuple[int, int]] = Counter()
        self._num_repeated: dict[tuple[int, int], int] = {}
        # Outputs that have met a stop string, at their last token that has been reported.
        self._stopped: set[tuple[int, int]] = set()
        self._history = StatsHistory()
        # Requests come from any thread.
        self._lock = threading.RLock()
        self.call("is_finished")

    @property
    def is_open(self) -> bool:
        """Whether the engine takes requests and steps."""
        if self._is_closing or not self._placement.shares:
            return False
        # What the last one has brought before its end is still to be taken in.
        return bool(self._inbox.messages) or any(not replica.has_ended for replica in self._replicas)

    @property
    def state(self) -> EngineState:
        """What holds up the steps of an engine, of one that is held if any is; see `Engine`."""
        # One that has died at rest is missed by the next step, which it must not hold up.
        alive = [self._replicas[index] for index in list(self._placement.shares)]
        states = [replica.state for replica in alive if not replica.has_ended] or [EngineState()]
        return next((state for state in states if state.holds_steps), states[0])

    @property
    def request_ids(self) -> set[int]:
        """Ids of unfinished requests of this front end."""
        with self._lock:
            return set(self._placement.requests)

    @property
    def has_results(self) -> bool:
        """Whether `take_results` has anything."""
        return not self._results.is_empty

    def enqueue(self, request: Request) -> int:
        """Queue a request, which a replica gets with the next step; see `Engine`."""
        self.require_open()
        with self._lock:
            (request_id,) = self._new_ids([request])
            index = self._placement.route(request_id, request)
            self._replicas[index].add(Enqueue(request_id, request))
        self.wake()
        return request_id

    def enqueue_all(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests that come together; see `Engine`."""
        self.require_open()
        with self._lock:
            request_ids = self._new_ids(requests)
            self._placement.spread(dict(zip(request_ids, requests, strict=True)))
        self.wake()
        return request_ids

    def abort(self, request_ids: Iterable[int], *, keep_outputs: bool = False) -> None:
        """Drop requests, or finish them with what they have; see `Engine`."""
        with deferred_signals(), self._lock:
            for request_id in {self._first_ids.get(i, i) for i in check_request_ids(request_ids)}:
                if request_id in self._placement.requests:
                    self._abort(request_id, keep_outputs)
        self._flush()
        self.wake()

    def wake(self) -> None:
        """Let a step that waits end."""
        self._inbox.has_news.set()

    def run_step(self, wants_tokens: bool = False) -> NewTokens:
        """Send what is to be done, wait for news, and take them in; see `Engine`."""
        with self._alone():
            return self._step(wants_tokens)

    def _step(self, wants_tokens: bool) -> NewTokens:
        self.require_open()
        if wants_tokens != self._wants_steps:
            self._wants_steps = wants_tokens
            for replica in self._replicas:
                replica.add(SendNewTokens(wants_tokens))
        self._send_orders()
        if self._placement.requests and not (self._inbox.messages or self.has_results):
            self._inbox.has_news.wait(_WAIT_SECONDS)
        self._inbox.has_news.clear()
        tokens = NewTokens()
        with deferred_signals(), self._lock:
            while self._inbox.messages:
                replica, report = self._inbox.messages.popleft()
                if report is not None:
                    self._take_in(replica, report, tokens)
                else:
                    self._lose(replica)
        # A replica that has ended something gets more before anybody looks at that.
        self._send_orders()
        self._history.sample_if_due(self.stats)
        return tokens

    def take_results(self) -> EngineOutputs:
        """Return, once, what steps have brought."""
        with self._lock:
            results, self._results = self._results, EngineOutputs()
        return results

    def stop(self, outputs: list[tuple[int, int]]) -> None:
        """End outputs at their stop strings; see `Engine`."""
        with self._lock:
            for request_id, index in outputs:
                holder = self._placement.holder(request_id)
                if holder is not None:
                    self._stopped.add((request_id, index))
                    self._replicas[holder].add(Stop([(request_id, index)]))

    def is_finished(self) -> bool:
        """Whether no request is left, and every result has been taken."""
        # Whoever drives the engine is to see a death, also while there is nothing to do.
        alive = self._placement.shares
        has_died = any(replica.has_ended and replica.index in alive for replica in self._replicas)
        return not (self._placement.requests or self._results or has_died)

    def require_open(self) -> None:
        """Raise a RuntimeError if the engine is closed."""
        if not self.is_open:
            cause = self._closed_by
            raise RuntimeError("the engine is closed" if cause is None else f"the engine is closed: {cause}")

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every engine, and return the results of those that are alive; see `Engine`."""
        self.require_open()
        calls = [replica.call(method, args) for replica in self._replicas if not replica.has_ended]
        # Of one that raises, too, the others are done with what they were given.
        wait(calls)
        return [call.result() for call in calls]

    def stats(self, *, now: bool = False) -> dict[str, int]:
        """Return the sums of the engines' counters; see `Engine`."""
        if now and self.is_open:
            # One that has just died has its last ones.
            with suppress(RuntimeError):
                self.call("is_finished")
        total = Counter(dict.fromkeys(_MOMENTARY, 0) | self._past_stats)
        for index in list(self._placement.shares):
            total.update(self._replicas[index].stats)
        return dict(total)

    def stats_history(self) -> list[StatsSample]:
        """Return the counters over time, oldest first; the last sample is of now."""
        return self._history.samples(self.stats(now=True))

    def __del__(self) -> None:
        # A constructor that raised leaves nothing behind.
        if "_lock" in vars(self):
            self.exit()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with deferred_signals():
                self._close_processes()

    def _new_ids(self, requests: Sequence[Request]) -> list[int]:
        request_ids = []
        for request in requests:
            first, *others = (next(self._request_ids) for _ in range(request.params.n))
            self._first_ids.update(dict.fromkeys(others, first))
            request_ids.append(first)
        return request_ids

    def _send_orders(self) -> None:
        """Give replicas what they have room for, and send it."""
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
                # An engine says what the output of nothing is.
                holder = self._placement.send_now(request_id)
                self._replicas[holder].add(Enqueue(request_id, self._placement.requests[request_id]))
        else:
            self._end(request_id)
            self._results.dropped.append(request_id)
        if holder is not None:
            self._replicas[holder].add(Abort([request_id], keep_outputs))

    def _end(self, request_id: int) -> Request:
        """Forget a request that has ended."""
        request = self._placement.end(request_id)
        for index in range(request.params.n):
            self._first_ids.pop(request_id + index, None)
            self._num_reported.pop((request_id, index), None)
            self._num_repeated.pop((request_id, index), None)
            self._stopped.discard((request_id, index))
        return request

    def _take_in(self, replica: Replica, report: StepReport, tokens: NewTokens) -> None:
        """Keep what an engine has brought, of requests that it still has."""
        results, holder = self._results, self._placement.holder
        results.new_tokens += self._new(report.new_tokens) if self.num_replicas > 1 else report.new_tokens
        for request_id, output in report.finished:
            if holder(request_id) == replica.index:
                # The field takes an array as well.
                token_ids: Any = self._end(request_id).token_ids
                output.prompt_token_ids = token_ids
                results.finished.append((request_id, output))
        for message, request_ids, cause in report.failures:
            failed = [request_id for request_id in request_ids if holder(request_id) == replica.index]
            for request_id in failed:
                self._end(request_id)
            if failed:
                results.fail(StepError(message, failed, cause))
        for step in report.steps:
            tokens.num_prefill_tokens += step.num_prefill_tokens
            tokens.sampled += step.sampled

    def _new(self, tokens: list[TokenFields]) -> Iterator[TokenFields]:
        """Yield the tokens that have not been reported by an engine that has died."""
        for token in tokens:
            key = token[:2]
            if self._num_repeated.get(key, 0) > 0:
                self._num_repeated[key] -= 1
                if not self._num_repeated[key] and key in self._stopped:
                    self.stop([key])
            elif token[0] in self._placement.requests:
                self._num_reported[key] += 1
                yield token

    def _lose(self, replica: Replica) -> None:
        """Let the others do what an engine that has died has not; if there is none, everything fails."""
        if replica.index not in self._placement.shares:
            return
        again = self._placement.lose(replica.index)
        momentary = {*_MOMENTARY, *_MOMENTARY_ON_HOST}
        past = {name: value for name, value in replica.stats.items() if name not in momentary}
        self._past_stats.update(past)
        cause = replica.exit_text()
        if self._placement.shares:
            repeated = set(again)
            self._num_repeated.update({key: n for key, n in self._num_reported.items() if key[0] in repeated})
            warnings.warn(f"{cause}; its {len(again)} requests run again on the others", stacklevel=3)
            return
        self._closed_by = cause
        left = list(self._placement.requests)
        for request_id in left:
            self._end(request_id)
        self._results.fail(StepError(cause, left, RuntimeError(cause)))
