"""The thread that owns an engine's step loop."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque

from nanovllm.client.engine_client import EngineClient, News
from nanovllm.client.request_state import RequestState
from nanovllm.client.request_stream import RequestStream
from nanovllm.outputs import StepError
from nanovllm.text.grammar_trials import GrammarError

_POLL_SECONDS = 0.2
"""Time in which an idle thread notices that the engine was closed."""
_CLOSE_SECONDS = 10.0

_logger = logging.getLogger(__name__)


class EngineThread:
    """Steps an engine while it has requests. Other threads reach the engine only by messages, which join the next step.

    Args:
        client: has no other caller.

    Attributes:
        error: the error that ended the thread; None while it runs, and after `close`.
    """

    def __init__(self, client: EngineClient) -> None:
        self.error: BaseException | None = None
        self._client = client
        # Streams to begin, and requests to abort.
        self._messages: deque[RequestStream | RequestState] = deque()
        # By their ids in the engine. Weak, so that a stream without a reader is aborted instead of kept.
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
        """Drop a request; its reader gets the output so far. Does nothing if it is done."""
        self._messages.append(stream.state)
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
        """Wake the thread to process its messages."""
        self._has_messages.set()
        self._client.engine.wake()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for news in self._client.steps(self._has_work):
                self._deliver(news)
        # No caller is above this thread to see the error: the readers get it, and `error` keeps it.
        except BaseException as caught:
            error = caught
            _logger.critical("the engine has ended", exc_info=caught)
        self._end(error)

    def _has_work(self) -> bool:
        """Wait until there is work for the engine; return False if the thread must end."""
        while not self._is_closing:
            self._take_messages()
            if self._streams or not self._client.is_finished():
                return True
            self._has_messages.wait(_POLL_SECONDS)
            self._client.engine.require_open()
        return False

    def _take_messages(self) -> None:
        self._has_messages.clear()
        while self._messages:
            # It stays there until it is done, so that `_end` finds it if something fails.
            message = self._messages[0]
            if isinstance(message, RequestStream):
                self._client.add(message.state)
                self._streams[message.state.request_id] = weakref.ref(message)
            elif message.request_id in self._streams:
                self._client.engine.abort([message.request_id], keep_outputs=True)
            self._messages.popleft()

    def _deliver(self, news: News) -> None:
        failures = self._client.take_failures()
        for state in news.values():
            if isinstance(state.error, StepError) and state.error not in failures:
                failures.append(state.error)
        if failures:
            self._log_failures(failures)
        for request_id, state in news.items():
            if state.is_done:
                reference = self._streams.pop(request_id, None)
            elif state.request.is_streamed:
                reference = self._streams[request_id]
            else:
                continue
            if reference is not None and (stream := reference()) is not None:
                stream.notify()

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

    def _end(self, error: BaseException | None) -> None:
        """Fail all remaining requests."""
        with self._lock:
            self.error = error
            self._is_closing = True
        left = [message for message in self._messages if isinstance(message, RequestStream)]
        left += [stream for reference in self._streams.values() if (stream := reference()) is not None]
        for stream in left:
            if not stream.state.is_done:
                stream.state.error = _closed_error(error)
            stream.notify()
        request_ids = set(self._streams)
        self._streams.clear()
        self._client.drop(request_ids)


def _closed_error(cause: BaseException | None) -> RuntimeError:
    """Return the error of calls to an engine that was closed, perhaps by an error."""
    if cause is None:
        return RuntimeError("the engine is closed")
    text = str(cause.__cause__ or cause)
    error = RuntimeError(text if "the engine is closed" in text else f"the engine is closed: {text}")
    error.__cause__ = cause
    return error
