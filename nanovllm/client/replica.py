"""A front end's end of the connection to one engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from nanovllm.client.messages import CallEngine, CallResult, Ended, EngineInfo, Order, StepReport
from nanovllm.engine.engine import EngineState


class Inbox:
    """Unprocessed messages of all replicas."""

    def __init__(self) -> None:
        self.messages: deque[tuple[Replica, StepReport | None]] = deque()
        self.has_news = threading.Event()

    def put(self, replica: Replica, report: StepReport | None) -> None:
        """Add a report; None: the replica has exited."""
        self.messages.append((replica, report))
        self.has_news.set()


class Replica:
    """An engine in another process.

    A thread reads its messages. Orders go out together, with `flush`.

    Args:
        index: index of the replica.
        connection: to the engine.
        inbox: gets the messages.
        exit_text: returns how the process exited, once the connection is closed.

    Attributes:
        info: the engine's description of itself.
        stats: the engine's counters, as of its last message.
        state: the engine's pause and sleep state.

    Raises:
        RuntimeError: the engine has exited.
    """

    def __init__(self, index: int, connection: Connection, inbox: Inbox, exit_text: Callable[[], str]) -> None:
        self.index = index
        try:
            self.info: EngineInfo = connection.recv()
        except (EOFError, OSError):
            raise RuntimeError(exit_text()) from None
        self.stats: dict[str, int] = {}
        self.state = EngineState()
        self._connection = connection
        self._inbox = inbox
        self._exit_text = exit_text
        self._cause: str | None = None
        self._orders: list[Order] = []
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._call_ids = count()
        self._has_ended = False
        threading.Thread(target=self._read, name="nanovllm-replica", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether no more messages come."""
        return self._has_ended

    def exit_text(self) -> str:
        """Return how the engine exited."""
        return self._exit_text() if self._cause is None else f"{self._cause}"

    def add(self, order: Order) -> None:
        """Send an order with the next `flush`."""
        self._orders.append(order)

    def flush(self) -> None:
        """Send pending orders; from any thread. If the engine has exited, `has_ended` becomes true soon."""
        with self._lock:
            if self._orders:
                orders, self._orders = self._orders, []
                with suppress(OSError):
                    self._connection.send(orders)

    def call(self, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Call a method of the engine."""
        future: Future[Any] = Future()
        call_id = next(self._call_ids)
        self._calls[call_id] = future
        self.add(CallEngine(call_id, method, args))
        self.flush()
        if self._has_ended:
            self._end_calls()
        return future

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                message = self._connection.recv()
                if isinstance(message, Ended):
                    self._cause = message.cause
                    continue
                if isinstance(message, EngineState):
                    self.state = message
                    continue
                self.stats = message.stats
                if isinstance(message, StepReport):
                    self._inbox.put(self, message)
                else:
                    _resolve(self._calls.pop(message.call_id), message)
        self._has_ended = True
        with self._lock:
            self._connection.close()
        self._end_calls()
        self._inbox.put(self, None)

    def _end_calls(self) -> None:
        while self._calls:
            with suppress(KeyError):
                _, future = self._calls.popitem()
                future.set_exception(RuntimeError(self.exit_text()))


def _resolve(future: Future[Any], message: CallResult) -> None:
    if message.error is not None:
        future.set_exception(message.error)
    else:
        future.set_result(message.result)
