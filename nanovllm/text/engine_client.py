"""A front end's side of an engine: token ids become text here, and stop strings go back into the engine.

Text is made where the front end is, for any engine alike. What a step brings is looked at before the next one begins,
so that in one process an output ends at the very token that completes its stop string, as if the engine knew of text.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager

from nanovllm.engine.call_guard import Call, drive
from nanovllm.engine.engine_outputs import EngineOutputs, NewTokens, TokenFields
from nanovllm.engine.protocol import Engine
from nanovllm.engine.request import Request
from nanovllm.outputs import RequestOutput, StepError, StepResult
from nanovllm.text.output_processor import OutputProcessor
from nanovllm.text.request_state import RequestState
from nanovllm.utils.interrupt import deferred_signals


class EngineClient:
    """Drives an engine for callers who each have requests of their own; it is the engine's only driver.

    Args:
        engine: in this process or in another.
        processor: makes texts.

    Attributes:
        updated: the requests that the last step has brought new tokens, by id, of those that report them.
    """

    def __init__(self, engine: Engine, processor: OutputProcessor) -> None:
        self.engine = engine
        self.processor = processor
        self.updated: dict[int, RequestState] = {}
        # Until somebody has their results.
        self._states: dict[int, RequestState] = {}
        # A request must be known here before its first token comes, in whatever thread. A signal handler may queue one.
        self._lock = threading.RLock()
        self._results = EngineOutputs()

    @contextmanager
    def driving(self, wants_tokens: bool = False) -> Iterator[None]:
        """Drive the engine inside the `with` block, alone; see `Call`.

        Raises:
            RuntimeError: the engine is driven by another thread, or by a caller of this one.
        """
        call = Call(wants_tokens=wants_tokens)
        try:
            drive(self.engine, call)
            yield
        finally:
            self.engine.end(call)

    def enqueue(self, request: Request) -> RequestState:
        """Queue a request, from any thread."""
        with self._lock:
            state = RequestState(self.engine.enqueue(request), request, self.processor)
            self._states[state.request_id] = state
        return state

    def enqueue_all(self, requests: Sequence[Request]) -> list[RequestState]:
        """Queue requests that come together, from any thread."""
        with self._lock:
            ids = self.engine.enqueue_all(requests)
            states = [RequestState(i, request, self.processor) for i, request in zip(ids, requests, strict=True)]
            self._states.update({state.request_id: state for state in states})
        return states

    def run_step(self) -> NewTokens:
        """Do a step for the call that drives the engine, and take in what it brings."""
        self.updated.clear()
        tokens = self.engine.run_step()
        self._take_in()
        return tokens

    def step(self) -> StepResult:
        """Do a step, and return what has finished; see `LLMEngine.step`."""
        with self.driving(wants_tokens=True):
            tokens = None
            try:
                self.engine.require_open()
            except RuntimeError:
                # The device may have been lost after what nobody has had was finished.
                self._take_in()
                if not self._results:
                    raise
            else:
                tokens = self.run_step()
            self._make_texts(self._states.keys())
            return self._results.take_step(tokens)

    def claim(self, request_ids: Set[int]) -> dict[int, RequestOutput]:
        """Return, once, those of these requests that have finished.

        Raises:
            RuntimeError: none of them is left, since somebody else has aborted them; a `StepError` if one has failed.
        """
        self._make_texts(request_ids)
        done = self._results.claim(request_ids)
        if not done and self.engine.is_finished():
            raise RuntimeError("requests of this generate were aborted by somebody else")
        return done

    def claim_new(self, request_ids: Set[int]) -> dict[int, RequestOutput]:
        """Return, once, what the last step has brought of these streamed requests; raises as `claim` does."""
        done = self.claim(request_ids)
        # Those with news; thousands of others may wait.
        states = self.updated | {request_id: self._states[request_id] for request_id in done}
        news = {i: states[i].take(done.get(i)) for i in sorted(states.keys() & request_ids)}
        self._forget(done)
        return {request_id: output for request_id, output in news.items() if output is not None}

    def take_all(self) -> tuple[list[tuple[int, RequestOutput]], list[StepError]]:
        """Return, once, all finished requests by id, without text, and all failures."""
        results, self._results = self._results, EngineOutputs()
        for request_id, _ in results.finished:
            self._states.pop(request_id, None)
        return results.finished, results.failures

    def abort(self, request_ids: Iterable[int]) -> None:
        """Drop requests, from any thread; see `LLMEngine.abort`.

        What is kept for them goes at once, or with the next step of another thread that drives the engine.
        """
        self.engine.abort(request_ids)
        call = Call(brief=True)
        try:
            if self.engine.begin(call):
                self._take_in()
        finally:
            self.engine.end(call)

    def drop(self, request_ids: set[int]) -> None:
        """Abort requests of the call that drives the engine, and forget what is kept for their caller."""
        with deferred_signals():
            try:
                self.engine.drop(request_ids)
            finally:
                self._results.drop(request_ids)
                self._forget(request_ids)

    def is_finished(self) -> bool:
        """Whether no request is left, no step is under way, and every result has been returned."""
        return self.engine.is_finished() and not self._results

    def _take_in(self) -> None:
        """Give requests their new tokens, end outputs at their stop strings, and keep what has finished."""
        while self.engine.has_results:
            with deferred_signals():
                results = self.engine.take_results()
                self._results.finished += results.finished
                for failure in results.failures:
                    self._results.fail(failure)
                    self._forget(failure.request_ids)
                self._forget(results.dropped)
                if results.new_tokens:
                    self._take_tokens(results.new_tokens)

    def _take_tokens(self, tokens: list[TokenFields]) -> None:
        """Give requests their new tokens; a request whose text cannot be decoded fails alone."""
        stopped = []
        with self._lock:
            for request_id, index, token_id, is_end, logprobs in tokens:
                if (state := self._states.get(request_id)) is None:
                    continue
                self.updated[request_id] = state
                try:
                    if state.outputs[index].append(token_id, is_end, logprobs):
                        stopped.append((request_id, index))
                # A panic of the tokenizers library derives from BaseException.
                except BaseException as error:
                    self.engine.drop({request_id})
                    self._fail(request_id, error)
        if stopped:
            # What has finished by it is taken in next.
            self.engine.stop(stopped)

    def _make_texts(self, request_ids: Set[int]) -> None:
        """Make the texts of those of these requests that have finished, unless they are streamed."""
        if not self._results.finished:
            return
        with deferred_signals():
            finished, self._results.finished = self._results.finished, []
            for request_id, output in finished:
                state = self._states.get(request_id) if request_id in request_ids else None
                if state is not None and not state.request.is_streamed:
                    del self._states[request_id]
                    try:
                        state.finish(output)
                    # A panic of the tokenizers library derives from BaseException.
                    except BaseException as error:
                        self._fail(request_id, error)
                        continue
                self._results.finished.append((request_id, output))

    def _fail(self, request_id: int, error: BaseException) -> None:
        self._forget([request_id])
        message = f"the text of request {request_id} cannot be decoded: {error}"
        self._results.fail(StepError(message, [request_id], error))

    def _forget(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self._states.pop(request_id, None)
