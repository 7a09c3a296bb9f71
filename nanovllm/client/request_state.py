"""Client-side state of one request: detokenised text and streamed deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanovllm.engine.request import Request
from nanovllm.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput, StepError
from nanovllm.text.output_processor import NewTokens, OutputProcessor, OutputState


class RequestState:
    """A request in an engine, whose token ids become outputs, at the end or streamed.

    An engine in another process continues for a few tokens after a stop string; they are left out.

    Args:
        request: from `InputProcessor`.
        processor: makes texts.
        index, source: the prompt's index in its call, and its source.

    Attributes:
        request_id: in the engine; -1 until it is queued.
        outputs: the state of each output if the engine streams its tokens.
        output: the engine's, once the request has finished.
        error: why it has failed.
        awaits_step: whether `step` returns its output.
    """

    __slots__ = (
        "__weakref__", "_cumulative", "_processor", "awaits_step", "error", "index", "output", "outputs", "request",
        "request_id", "source",
    )  # fmt: skip

    def __init__(self, request: Request, processor: OutputProcessor, index: int = 0, source: Any = None) -> None:
        self.request_id = -1
        self.request = request
        self.index, self.source = index, source
        self.output: RequestOutput | None = None
        self.error: RuntimeError | None = None
        self.awaits_step = False
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

    def result(self) -> RequestOutput:
        """Return the whole output of a request that is done and not streamed, with its texts; called once.

        Raises:
            StepError: its step has failed, or its text cannot be decoded.
            RuntimeError: it was aborted, or the engine is closed.
        """
        output = self._require_output()
        try:
            self.finish(output)
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
        """Return the new part of a streamed request's outputs, at last all that is left; None without news.

        Raises:
            RuntimeError: see `result`.
        """
        return self.take(self._require_output() if self.is_done else None)

    def _require_output(self) -> RequestOutput:
        if isinstance(self.error, StepError):
            # Each reader raises its own: a traceback grows wherever an exception is raised.
            raise StepError(str(self.error), self.error.request_ids, self.error.__cause__)
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output

    def take(self, final: RequestOutput | None = None) -> RequestOutput | None:
        """Return the new part of a streamed request's outputs; None without news.

        final: the engine's output, once the request has finished.
        """
        outputs = []
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

    def finish(self, output: RequestOutput) -> None:
        """Add texts to the engine's output of the finished request."""
        params = self.request.params
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

    def _complete(self, output: RequestOutput) -> None:
        output.prompt = self.request.prompt
        if self.request.params.detokenize and isinstance(output.prompt_logprobs, Logprobs):
            output.prompt_logprobs = output.prompt_logprobs.with_texts(self._processor.decode_token)

    def _completion(self, index: int, new: NewTokens) -> CompletionOutput:
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
