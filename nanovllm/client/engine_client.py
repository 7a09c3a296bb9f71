"""A front end's side of an engine: turns the token ids of requests into text, and reports stop strings to the engine.

The front end makes the text, for any kind of engine. Each step's results are processed before the next one begins, so
that in one process an output ends at the very token that completes its stop string, as if the engine knew about text.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

from nanovllm.engine.engine import Engine, EngineOutputs
from nanovllm.engine.request import Request, StreamedToken
from nanovllm.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput, StepError, StepResult
from nanovllm.text.output_processor import OutputDelta, OutputProcessor, OutputState
from nanovllm.utils.interrupt import deferred_signals


class RequestState:
    """A request in an engine, whose token ids become outputs, at the end or streamed.

    An engine in another process continues for a few tokens after a stop string; they are left out.

    Attributes:
        request_id: in the engine; -1 until it is queued.
        source: what the caller made it from.
        outputs: the state of each output if the engine streams its tokens.
        output, error: the engine's output, or its error, once the request is done.
        awaits_step: whether `step` returns its output.
        wake_reader: tells the reading task, if any, of news.
    """

    __slots__ = (
        "__weakref__", "_cumulative", "_processor", "awaits_step", "error", "output", "outputs", "request",
        "request_id", "source", "wake_reader",
    )  # fmt: skip

    def __init__(self, request: Request, processor: OutputProcessor, source: Any = None) -> None:
        self.request_id = -1
        self.request = request
        self.source = source
        self.output: RequestOutput | None = None
        self.error: RuntimeError | None = None
        self.awaits_step = False
        self.wake_reader: weakref.WeakMethod[Callable[[], None]] | None = None
        self._processor = processor
        # Optional state is not made for all requests: each list is work for the garbage collector.
        self.outputs: Sequence[OutputState] = ()
        self._cumulative: list[float] | None = None
        if request.reports_tokens:
            prompt, params = request.token_ids, request.params
            self.outputs = [OutputState(processor.tokenizer, params, prompt) for _ in range(params.n)]
            self._cumulative = [0.0] * request.params.n

    @property
    def is_done(self) -> bool:
        """Whether the engine is done with it."""
        return self.output is not None or self.error is not None

    @property
    def num_tokens(self) -> int:
        """The tokens of the longest output of a done request."""
        if self.outputs:
            return max(output.num_tokens for output in self.outputs)
        return max(len(output.token_ids) for output in self._require_output().outputs)

    def notify(self) -> None:
        """Tell the reading task of news; from any thread."""
        if self.wake_reader is not None and (wake := self.wake_reader()) is not None:
            wake()

    def result(self) -> RequestOutput:
        """Return the whole output of a done request that is not streamed; StepError or RuntimeError if it failed."""
        output, params = self._require_output(), self.request.params
        try:
            for i, item in enumerate(output.outputs):
                if self.outputs:
                    item.text = self.outputs[i].take(final=True).text
                    _end(self.outputs[i], item)
                else:
                    ends = item.finish_reason == "stop"
                    item.text = self._processor.decode(self.request.token_ids, item.token_ids, params, ends)
                if params.detokenize and isinstance(item.logprobs, Logprobs):
                    item.logprobs = item.logprobs.with_texts(self._processor.decode_token)
            self._complete(output)
        except (KeyboardInterrupt, SystemExit):
            raise
        # A panic of the tokenizers library derives from BaseException.
        except BaseException as error:
            raise self.text_error(error) from error
        return output

    def text_error(self, cause: BaseException) -> StepError:
        """Return the error of a request whose text cannot be decoded."""
        return StepError(f"the text of request {self.request_id} cannot be decoded: {cause}", [self.request_id], cause)

    def news(self) -> RequestOutput | None:
        """Return the new part of a streamed request's outputs, at last all that is left, or None; see `result`."""
        final, outputs = self._require_output() if self.is_done else None, []
        for i, state in enumerate(self.outputs):
            new = state.take(final is not None)
            if final is not None or new.text or new.token_ids:
                outputs.append(self._completion(i, new))
        if final is None:
            # The field accepts an array as well.
            tokens: Any = self.request.token_ids
            return RequestOutput(self.request_id, self.request.prompt, tokens, outputs, False) if outputs else None
        for state, output, whole in zip(self.outputs, outputs, final.outputs, strict=True):
            _end(state, whole)
            output.finish_reason, output.stop_reason = whole.finish_reason, whole.stop_reason
        final.outputs = outputs
        self._complete(final)
        return final

    def _require_output(self) -> RequestOutput:
        if isinstance(self.error, StepError):
            # Each reader raises its own: a traceback grows wherever an exception is raised.
            raise StepError(str(self.error), self.error.request_ids, self.error.__cause__)
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output

    def _complete(self, output: RequestOutput) -> None:
        output.prompt = self.request.prompt
        if self.request.params.detokenize and isinstance(output.prompt_logprobs, Logprobs):
            output.prompt_logprobs = output.prompt_logprobs.with_texts(self._processor.decode_token)

    def _completion(self, index: int, new: OutputDelta) -> CompletionOutput:
        output, params = CompletionOutput(index, new.text, new.token_ids), self.request.params
        if params.logprobs is not None:
            decode_token = self._processor.decode_token if params.detokenize else None
            logprobs = Logprobs[dict[int, Logprob]](new.logprobs, 1 + params.logprobs, decode_token)
            output.logprobs = logprobs
            assert self._cumulative is not None
            self._cumulative[index] += logprobs.sum()
            output.cumulative_logprob = self._cumulative[index]
        return output


def _end(state: OutputState, output: CompletionOutput) -> None:
    """Cut the engine's output where its text ended, if that was at a stop string."""
    stop, num_tokens = state.stop_string, state.num_tokens
    if stop is None:
        return
    is_cut = num_tokens < len(output.token_ids)
    # A stop token may have completed the text as well.
    if is_cut or output.stop_reason is None:
        output.finish_reason, output.stop_reason = "stop", stop
    if is_cut:
        del output.token_ids[num_tokens:]
        if isinstance(output.logprobs, Logprobs):
            output.logprobs = logprobs = output.logprobs.first(num_tokens)
            output.cumulative_logprob = logprobs.sum()


News = dict[int, RequestState]
"""Requests by id that are done or, if they stream, have new tokens; in order of arrival."""


class EngineClient:
    """Drives an engine for callers that each have their own requests; it is the engine's only driver."""

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
        with deferred_signals(), self._lock:
            state.request_id = self.engine.enqueue(state.request)
            self._states[state.request_id] = state

    def add_pending(self, states: Sequence[RequestState], pending: News) -> None:
        """Queue requests that come together, from any thread, and add them to `pending`, with no signal in between."""
        with deferred_signals():
            with self._lock:
                request_ids = self.engine.enqueue_all([state.request for state in states])
                for state, request_id in zip(states, request_ids, strict=True):
                    state.request_id = request_id
                    self._states[request_id] = state
            pending.update(zip(request_ids, states, strict=True))

    def steps(self, has_work: Callable[[], bool]) -> Iterator[News]:
        """Drive the engine: run steps while there is work, and yield the news of each; see `Engine.steps`."""
        for _ in self.engine.steps(has_work):
            yield self.take_news()

    def run(self, fill: Callable[[News], None]) -> Generator[News, None, None]:
        """Drive the engine until all requests are done, and yield each step's news; drops the rest when closed.

        `fill` gets the pending requests before each step, and adds more.

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

    def stream(self, states: Sequence[RequestState]) -> Generator[RequestOutput, None, None]:
        """Queue streamed requests, and yield new output after each step; aborts the rest when closed."""
        left = list(states)

        def fill(pending: News) -> None:
            if left:
                self.add_pending(left, pending)
                left.clear()

        with closing(self.run(fill)) as steps:
            for news in steps:
                for request_id in sorted(news):
                    if (output := news[request_id].news()) is not None:
                        yield output

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
                tokens = self.engine.run_step()
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
                            state.output, news[request_id] = output, state
                            self._return_awaited(state)
                    for failure in results.failures:
                        self._take_failure(failure, news)
                    for request_id in results.dropped:
                        self._states.pop(request_id, None)
                if stopped:
                    # Requests finished by this are processed next.
                    self.engine.stop(stopped)
        return news

    def unfinished(self) -> list[RequestState]:
        """Return the requests that the engine has."""
        return list(self._states.values())

    def take_failures(self) -> list[StepError]:
        """Return the failures of steps without requests, each once."""
        failures, self._unclaimed.failures = self._unclaimed.failures, []
        return failures

    def abort(self, request_ids: Iterable[int]) -> None:
        """Drop requests, from any thread, at once or with the next step of a thread that drives; see `Engine.abort`."""
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

    def _take_tokens(self, tokens: list[StreamedToken], news: News) -> list[tuple[int, int]]:
        """Give requests their tokens, and return outputs at a stop string; undecodable text fails its request alone."""
        stopped = []
        for request_id, index, position, token_id, is_end, logprobs in tokens:
            if (state := self._states.get(request_id)) is None:
                continue
            news[request_id] = state
            try:
                if state.outputs[index].append(position, token_id, is_end, logprobs):
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

    def _return_awaited(self, state: RequestState) -> None:
        if state.awaits_step:
            try:
                self._unclaimed.finished.append((state.request_id, state.result()))
            except StepError as error:
                state.error = error
                self._unclaimed.fail(error)
