"""A front end's side of an engine: turns token ids into text, and reports stop strings to the engine.

The front end makes the text, for any kind of engine. Each step's results are processed before the next one begins, so
that in one process an output ends at the very token that completes its stop string, as if the engine knew about text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from nanovllm.client.request_state import RequestState
from nanovllm.engine.engine import Engine
from nanovllm.engine.engine_outputs import EngineOutputs, TokenFields
from nanovllm.outputs import StepError, StepResult
from nanovllm.text.output_processor import OutputProcessor
from nanovllm.utils.interrupt import deferred_signals

News = dict[int, RequestState]
"""Requests by id that are done or, if they stream, have new tokens; in order of arrival."""


class EngineClient:
    """Drives an engine for callers that each have their own requests; it is the engine's only driver.

    Args:
        engine: in this process or in another.
        processor: makes texts.
    """

    def __init__(self, engine: Engine, processor: OutputProcessor) -> None:
        self.engine = engine
        self.processor = processor
        # Unfinished requests.
        self._states: dict[int, RequestState] = {}
        # A request must be known here before its first token comes, in any thread. A signal handler may queue one.
        self._lock = threading.RLock()
        # Results for `step`: outputs and failures of requests that await it, and failures of steps without requests.
        self._unclaimed = EngineOutputs()

    def add(self, state: RequestState) -> None:
        """Queue a request, from any thread."""
        with self._lock:
            state.request_id = self.engine.enqueue(state.request)
            self._states[state.request_id] = state

    def add_all(self, states: Sequence[RequestState]) -> None:
        """Queue requests that come together, from any thread."""
        with self._lock:
            for state, request_id in zip(states, self.engine.enqueue_all([s.request for s in states]), strict=True):
                state.request_id = request_id
                self._states[request_id] = state

    def add_pending(self, states: Sequence[RequestState], pending: News) -> None:
        """Queue requests and add them to `pending`, with no signal in between."""
        with deferred_signals():
            self.add_all(states)
            pending.update({state.request_id: state for state in states})

    def steps(self, has_work: Callable[[], bool]) -> Iterator[News]:
        """Drive the engine: run steps while there is work, and yield the news of each.

        Raises:
            EngineRunningError: another call drives the engine.
            RuntimeError: the engine is closed.
        """
        for _ in self.engine.steps(has_work):
            yield self.take_news()

    def run(self, fill: Callable[[News], None]) -> Generator[News, None, None]:
        """Drive the engine until all requests are done, and yield each step's news; drops the rest when closed.

        fill: called before each step with the pending requests, by id; queues more, and adds them.

        Raises:
            StepError: a step without requests failed.
            RuntimeError: another caller has aborted requests; or see `steps`.
        """
        pending: News = {}

        def has_work() -> bool:
            fill(pending)
            return bool(pending)

        try:
            for news in self.steps(has_work):
                own = {i: state for i, state in news.items() if i in pending} if news else news
                self._check_progress(own)
                for request_id, state in own.items():
                    if state.is_done:
                        del pending[request_id]
                if own:
                    yield own
        finally:
            if pending:
                self.drop(pending)

    def run_all(self, states: Sequence[RequestState]) -> Generator[News, None, None]:
        """Like `run`, for requests that arrive together."""
        left = list(states)

        def fill(pending: News) -> None:
            if left:
                self.add_pending(left, pending)
                left.clear()

        return self.run(fill)

    def step(self) -> StepResult:
        """Run a step, and return finished requests that await it; see `LLMEngine.step`."""
        with self.engine.driving():
            tokens = None
            try:
                self.engine.require_open()
            except RuntimeError:
                # Requests may have finished before the device was lost.
                self.take_news()
                if not self._unclaimed:
                    raise
            else:
                tokens = self.engine.run_step(wants_tokens=True)
                self.take_news()
            return self._unclaimed.take_step(tokens)

    def take_news(self) -> News:
        """Give requests the results of steps, and end outputs at their stop strings."""
        news: News = {}
        while self.engine.has_results:
            with deferred_signals():
                results = self.engine.take_results()
                with self._lock:
                    stopped = self._take_tokens(results.new_tokens, news)
                    for request_id, output in results.finished:
                        if (state := self._states.pop(request_id, None)) is not None:
                            state.output = output
                            self._end(state, news)
                    for failure in results.failures:
                        self._take_failure(failure, news)
                    for request_id in results.dropped:
                        self._states.pop(request_id, None)
                if stopped:
                    # Requests finished by this are processed next.
                    self.engine.stop(stopped)
        return news

    def take_failures(self) -> list[StepError]:
        """Return the failures of steps without requests, each once."""
        failures, self._unclaimed.failures = self._unclaimed.failures, []
        return failures

    def abort(self, request_ids: Iterable[int]) -> None:
        """Drop requests, from any thread; see `Engine.abort`.

        Their state is removed at once, or with the next step of another thread that drives the engine.
        """
        self.engine.abort(request_ids)
        if not self.engine.is_driven:
            self.take_news()

    def drop(self, request_ids: Iterable[int]) -> None:
        """Abort requests of a call that ends, and forget their state."""
        with deferred_signals():
            dropped = set(request_ids)
            for request_id in dropped:
                self._states.pop(request_id, None)
            # Failures without requests belong to no other caller.
            self._unclaimed.failures = [failure for failure in self._unclaimed.failures if failure.request_ids]
            self.engine.abort(dropped)
            self.engine.stop([])
            self.take_news()

    def is_finished(self) -> bool:
        """Whether no request is left, no step is under way, and every result has been returned."""
        return self.engine.is_finished() and not self._unclaimed

    def _check_progress(self, news: News) -> None:
        """Raise the error that keeps a call's requests from ever being done."""
        for failure in self._unclaimed.failures:
            if not failure.request_ids:
                raise failure
        if not news and self.engine.is_finished():
            raise RuntimeError("requests of this generate were aborted by another caller")

    def _take_tokens(self, tokens: list[TokenFields], news: News) -> list[tuple[int, int]]:
        """Give requests their new tokens, and return the outputs that have reached a stop string.

        A request whose text cannot be decoded fails alone.
        """
        stopped = []
        for request_id, index, token_id, is_end, logprobs in tokens:
            if (state := self._states.get(request_id)) is None:
                continue
            news[request_id] = state
            try:
                if state.outputs[index].append(token_id, is_end, logprobs):
                    stopped.append((request_id, index))
            # A panic of the tokenizers library derives from BaseException.
            except BaseException as error:
                self.engine.abort([request_id])
                self._take_failure(state.text_error(error), news)
        return stopped

    def _take_failure(self, failure: StepError, news: News) -> None:
        awaiting = []
        for request_id in failure.request_ids:
            if (state := self._states.pop(request_id, None)) is not None:
                state.error = failure
                news[request_id] = state
                awaiting += [request_id] if state.awaits_step else []
        if awaiting:
            self._unclaimed.fail(StepError(str(failure), awaiting, failure.__cause__))
        elif not failure.request_ids:
            self._unclaimed.fail(failure)

    def _end(self, state: RequestState, news: News) -> None:
        """Report a finished request, to `step` if that is awaited."""
        news[state.request_id] = state
        if state.awaits_step:
            try:
                self._unclaimed.finished.append((state.request_id, state.result()))
            except StepError as error:
                state.error = error
                self._unclaimed.fail(error)
