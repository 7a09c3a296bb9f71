"""Base classes of all APIs' answers: complete as JSON, or in chunks as server-sent events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any
from uuid import uuid4

from anyio import to_thread
from starlette.responses import Response

from nanovllm.client.engine_thread import RequestStream
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.errors import JsonResponse
from nanovllm.serve.event_stream import DONE, EventStream, event
from nanovllm.serve.openai_format import AnswerMessage, ChatChoice, ChatCompletion, UsageCounts, usage
from nanovllm.serve.protocol import StreamOptions
from nanovllm.serve.service import Service

Event = tuple[str, dict[str, Any]]
"""An event's type and other fields."""
STREAMED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
"""Fields of a chat whose chunks a `Translation` can process."""
_LARGE_ANSWER = 10_000
"""Number of log-probabilities that takes about 20 ms to format, too long for other requests to wait."""


class Usage:
    """Counts the tokens of an answer incrementally.

    Args:
        num_prompt_tokens: number of tokens of all prompts.
        options: the stream options.

    Attributes:
        is_shown: whether the stream ends with the counts.
    """

    def __init__(self, num_prompt_tokens: int, options: StreamOptions | None) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = self._num_cached_tokens = 0
        self.is_shown = options is not None and bool(options.include_usage)
        self._is_continuous = self.is_shown and options is not None and bool(options.continuous_usage_stats)

    def add(self, output: RequestOutput, *, is_shown: bool = True) -> None:
        """Count an output; `is_shown`: whether its tokens are part of the answer."""
        self._num_tokens += sum(len(choice.token_ids) for choice in output.outputs) if is_shown else 0
        if output.finished:
            self._num_cached_tokens += output.num_cached_tokens

    def body(self) -> UsageCounts:
        """Return the counts."""
        counts = usage(self._num_prompt_tokens, self._num_tokens)
        return {**counts, "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens}}

    def so_far(self) -> UsageCounts | None:
        """Return the counts for a chunk before the last one; None unless every chunk has them."""
        return self.body() if self._is_continuous else None


class Answer(ABC):
    """An answer to one request; subclasses implement an API's format.

    Args:
        service: the service.
        streams: output streams of the prompts.
        options: the stream options.
        head: first fields of each chunk.
    """

    shows_output = True
    """Whether the answer contains the generated tokens."""

    def __init__(
        self, service: Service, streams: list[RequestStream], options: StreamOptions | None, head: dict[str, Any]
    ) -> None:
        self.service, self.streams, self.head = service, streams, head
        self.requests = [stream.state.request for stream in streams]
        self.usage = Usage(sum(len(request.token_ids) for request in self.requests), options)

    @abstractmethod
    def _whole(self, outputs: list[RequestOutput]) -> Any:
        """Return the body of the complete answer; `usage` has counted its outputs."""

    @abstractmethod
    def _new_chunks(self, index: int, output: RequestOutput) -> Iterable[Any]:
        """Return new parts of a prompt's output, each as the choices of one chunk."""

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        chunk = {**self.head, "choices": choices}
        if self.usage.is_shown:
            chunk["usage"] = self.usage.so_far()
        return chunk

    def _first_chunks(self) -> Iterator[Any]:
        """Yield the chunks before all outputs."""
        yield from ()

    async def chunks(self) -> AsyncIterator[Any]:
        """Yield the answer in chunks."""
        for chunk in self._first_chunks():
            yield chunk
        async for index, output in self.service.read(self.streams):
            self.usage.add(output, is_shown=self.shows_output)
            for choices in self._new_chunks(index, output):
                yield self._chunk(choices)
        if self.usage.is_shown:
            yield {**self._chunk([]), "usage": self.usage.body()}

    async def respond(self, stream: bool | None, translation: Translation | None = None) -> Response:
        """Return the HTTP response.

        Args:
            stream: whether the answer is sent in chunks.
            translation: converts the answer to another API's format.
        """
        if stream:
            events = _events(self.chunks()) if translation is None else translation.events(self.chunks())
            return EventStream(events, self.streams, self.service.settings, self.service.metrics.count_error)
        outputs = await self.service.outputs(self.streams)
        for output in outputs:
            self.usage.add(output, is_shown=self.shows_output)

        def build() -> Any:
            answer = self._whole(outputs)
            return answer if translation is None else translation.whole(answer)

        return await json_answer(build, outputs, self.requests[0].params)


def answer_head(service: Service, prefix: str, kind: str) -> dict[str, Any]:
    """Return the first fields of OpenAI's answers: a new id with this prefix, `kind` as the object, and the model."""
    head = {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": service.model}
    return {**head, "system_fingerprint": service.fingerprint}


async def _events(chunks: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield event(chunk)
    yield DONE


async def json_answer(build: Callable[[], Any], outputs: list[RequestOutput], params: SamplingParams) -> JsonResponse:
    """Build an answer from outputs, in a thread if it is large.

    Args:
        build: returns the body.
        outputs: outputs whose log-probabilities determine the size.
        params: sampling parameters of the outputs.
    """
    choices = [choice for output in outputs for choice in output.outputs]
    count = sum(len(choice.logprobs or ()) for choice in choices) * (1 + (params.logprobs or 0))
    count += sum(len(output.prompt_logprobs or ()) for output in outputs) * (1 + (params.prompt_logprobs or 0))
    if count < _LARGE_ANSWER:
        return JsonResponse(build())
    return await to_thread.run_sync(lambda: JsonResponse(build(), in_pieces=True))


class Translation(ABC):
    """Translates a chat's answer, complete or in chunks, to another API with named events.

    The answer becomes a list of items, texts and function calls; the last one is open until the next one begins. The
    chat must have one choice, and usage in every chunk.

    Attributes:
        items: the answer so far.
        usage: the counts so far.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.usage: UsageCounts = usage(0, 0)
        self._pieces: list[str] = []
        self._is_in_text = False

    @abstractmethod
    def _text_item(self) -> dict[str, Any]:
        """Return an empty text."""

    @abstractmethod
    def _call_item(self, call_id: str, name: str) -> dict[str, Any]:
        """Return a call without arguments."""

    @abstractmethod
    def _begin(self) -> Iterator[Event]:
        """Yield the events before all items."""

    @abstractmethod
    def _begin_item(self, item: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of a newly added item."""

    @abstractmethod
    def _piece_event(self, item: dict[str, Any], piece: str) -> Event:
        """Return the event of another piece of the last item's text or arguments."""

    @abstractmethod
    def _end_item(self, item: dict[str, Any], content: str, status: str) -> Iterator[Event]:
        """Complete the last item with its whole text or arguments, and yield its final events."""

    @abstractmethod
    def _end(self, choice: ChatChoice) -> Iterator[Event]:
        """Yield the events after all items; `choice` contains the finish reason."""

    @abstractmethod
    def _body(self, choice: ChatChoice) -> dict[str, Any]:
        """Return the complete answer; `choice` contains the finish reason."""

    def whole(self, chat: ChatCompletion) -> dict[str, Any]:
        """Translate a chat's complete answer."""
        (choice,) = chat["choices"]
        self.usage = chat["usage"] or self.usage
        for events in (self._add(choice["message"]), self._finish(choice)):
            # Iterating over the events fills `items`.
            deque(events, maxlen=0)
        return self._body(choice)

    async def events(self, chunks: AsyncIterator[ChatCompletion]) -> AsyncIterator[bytes]:
        """Translate a chat's chunks to events."""
        is_first = True
        async for chunk in chunks:
            self.usage = chunk["usage"] or self.usage
            for kind, fields in self._chunk_events(chunk, is_first):
                yield event(self._event(kind, fields), kind)
            is_first = False

    def _chunk_events(self, chunk: ChatCompletion, is_first: bool) -> Iterator[Event]:
        if is_first:
            yield from self._begin()
        for choice in chunk["choices"]:
            yield from self._add(choice["delta"])
            if choice["finish_reason"] is not None:
                yield from self._finish(choice)
                yield from self._end(choice)

    def _event(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return an event's data."""
        return {"type": kind, **fields}

    def _finish(self, choice: ChatChoice) -> Iterator[Event]:
        """Complete the last item, if any."""
        yield from self._end_last("completed" if choice["finish_reason"] in ("stop", "tool_calls") else "incomplete")

    def _append(self, item: dict[str, Any], *, is_text: bool) -> Iterator[Event]:
        """Complete the last item and add another one."""
        yield from self._end_last("completed")
        self.items.append(item)
        self._pieces, self._is_in_text = [], is_text
        yield from self._begin_item(item)

    def _end_last(self, status: str) -> Iterator[Event]:
        if self.items:
            yield from self._end_item(self.items[-1], "".join(self._pieces), status)

    def _add(self, message: AnswerMessage) -> Iterator[Event]:
        """Add a chat's message or delta, and yield its events."""
        if content := message.get("content"):
            if not self._is_in_text:
                yield from self._append(self._text_item(), is_text=True)
            yield self._add_piece(content)
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                yield from self._append(self._call_item(call["id"], function["name"]), is_text=False)
            if function["arguments"]:
                yield self._add_piece(function["arguments"])

    def _add_piece(self, piece: str) -> Event:
        self._pieces.append(piece)
        return self._piece_event(self.items[-1], piece)
