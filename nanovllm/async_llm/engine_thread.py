"""The thread that owns an engine's step loop."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from dataclasses import dataclass

from nanovllm.async_llm.request_stream import RequestStream
from nanovllm.engine.call_guard import Call, drive
from nanovllm.outputs import StepError
from nanovllm.text.engine_client import EngineClient
from nanovllm.text.grammar_compiler import GrammarError

_POLL_SECONDS = 0.2
"""How long an idle thread takes to notice that the engine was closed."""
_CLOSE_SECONDS = 10.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Abort:
    """A message that a request is to end: its id in the engine, or its stream if the engine may not have it yet."""

    target: RequestStream | int

    def request_id(self) -> int:
        """Return the id in the engine; -1 if it was never there."""
        if isinstance(self.target, int):
            return self.target
        return -1 if self.target.state is None else self.target.state.request_id


class EngineThread:
    """Steps an engine while it has requests. Others reach the engine by messages only, which join the next step.

    Args:
        client: has no other caller.

    Attributes:
        error: what ended the thread; None while it runs, and after `close`.
    """

    def __init__(self, client: EngineClient) -> None:
        self.error: BaseException | None = None
        self._client = client
        # Streams to begin, and streams, or ids in the engine, to abort.
        self._messages: deque[RequestStream | Abort] = deque()
        # By the ids in the engine. A stream that nobody reads any more is to be aborted, not to be kept.
        self._streams: dict[int, weakref.ref[RequestStream]] = {}
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

    def submit(self, stream: RequestStream) -> None:
        """Begin a request with the next step.

        Raises:
            RuntimeError: the engine is closed.
        """
        with self._lock:
            self.require_running()
            self._messages.append(stream)
        self._notify()

    def abort(self, stream: RequestStream) -> None:
        """Drop a request; its reader gets what it has so far. Nothing happens if it is done."""
        self._messages.append(Abort(stream if stream.state is None else stream.state.request_id))
        self._notify()

    def wake(self) -> None:
        """Have an idle thread look whether somebody waits for it."""
        self._has_messages.set()

    def close(self) -> None:
        """End the thread; requests that are left fail. Waits up to ten seconds for the end of a step."""
        with self._lock:
            self._is_closing = True
        self._notify()
        # The garbage collector may run, and close an engine, in any thread.
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _notify(self) -> None:
        """Have the thread look at its messages."""
        self._has_messages.set()
        self._client.engine.wake()

    def _run(self) -> None:
        client, call = self._client, Call()
        error: BaseException | None = None
        try:
            drive(client.engine, call)
            while not self._is_closing:
                self._take_messages()
                if self._streams or not client.is_finished():
                    client.run_step()
                    self._deliver()
                else:
                    self._has_messages.wait(_POLL_SECONDS)
                    client.engine.require_open()
        # Whatever it is, nobody above this thread would see it: the readers get it, and `error` keeps it.
        except BaseException as caught:
            error = caught
            _logger.critical("the engine has ended", exc_info=caught)
        self._end(call, error)

    def _take_messages(self) -> None:
        self._has_messages.clear()
        while self._messages:
            # It stays there until it is done, so that `_end` finds it if something fails.
            message = self._messages[0]
            if isinstance(message, Abort):
                if (request_id := message.request_id()) in self._streams:
                    self._client.engine.abort([request_id], keep_outputs=True)
            else:
                message.state = self._client.enqueue(message.request)
                self._streams[message.state.request_id] = weakref.ref(message)
            self._messages.popleft()

    def _deliver(self) -> None:
        for request_id, state in self._client.updated.items():
            if state.request.is_streamed and (stream := self._streams[request_id]()) is not None:
                stream.notify()
        finished, failures = self._client.take_all()
        for request_id, output in finished:
            if (stream := self._pop(request_id)) is not None:
                stream.finish(output)
        for failure in failures:
            if isinstance(failure.__cause__, GrammarError):
                # Of that request alone, and no fault of the engine. What it says may quote the grammar.
                _logger.warning("the grammar of a request cannot be used")
            else:
                _logger.error("a step failed, and %d requests with it", len(failure.request_ids), exc_info=failure)
            for request_id in failure.request_ids:
                if (stream := self._pop(request_id)) is not None:
                    stream.fail(_copy(failure))
        if failures:
            try:
                self._client.engine.require_open()
            except RuntimeError as closed:
                raise closed from failures[-1]

    def _pop(self, request_id: int) -> RequestStream | None:
        """Forget a request that has ended; returns its stream if somebody reads it."""
        reference = self._streams.pop(request_id, None)
        return None if reference is None else reference()

    def _end(self, call: Call, error: BaseException | None) -> None:
        """Fail what is left, and let go of the engine."""
        with self._lock:
            self.error = error
            self._is_closing = True
        left = [message for message in self._messages if not isinstance(message, Abort)]
        left += [stream for reference in self._streams.values() if (stream := reference()) is not None]
        for stream in left:
            stream.fail(_closed_error(error))
        request_ids = set(self._streams)
        self._streams.clear()
        try:
            self._client.drop(request_ids)
        finally:
            self._client.engine.end(call)


def _closed_error(cause: BaseException | None) -> RuntimeError:
    """Return the error of calls to an engine that was closed, perhaps by an error."""
    if cause is None:
        return RuntimeError("the engine is closed")
    text = str(cause.__cause__ or cause)
    error = RuntimeError(text if "the engine is closed" in text else f"the engine is closed: {text}")
    error.__cause__ = cause
    return error


def _copy(failure: StepError) -> StepError:
    # Each reader raises its own: a traceback grows wherever an exception is raised.
    return StepError(str(failure), failure.request_ids, failure.__cause__)
