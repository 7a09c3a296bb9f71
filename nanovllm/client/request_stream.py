"""Requests that an engine computes in one thread, and that tasks of an event loop in another thread read.

While the event loop is busy, tokens of several steps gather, and its tasks read them together.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from nanovllm.client.engine_client import RequestState
from nanovllm.outputs import RequestOutput

_WAKES_AT_ONCE = 16
"""Streams that one turn of the event loop wakes, so that no turn takes long."""
_REST = 0.5
"""Pause after a round of wake-ups, as a fraction of the round's time.

256 streams on an H200: without the pause the engine's thread waits for the interpreter, and is 6% slower.
"""


class Mailbox:
    """The streams of one event loop that have news, and whose tasks it wakes in rounds.

    After each round it pauses, so that the engine's thread has the interpreter to itself.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        # In order, each once.
        self._streams: dict[RequestStream, None] = {}
        self._round: list[RequestStream] = []
        self._round_began = 0.0
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
            self._round = list(reversed(self._streams))
            self._streams.clear()
            self._is_busy = bool(self._round)
        self._round_began = time.perf_counter()
        if self._round:
            self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(_WAKES_AT_ONCE, len(self._round))):
            self._round.pop().wake()
        # The tasks have run by the time this is called.
        self.loop.call_soon(self._wake_some if self._round else self._end_round)

    def _end_round(self) -> None:
        self.loop.call_later(_REST * (time.perf_counter() - self._round_began), self._begin_round)


class RequestStream:
    """One request, and its new output as it comes: an asynchronous iterator, whose last output is `finished`.

    One task at a time reads it, to its end or until `aclose`. Once it is garbage-collected, the request is aborted.

    Args:
        state: of the request, which an `EngineThread` computes.
        request_id: id of its outputs.
        mailbox: of the reading task's event loop.
        leave: called, perhaps more than once, when the stream has no reader any more.
    """

    def __init__(
        self, state: RequestState, request_id: int | str, mailbox: Mailbox, leave: Callable[[RequestStream], None]
    ) -> None:
        self.state = state
        self.request_id = request_id
        self._mailbox = mailbox
        self._leave = leave
        self._has_left = False
        self._waiter: asyncio.Future[None] | None = None
        self._has_news = False

    def notify(self) -> None:
        """Make the reading task look for news; may be called from any thread."""
        self._mailbox.add(self)

    def wake(self) -> None:
        """Let the reading task continue; called in its event loop."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for news and return them.

        Raises:
            StepError: the step that the request was in has failed.
            RuntimeError: the engine is closed.
        """
        if self._has_left:
            raise StopAsyncIteration
        try:
            output = await self._next()
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
        # It was dropped without being closed. The thread holds it until it is queued.
        if not self._has_left and self.state.request_id >= 0:
            self._leave(self)

    async def _next(self) -> RequestOutput:
        output = None
        while output is None:
            if not self.state.is_done:
                await self._wait()
            output = self.state.news()
        return output

    async def _wait(self) -> None:
        """Wait for the next `wake`, or return at once if it came since the last time."""
        if not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._has_news = False
