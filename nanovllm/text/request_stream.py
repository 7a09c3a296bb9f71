"""Requests that an engine computes in one thread, and that tasks of an event loop in another thread read.

While the event loop is busy, tokens of several steps gather, and its tasks take them together.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

from nanovllm.engine.request_output import DecodeToken
from nanovllm.outputs import RequestOutput
from nanovllm.text.input_processor import Request
from nanovllm.text.output_processor import OutputState
from nanovllm.text.stream_output import StreamedRequest

_WAKES_AT_ONCE = 16
"""Streams that one turn of the event loop wakes, so that no turn takes long."""
_REST = 0.5
"""How long the event loop leaves streams alone after a round, as a part of the round's time.

256 streams on an H200: without a rest the engine's thread waits for the interpreter, and is 6% slower.
"""


class Mailbox:
    """The streams of one event loop that have news, and whose tasks it wakes in rounds.

    After each round it leaves them alone for a while, in which the engine's thread has the interpreter to itself.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        # In order, each once.
        self._streams: dict[RequestStream, None] = {}
        self._round: list[RequestStream] = []
        self._round_began = 0.0
        # From the first stream that is added until a round finds none.
        self._is_busy = False

    def add(self, stream: RequestStream) -> None:
        """Add a stream; from any thread."""
        with self._lock:
            self._streams[stream] = None
            if self._is_busy:
                return
            self._is_busy = True
        # A loop that was closed, perhaps just now, has no tasks that could read.
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
        # By the time that this is called the tasks have run.
        self.loop.call_soon(self._wake_some if self._round else self._end_round)

    def _end_round(self) -> None:
        self.loop.call_later(_REST * (time.perf_counter() - self._round_began), self._begin_round)


class RequestStream:
    """One request, computed by an `EngineThread` and read by one task at a time.

    Args:
        request: with an `OutputState` for each output.
        request_id: what its outputs are called.
        decode_token: returns the text of a token.
        mailbox: of the event loop whose task reads.
        is_streamed: whether outputs are wanted as they come, and not only when all are complete.
    """

    def __init__(
        self,
        request: Request,
        request_id: int | str,
        decode_token: DecodeToken,
        mailbox: Mailbox,
        is_streamed: bool = True,
    ) -> None:
        self.request = request
        self.request_id = request_id
        self.engine_id = -1
        self.is_done = False
        self._outputs = StreamedRequest(request, decode_token)
        self._mailbox = mailbox
        self._waiter: asyncio.Future[None] | None = None
        self._has_news = False
        self._final: RequestOutput | None = None
        self._error: BaseException | None = None
        if is_streamed:
            for features in request.features:
                assert isinstance(features.sink, OutputState)
                features.sink.on_token = self.notify

    def notify(self) -> None:
        """Have the reading task look for news; may be called from any thread."""
        self._mailbox.add(self)

    def finish(self, final: RequestOutput) -> None:
        """End with the engine's output."""
        self._final = final
        self._end_notices()

    def fail(self, error: BaseException) -> None:
        """End with an error, which the reading task gets."""
        self._error = error
        self._end_notices()

    def wake(self) -> None:
        """Let the reading task go on; called in its event loop."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_output(self) -> RequestOutput:
        """Wait for news and return them; those of the end are `finished`.

        Raises:
            StepError: the step that the request was in has failed.
            RuntimeError: the engine is closed.
        """
        while not self.is_done:
            await self._wait()
            output = None if self.is_done else self._outputs.take(self.request_id)
            if output is not None:
                return output
        return self._end()

    async def final_output(self) -> RequestOutput:
        """Wait for the end and return the whole output; raises as `next_output` does."""
        while not self.is_done:
            await self._wait()
        return self._end()

    async def _wait(self) -> None:
        """Wait for the next `wake`, or return at once if it came since the last time."""
        if not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._has_news = False

    def _end_notices(self) -> None:
        self.is_done = True
        self.notify()
        # The sinks refer to this stream, and it to them: they would wait for the garbage collector.
        for features in self.request.features:
            assert isinstance(features.sink, OutputState)
            features.sink.on_token = None

    def _end(self) -> RequestOutput:
        if self._error is not None:
            raise self._error
        assert self._final is not None
        output = self._outputs.take(self.request_id, self._final)
        assert output is not None
        return output
