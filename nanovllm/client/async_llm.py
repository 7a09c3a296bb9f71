"""The asyncio front end: requests of many tasks share the engine's steps; under its own names, and under vLLM's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial, wraps
from itertools import count
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from nanovllm.client.engine_client import RequestState
from nanovllm.client.engine_thread import EngineThread, Mailbox, RequestStream
from nanovllm.client.loading import load_model
from nanovllm.client.model_client import EngineSettings, ModelClient, Weights, warn_of_nans
from nanovllm.config import Config, Pooling
from nanovllm.engine.engine import Unpicklable
from nanovllm.engine.request import Request
from nanovllm.outputs import CompletionOutput, Logprobs, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.tasks.ranking import Judge, RankBy, RankedDocument, cosines, embeddings, rank_method, ranked, text_pairs
from nanovllm.text.chat_template import ChatTemplateOptions, Message, one_conversation, template_options
from nanovllm.text.grammar_trials import SlowGrammarError, patiently
from nanovllm.text.input_processor import (
    Prompt,
    TokenIds,
    TokensPrompt,
    Work,
    pooling_params,
    work_of,
    work_of_size,
)

if TYPE_CHECKING:
    # From typing since Python 3.11.
    from typing_extensions import Unpack

_NUM_INPUT_THREADS: dict[Work, int] = {"short": 1, "long": 2, "grammar": 8, "slow grammar": 2}
"""A grammar may take two seconds to be rejected, and others should not wait for it."""
Self = TypeVar("Self", bound="AsyncLLM")
Params = ParamSpec("Params")
Result = TypeVar("Result")


class QueueFullError(RuntimeError):
    """The limit on pending requests is reached."""


def _between_steps(
    method: Callable[Concatenate[ModelClient, Params], Result],
) -> Callable[Concatenate[AsyncLLM, Params], Coroutine[Any, Any, Result]]:
    """Return a method that calls the `LLM`'s of the same name in a thread, where it waits for the gap of two steps."""

    @wraps(method)
    async def call(llm: AsyncLLM, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        llm.require_running()
        return await asyncio.get_running_loop().run_in_executor(None, partial(method, llm.llm, *args, **kwargs))

    return call


class AsyncLLM(Unpicklable):
    """A language model for asyncio programs, whose steps run in a thread of their own.

    Requests join the next step. Cancelling a task, or closing a stream, aborts its request.

    Args:
        model: see `LLM`; loading it blocks.
        max_pending_requests: most requests that wait or run at once.
        kwargs: settings; see `LLM`.

    Raises:
        ValueError: see `LLM`.

    Example:
        >>> async def main() -> None:
        ...     async with AsyncLLM(BUNDLED_MODEL) as llm:
        ...         outputs = await asyncio.gather(*(llm.generate(prompt) for prompt in ["My name is", "count to 5"]))
        ...         print((await llm.chat([{"role": "user", "content": "2 + 3"}])).outputs[0].text)
        ...         async for output in llm.stream_chat([{"role": "user", "content": "count to 5"}]):
        ...             print(output.outputs[0].text, end="")
        >>> asyncio.run(main())
        5
        1, 2, 3, 4, 5
    """

    def __init__(
        self, model: str | os.PathLike[str], *, max_pending_requests: int = 4096, **kwargs: Unpack[EngineSettings]
    ) -> None:
        config = Config(os.fspath(model), **kwargs)
        self._set_up(ModelClient(config, load_model(config)), max_pending_requests)

    @classmethod
    def over(cls: type[Self], llm: ModelClient, *, max_pending_requests: int = 4096) -> Self:
        """Build an `AsyncLLM` on a loaded model, such as an `LLM`, that has no other user."""
        async_llm = cls.__new__(cls)
        async_llm._set_up(llm, max_pending_requests)
        return async_llm

    def _set_up(self, llm: ModelClient, max_pending_requests: int) -> None:
        self.llm = llm
        self.max_pending_requests = max_pending_requests
        # Called with each request before it is queued, and with its state when its reader leaves, done or not.
        self.on_begin: Callable[[Request], object] = lambda request: None
        self.on_end: Callable[[RequestState], object] = lambda state: None
        self._thread = EngineThread(self.llm.engine_client)
        # Grammars and long texts can take seconds, and must not delay other requests.
        self._executors = {
            work: ThreadPoolExecutor(count, f"nanovllm-{work}") for work, count in _NUM_INPUT_THREADS.items()
        }
        self._request_ids = count()
        # While the prompt is being encoded, whether the request was aborted.
        self._pending: dict[int | str, RequestState | bool] = {}
        self._mailbox: Mailbox | None = None

    async def generate(
        self,
        prompt: Prompt | TokenIds,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: int | str | None = None,
    ) -> RequestOutput:
        """Complete a prompt.

        Args:
            prompt: a text, token ids, or a dict of either.
            sampling_params: the defaults if None.
            priority: lower ones run first.
            request_id: a name for `abort`, unique among pending requests; a number if None.

        Raises:
            ValueError: the prompt or a parameter is out of bounds, or another request has the id.
            QueueFullError: too many requests are pending.
            StepError: the request's step failed; it is a RuntimeError.
            RuntimeError: the engine is closed.
        """
        (stream,) = await self._submit([prompt], sampling_params, priority, request_id)
        return await stream.whole()

    async def generate_all(
        self, prompts: list[Any], sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> list[RequestOutput]:
        """Complete prompts that share their parameters, all or none; see `generate`."""
        return await self.gather(await self._submit(prompts, sampling_params, priority))

    async def embed(self, prompts: list[Any], pooling: Pooling | None = None, *, priority: int = 0) -> torch.Tensor:
        """Return normalised hidden states of prompts, all or none; see `LLM.embed` and `generate`."""
        outputs = await self.pool(prompts, pooling, priority=priority)
        return embeddings(outputs, self.llm.model_config.hidden_size)

    async def pool(
        self, prompts: list[Any], pooling: Pooling | None = None, *, priority: int = 0
    ) -> list[RequestOutput]:
        """Return the outputs from which `embed` makes embeddings."""
        pooling = self.llm.default_pooling if pooling is None else pooling
        return await self.gather(await self._submit(prompts, pooling_params(pooling), priority, pooling=pooling))

    async def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        by: RankBy | None = None,
        instruction: str | None = None,
        pooling: Pooling | None = None,
        priority: int = 0,
    ) -> list[RankedDocument]:
        """Return documents by their relevance to a query, the most relevant first; see `LLM.rank`."""
        scores, _ = await self.relevance([query], list(documents), by, instruction, pooling, priority=priority)
        return ranked(scores, documents, top_n)

    async def relevance(
        self,
        queries: list[str],
        documents: list[str],
        by: RankBy | None = None,
        instruction: str | None = None,
        pooling: Pooling | None = None,
        *,
        priority: int = 0,
    ) -> tuple[list[float], list[RequestOutput]]:
        """Return the relevance of each document to its query, or to the single query, and the outputs behind it."""
        pairs = text_pairs(queries, documents)
        if rank_method(by, self.llm.config.model) == "embedding":
            outputs = await self.pool([*queries, *documents], pooling, priority=priority)
            return cosines(embeddings(outputs, self.llm.model_config.hidden_size), len(queries)), outputs
        judge = Judge(self.llm.input_processor)
        outputs = await self.generate_all(judge.prompts(pairs, instruction), judge.params, priority=priority)
        return judge.scores(outputs), outputs

    async def gather(self, streams: list[RequestStream]) -> list[RequestOutput]:
        """Return the whole outputs of queued requests; all are aborted if one fails, or on cancellation."""
        try:
            return list(await asyncio.gather(*(stream.whole() for stream in streams)))
        finally:
            for stream in streams:
                self._leave(stream)

    async def stream(
        self,
        prompt: Prompt | TokenIds,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: int | str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt and yield new output; a slow reader gets the tokens of several steps at once.

        Closing the generator aborts the request.
        """
        outputs = await self.begin_stream(prompt, sampling_params, priority=priority, request_id=request_id)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def begin_stream(
        self,
        prompt: Prompt | TokenIds,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: int | str | None = None,
    ) -> RequestStream:
        """Queue a request and return the outputs that `stream` yields, to be read to their end, or closed."""
        (stream,) = await self._submit([prompt], sampling_params, priority, request_id, streams=True)
        return stream

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: int | str | None = None,
        **template: Unpack[ChatTemplateOptions],
    ) -> RequestOutput:
        """Answer a conversation; see `generate` and, for `template`, `LLM.chat`."""
        prompt, answer = await self._render(messages, template), self.llm.answer_options(template)
        params = sampling_params if answer is None else answer.kept_tags(sampling_params)
        output = await self.generate(prompt, params, priority=priority, request_id=request_id)
        if answer is not None:
            answer.complete(output, sampling_params)
        return output

    async def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: int | str | None = None,
        **template: Unpack[ChatTemplateOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation and yield new parts of the answer; see `chat` and `stream`."""
        prompt, answer = await self._render(messages, template), self.llm.answer_options(template)
        params = sampling_params if answer is None else answer.kept_tags(sampling_params)
        async with aclosing(self.stream(prompt, params, priority=priority, request_id=request_id)) as outputs:
            async for output in outputs:
                yield output

    async def render_chat(self, messages: Sequence[Message], **template: Unpack[ChatTemplateOptions]) -> list[int]:
        """Return a conversation's prompt as token ids; ValueError if it does not fit the template. See `LLM.chat`."""
        return list((await self._render(messages, template))["prompt_token_ids"])

    async def _render(self, messages: Sequence[Message], template: ChatTemplateOptions) -> TokensPrompt:
        conversation = one_conversation(messages)
        rendered = partial(self.llm.input_processor.render_chat, conversation, template_options(template))
        return await self.run_beside(rendered, work_of_size(len(str((conversation, template)))))

    async def load_weights(self, weights: Weights, *, strict: bool = False) -> int:
        """Write weights into the running model; see `LLM.load_weights`."""
        loaded = await self.load_and_report(weights, strict=strict)
        warn_of_nans(loaded.nan_names)
        return loaded.count

    load_and_report = _between_steps(ModelClient.load_and_report)
    unload_adapter = _between_steps(ModelClient.unload_adapter)
    reset_prefix_cache = _between_steps(ModelClient.reset_prefix_cache)
    pause = _between_steps(ModelClient.pause)
    resume = _between_steps(ModelClient.resume)
    sleep = _between_steps(ModelClient.sleep)
    wake_up = _between_steps(ModelClient.wake_up)

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are asleep."""
        return self.llm.is_sleeping

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self.llm.is_paused

    async def abort(self, request_id: int | str) -> None:
        """End a pending request with its output so far, `finish_reason` "abort"; other ids are ignored."""
        if request_id in self._pending:
            self._abort(request_id)

    def abort_all(self) -> None:
        """End all pending requests with their output so far."""
        for request_id in list(self._pending):
            self._abort(request_id)

    def _abort(self, request_id: int | str) -> None:
        state = self._pending[request_id]
        if isinstance(state, RequestState):
            self._thread.abort(state)
        else:
            self._pending[request_id] = True

    async def run_beside(self, function: Callable[[], Result], work: Work) -> Result:
        """Call a function in a thread for its kind of input work; a RuntimeError if the engine is closed."""
        self.require_running()
        return await asyncio.get_running_loop().run_in_executor(self._executors[work], function)

    def require_running(self) -> None:
        """Raise a RuntimeError with the reason if no requests are accepted."""
        self._thread.require_running()

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_running

    @property
    def errored(self) -> bool:
        """Whether an error has closed the engine."""
        return self._thread.error is not None

    @property
    def num_pending_requests(self) -> int:
        """Number of requests that wait or run."""
        return len(self._pending)

    async def shutdown(self) -> None:
        """Close the engine and free the device; pending requests fail. A second call does nothing."""
        await asyncio.get_running_loop().run_in_executor(None, self.exit)

    def exit(self) -> None:
        """Close the engine from outside an event loop; see `shutdown`."""
        self._thread.close()
        for executor in self._executors.values():
            executor.shutdown(wait=False)
        self.llm.exit()

    def __del__(self) -> None:
        # A constructor that raised leaves nothing behind. The thread would keep the engine, and so the device.
        if "_executors" in vars(self):
            self.exit()

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()

    async def _submit(
        self, prompts: list[Any], params: SamplingParams | None, priority: int, request_id: int | str | None = None,
        *, streams: bool = False, pooling: Pooling | None = None,
    ) -> list[RequestStream]:  # fmt: skip
        params = SamplingParams() if params is None else params
        all_params, priorities = [params] * len(prompts), [priority] * len(prompts)
        options = {"streams": streams, "pooling": pooling}
        process = partial(self.llm.input_processor.process, prompts, all_params, priorities, **options)
        return await self.enqueue(len(prompts), process, work_of(prompts, params), request_id)

    async def enqueue(
        self, num_requests: int, process: Callable[[], list[Request]], work: Work, request_id: int | str | None = None
    ) -> list[RequestStream]:
        """Queue the requests that `process` makes in another thread, all or none; `request_id`: of a single one.

        Raises:
            QueueFullError: too many requests are pending.
            ValueError: `process` rejects one, or another request has the id.
            RuntimeError: the engine is closed or asleep.
        """
        # The thread knows why the engine is closed.
        self._thread.require_running()
        self.llm.require_awake()
        count, most = len(self._pending), self.max_pending_requests
        if count + num_requests > most:
            raise QueueFullError(f"{count} requests are pending; max_pending_requests={most} allows no more")
        if request_id in self._pending:
            raise ValueError(f"request_id={request_id!r} belongs to a pending request")
        request_ids = [next(self._request_ids) if request_id is None else request_id for _ in range(num_requests)]
        self._pending.update(dict.fromkeys(request_ids, False))
        streams: list[RequestStream] = []
        try:
            try:
                requests = await self.run_beside(process, work)
            except SlowGrammarError:
                requests = await self.run_beside(partial(patiently, process), "slow grammar")
            for own_id, request in zip(request_ids, requests, strict=True):
                self.on_begin(request)
                state = RequestState(request, self.llm.output_processor)
                streams.append(RequestStream(state, own_id, self._mailbox_here(), self._leave))
                self._thread.submit(state)
                is_aborted, self._pending[own_id] = self._pending[own_id], state
                if is_aborted:
                    self._thread.abort(state)
        except BaseException:
            for stream in streams:
                self._leave(stream)
            for own_id in request_ids:
                self._pending.pop(own_id, None)
            raise
        return streams

    def _leave(self, stream: RequestStream) -> None:
        """Forget a request without a reader."""
        if self._pending.get(stream.request_id) is stream.state:
            del self._pending[stream.request_id]
            self.on_end(stream.state)
        if not stream.state.is_done:
            self._thread.abort(stream.state)

    def _mailbox_here(self) -> Mailbox:
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return self._mailbox


class AsyncLLMEngine(Unpicklable):
    """`AsyncLLM` with the method names of vLLM's engine and cumulative outputs.

    Args:
        model, max_pending_requests, kwargs: see `AsyncLLM`.

    Example:
        >>> async def main() -> None:
        ...     engine = AsyncLLMEngine(BUNDLED_MODEL)
        ...     params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        ...     async for output in engine.generate("count to 5", params, "request 1"):
        ...         num_tokens = len(output.outputs[0].token_ids)
        ...     print(num_tokens)
        ...     engine.shutdown()
        >>> asyncio.run(main())
        4
    """

    def __init__(
        self, model: str | os.PathLike[str], *, max_pending_requests: int = 4096, **kwargs: Unpack[EngineSettings]
    ) -> None:
        self.async_llm = AsyncLLM(model, max_pending_requests=max_pending_requests, **kwargs)

    async def add_request(
        self, request_id: str, prompt: Prompt | TokenIds, params: SamplingParams, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Queue a request and return its outputs, as `generate` yields them; raises like `AsyncLLM.generate`."""
        return _cumulative(await self.async_llm.begin_stream(prompt, params, priority=priority, request_id=request_id))

    async def generate(
        self, prompt: Prompt | TokenIds, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt and yield the cumulative output whenever there are new tokens; see `AsyncLLM.stream`."""
        outputs = await self.add_request(request_id, prompt, sampling_params, priority=priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a pending request with its output so far; other ids are ignored."""
        await self.async_llm.abort(request_id)

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return self.async_llm.is_running

    @property
    def errored(self) -> bool:
        """Whether an error has closed the engine."""
        return self.async_llm.errored

    def shutdown(self) -> None:
        """Close the engine and free the device."""
        self.async_llm.exit()


async def _cumulative(stream: RequestStream) -> AsyncGenerator[RequestOutput, None]:
    """Yield a request's outputs so far, whenever there are new parts."""
    whole: dict[int, CompletionOutput] = {}
    async with aclosing(stream):
        async for output in stream:
            for new in output.outputs:
                whole[new.index] = _joined(whole[new.index], new) if new.index in whole else new
            yield replace(output, outputs=[whole[index] for index in sorted(whole)])


def _joined(before: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = new.logprobs
    if isinstance(before.logprobs, Logprobs) and isinstance(new.logprobs, Logprobs):
        logprobs = before.logprobs + new.logprobs
    return replace(new, text=before.text + new.text, token_ids=before.token_ids + new.token_ids, logprobs=logprobs)
