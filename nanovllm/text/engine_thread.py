"""The thread that owns an engine's step loop."""

from __future__ import annotations

import logging
import threading
from collections import deque

from nanovllm.engine.call_guard import Call
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import StepError
from nanovllm.text.request_stream import RequestStream
from nanovllm.text.structured_output import GrammarError

_POLL_SECONDS = 0.2
"""How long an idle thread takes to notice that the engine was closed."""
_CLOSE_SECONDS = 10.0

_logger = logging.getLogger(__name__)


class EngineThread:
    """Steps an engine while it has requests. Others reach the engine by messages only, which join the next step.

    Args:
        engine: has no other caller.

    Attributes:
        error: what ended the thread; None while it runs, and after `close`.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.error: BaseException | None = None
        self._engine = engine
        # Streams to begin, and streams to abort.
        self._messages: deque[tuple[RequestStream, bool]] = deque()
        self._streams: dict[int, RequestStream] = {}
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
            self._messages.append((stream, False))
        self._has_messages.set()

    def abort(self, stream: RequestStream) -> None:
        """Drop a request; its reader gets what it has so far. Nothing happens if it is done."""
        self._messages.append((stream, True))
        self._has_messages.set()

    def close(self) -> None:
        """End the thread; requests that are left fail. Waits up to ten seconds for the end of a step."""
        with self._lock:
            self._is_closing = True
        self._has_messages.set()
        # The garbage collector may run, and close an engine, in any thread.
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        call = Call()
        error: BaseException | None = None
        try:
            self._engine.begin(call)
            while not self._is_closing:
                self._take_messages()
                if self._streams or not self._engine.is_finished():
                    self._engine.run_step()
                    self._deliver()
                else:
                    self._has_messages.wait(_POLL_SECONDS)
                    self._engine.require_open()
        # Whatever it is, nobody above this thread would see it: the readers get it, and `error` keeps it.
        except BaseException as caught:
            error = caught
            _logger.critical("the engine has ended", exc_info=caught)
        self._end(call, error)

    def _take_messages(self) -> None:
        self._has_messages.clear()
        while self._messages:
            # It stays there until it is done, so that `_end` finds it if something fails.
            stream, is_abort = self._messages[0]
            if not is_abort:
                request = stream.request
                stream.engine_id = self._engine.enqueue(request.token_ids, request.params, request.features)
                self._streams[stream.engine_id] = stream
            elif stream.engine_id in self._streams:
                self._engine.abort([stream.engine_id], keep_outputs=True)
            self._messages.popleft()

    def _deliver(self) -> None:
        finished, failures = self._engine.take_results()
        for engine_id, output in finished:
            stream = self._streams.pop(engine_id, None)
            if stream is not None:
                stream.finish(output)
        for failure in failures:
            if isinstance(failure.__cause__, GrammarError):
                # Of that request alone, and no fault of the engine.
                _logger.warning("%s", failure)
            else:
                _logger.error("a step failed, and %d requests with it", len(failure.request_ids), exc_info=failure)
            for engine_id in failure.request_ids:
                stream = self._streams.pop(engine_id, None)
                if stream is not None:
                    stream.fail(_copy(failure))
        if failures:
            try:
                self._engine.require_open()
            except RuntimeError as closed:
                raise closed from failures[-1]

    def _end(self, call: Call, error: BaseException | None) -> None:
        """Fail what is left, and let go of the engine."""
        with self._lock:
            self.error = error
            self._is_closing = True
        left = [stream for stream, is_abort in self._messages if not is_abort] + list(self._streams.values())
        for stream in left:
            stream.fail(_closed_error(error))
        self._streams.clear()
        try:
            self._engine.drop({stream.engine_id for stream in left})
        finally:
            self._engine.end(call)


def _closed_error(cause: BaseException | None) -> RuntimeError:
    """Return the error of calls to an engine that was closed, perhaps by an error."""
    if cause is None:
        return RuntimeError("the engine is closed")
    error = RuntimeError(f"the engine is closed: {cause.__cause__ or cause}")
    error.__cause__ = cause
    return error


def _copy(failure: StepError) -> StepError:
    # Each reader raises its own: a traceback grows wherever an exception is raised.
    return StepError(str(failure), failure.request_ids, failure.__cause__)
