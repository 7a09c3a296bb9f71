"""The thread that owns an engine's step loop, and the streams by which tasks of an event loop read its requests.

While the event loop is busy, tokens of several steps gather, and its tasks read them together.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from nanovllm.client.engine_client import EngineClient, News, RequestState
from nanovllm.outputs import RequestOutput, StepError
from nanovllm.text.grammar_trials import GrammarError

_POLL_SECONDS = 0.2
"""Time in which an idle thread notices that the engine was closed."""
_CLOSE_SECONDS = 10.0
_WAKES_AT_ONCE = 16
"""Streams that one turn of the event loop wakes, so that no turn takes long."""
_REST = 0.5
"""Pause after a round of wake-ups, as a fraction of the round's time.

256 streams on an H200: without the pause the engine's thread waits for the interpreter, and is 6% slower.
"""

_logger = logging.getLogger(__name__)


class Mailbox:
    """The streams of one event loop that have news; wakes them in rounds, and pauses, so that the engine goes on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        # In order, each once.
        self._streams: dict[RequestStream, None] = {}
        # From the first stream that is added until a round finds no stream.
        self._is_busy = False

    def add(self, stream: RequestStream) -> None:
        """Add a stream; from any thread."""
        with self._lock:
            self._streams[stream] = None
            if self._is_busy:
                return
            self._is_busy = True
        # A closed loop, even one closed just now, has no tasks that could read.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._begin_round)

    def _begin_round(self) -> None:
        with self._lock:
            streams = list(self._streams)
            self._streams.clear()
            self._is_busy = bool(streams)
        if streams:
            self._wake_some(streams, 0, time.perf_counter())

    def _wake_some(self, streams: list[RequestStream], first: int, began: float) -> None:
        last = first + _WAKES_AT_ONCE
        for stream in streams[first:last]:
            stream.wake()
        # The tasks have run by the time this is called.
        if last < len(streams):
            self.loop.call_soon(self._wake_some, streams, last, began)
        else:
            self.loop.call_soon(self._end_round, began)

    def _end_round(self, began: float) -> None:
        self.loop.call_later(_REST * (time.perf_counter() - began), self._begin_round)


class RequestStream:
    """One request, and its new output as it comes: an asynchronous iterator, whose last output is `finished`.

    One task at a time reads it, to its end or until `aclose`. Once it is garbage-collected, the request is aborted.
    `leave` is called, perhaps more than once, when the stream has no reader any more.
    """

    def __init__(
        self, state: RequestState, request_id: int | str, mailbox: Mailbox, leave: Callable[[RequestStream], None]
    ) -> None:
        self.state = state
        # Weak, so that a stream without a reader is aborted instead of kept.
        state.wake_reader = weakref.WeakMethod(self.notify)
        self.request_id = request_id
        self._mailbox = mailbox
        self._leave = leave
        self._has_left = False
        self._waiter: asyncio.Future[None] | None = None
        self._has_news = False

    def notify(self) -> None:
        """Make the reading task look for news; from any thread."""
        self._mailbox.add(self)

    def wake(self) -> None:
        """Let the reading task continue; called in its event loop."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for news and return them; StepError if its step failed, RuntimeError if the engine is closed."""
        if self._has_left:
            raise StopAsyncIteration
        output = None
        try:
            while output is None:
                if not self.state.is_done:
                    await self._wait()
                output = self.state.news()
        except BaseException:
            await self.aclose()
            raise
        if output.finished:
            await self.aclose()
        output.request_id = self.request_id
        return output

    async def whole(self) -> RequestOutput:
        """Wait for the end and return the whole output of a request that is not streamed; raises as iterating does."""
        try:
            while not self.state.is_done:
                await self._wait()
            output = self.state.result()
        finally:
            await self.aclose()
        output.request_id = self.request_id
        return output

    async def aclose(self) -> None:
        """Abort the request, unless it is finished."""
        self._has_left = True
        self._leave(self)

    def __del__(self) -> None:
        # It was dropped without being closed.
        if not self._has_left:
            self._leave(self)

    async def _wait(self) -> None:
        """Wait for the next `wake`, or return at once if it came since the last time."""
        if not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._has_news = False


class EngineThread:
    """Steps an engine while it has requests. Other threads reach it only by messages, which join the next step.

    `error` is the error that ended the thread; None while it runs, and after `close`.
    """

    def __init__(self, client: EngineClient) -> None:
        self.error: BaseException | None = None
        self._client = client
        # Requests to begin, or else to abort.
        self._messages: deque[tuple[RequestState, bool]] = deque()
        self._has_messages = threading.Event()
        self._is_closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="nanovllm-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether requests can be submitted."""
        return self._thread.is_alive() and not self._is_closing

    def require_running(self) -> None:
        """Raise a RuntimeError if the engine is closed."""
        if not self.is_running:
            raise _closed_error(self.error)

    def submit(self, state: RequestState) -> None:
        """Begin a request with the next step; a RuntimeError if the engine is closed."""
        with self._lock:
            self.require_running()
            self._messages.append((state, True))
        self._notify()

    def abort(self, state: RequestState) -> None:
        """Drop a request; its reader gets the output so far. Does nothing if it is done."""
        self._messages.append((state, False))
        self._notify()

    def close(self) -> None:
        """End the thread; remaining requests fail. Waits up to ten seconds for the end of a step."""
        with self._lock:
            self._is_closing = True
        self._notify()
        # The garbage collector may run, and close an engine, in any thread.
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _notify(self) -> None:
        self._has_messages.set()
        self._client.engine.wake()

    def _run(self) -> None:
        error: BaseException | None = None
        news: News = {}
        try:
            for news in self._client.steps(self._has_work):
                self._deliver(news)
        # No caller is above this thread to see the error: the readers get it, and `error` keeps it.
        except BaseException as caught:
            error = caught
            _logger.critical("the engine has stopped", exc_info=caught)
        self._end(error, news)

    def _has_work(self) -> bool:
        """Wait until there is work for the engine; return False if the thread must end."""
        while not self._is_closing:
            self._take_messages()
            if not self._client.is_finished():
                return True
            self._has_messages.wait(_POLL_SECONDS)
            self._client.engine.require_open()
        return False

    def _take_messages(self) -> None:
        self._has_messages.clear()
        while self._messages:
            # It stays there until it is done, so that `_end` finds it if something fails.
            state, begins = self._messages[0]
            if begins:
                self._client.add(state)
            elif state.request_id >= 0:
                self._client.engine.abort([state.request_id], keep_outputs=True)
            self._messages.popleft()

    def _deliver(self, news: News) -> None:
        failures = self._client.take_failures()
        for state in news.values():
            if isinstance(state.error, StepError) and state.error not in failures:
                failures.append(state.error)
        if failures:
            self._log_failures(failures)
        for state in news.values():
            if state.is_done or state.request.is_streamed:
                state.notify()

    def _log_failures(self, failures: list[StepError]) -> None:
        """Log failed steps, and raise if one has closed the engine: before its readers know, `error` must be set."""
        for failure in failures:
            if isinstance(failure.__cause__, GrammarError):
                # Concerns only that request, and is no fault of the engine. The message may quote the grammar.
                _logger.warning("the grammar of a request cannot be used")
            else:
                _logger.error("a step failed, and %d requests with it", len(failure.request_ids), exc_info=failure)
        try:
            self._client.engine.require_open()
        except RuntimeError as closed:
            raise closed from failures[-1]

    def _end(self, error: BaseException | None, news: News) -> None:
        """Fail what is left, and tell all readers; the last step's `news` may not have been delivered."""
        with self._lock:
            self.error = error
            self._is_closing = True
        states = self._client.unfinished()
        for state in [*news.values(), *states, *(state for state, begins in list(self._messages) if begins)]:
            if not state.is_done:
                state.error = _closed_error(error)
            state.notify()
        self._client.drop([state.request_id for state in states])


def _closed_error(cause: BaseException | None) -> RuntimeError:
    """Return the error of calls to an engine that was closed, perhaps by an error."""
    if cause is None:
        return RuntimeError("the engine is closed")
    text = str(cause.__cause__ or cause)
    error = RuntimeError(text if "the engine is closed" in text else f"the engine is closed: {text}")
    error.__cause__ = cause
    return error
