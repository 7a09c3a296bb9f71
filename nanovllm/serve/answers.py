"""Base classes of all APIs' answers: complete as JSON, or in chunks as server-sent events."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any
from uuid import uuid4

from anyio import to_thread
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.client.engine_thread import RequestStream
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.errors import ApiError, JsonResponse, api_error, encode_json, error_body
from nanovllm.serve.openai_format import AnswerMessage, ChatChoice, ChatCompletion, UsageCounts, usage
from nanovllm.serve.protocol import StreamOptions
from nanovllm.serve.service import Service, until_disconnect
from nanovllm.serve.settings import ServeSettings

Event = tuple[str, dict[str, Any]]
"""An event's type and other fields."""
STREAMED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
"""Fields of a chat whose chunks a `Translation` can process."""
_LARGE_ANSWER = 10_000
"""Number of log-probabilities that takes about 20 ms to format, too long for other requests to wait."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Keeps proxies such as nginx from buffering events.
    (b"x-accel-buffering", b"no"),
]
_PING_SECONDS = 15.0
"""Interval of pings: proxies close a connection that is silent for a minute, as during a long prefill."""


class Answer(ABC):
    """An answer to one request; subclasses implement an API's format. `head`: the first fields of each chunk."""

    shows_output = True
    """Whether the answer contains the generated tokens."""

    def __init__(
        self, service: Service, streams: list[RequestStream], options: StreamOptions | None, head: dict[str, Any]
    ) -> None:
        self.service, self.streams, self.head = service, streams, head
        self.requests = [stream.state.request for stream in streams]
        self._num_prompt_tokens = sum(len(request.token_ids) for request in self.requests)
        self._num_tokens = self._num_cached_tokens = 0
        # Whether the last chunk has the counts of tokens, and whether all others have them too.
        self._shows_usage = options is not None and bool(options.include_usage)
        self._counts_chunks = self._shows_usage and options is not None and bool(options.continuous_usage_stats)

    @abstractmethod
    def _whole(self, outputs: list[RequestOutput]) -> Any:
        """Return the body of the complete answer, whose outputs are counted."""

    @abstractmethod
    def _new_chunks(self, index: int, output: RequestOutput) -> Iterable[Any]:
        """Return new parts of a prompt's output, each as the choices of one chunk."""

    def _usage(self) -> UsageCounts:
        counts = usage(self._num_prompt_tokens, self._num_tokens)
        return {**counts, "prompt_tokens_details": {"cached_tokens": self._num_cached_tokens}}

    def _count(self, output: RequestOutput) -> None:
        if self.shows_output:
            self._num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        if output.finished:
            self._num_cached_tokens += output.num_cached_tokens

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        chunk = {**self.head, "choices": choices}
        if self._shows_usage:
            chunk["usage"] = self._usage() if self._counts_chunks else None
        return chunk

    def _first_chunks(self) -> Iterator[Any]:
        """Yield the chunks before all outputs."""
        yield from ()

    async def chunks(self) -> AsyncIterator[Any]:
        """Yield the answer in chunks."""
        for chunk in self._first_chunks():
            yield chunk
        async for index, output in self.service.read(self.streams):
            self._count(output)
            for choices in self._new_chunks(index, output):
                yield self._chunk(choices)
        if self._shows_usage:
            yield {**self._chunk([]), "usage": self._usage()}

    async def respond(self, stream: bool | None, translation: Translation | None = None) -> Response:
        """Return the HTTP response, in chunks if `stream`; `translation` converts it to another API's format."""
        if stream:
            events = _events(self.chunks()) if translation is None else translation.events(self.chunks())
            return EventStream(events, self.streams, self.service.settings, self.service.metrics.count_error)
        outputs = await self.service.outputs(self.streams)
        for output in outputs:
            self._count(output)

        def build() -> Any:
            answer = self._whole(outputs)
            return answer if translation is None else translation.whole(answer)

        return await json_answer(build, outputs, self.requests[0].params)


def answer_head(service: Service, prefix: str, kind: str) -> dict[str, Any]:
    """Return the first fields of OpenAI's answers: a new id with this prefix, `kind` as the object, and the model."""
    head = {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": service.model}
    return {**head, "system_fingerprint": service.fingerprint}


async def json_answer(build: Callable[[], Any], outputs: list[RequestOutput], params: SamplingParams) -> JsonResponse:
    """Return the body from `build`, called in a thread if the outputs have many log-probabilities."""
    choices = [choice for output in outputs for choice in output.outputs]
    count = sum(len(choice.logprobs or ()) for choice in choices) * (1 + (params.logprobs or 0))
    count += sum(len(output.prompt_logprobs or ()) for output in outputs) * (1 + (params.prompt_logprobs or 0))
    if count < _LARGE_ANSWER:
        return JsonResponse(build())
    return await to_thread.run_sync(lambda: JsonResponse(build(), in_pieces=True))


def _event(data: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%bdata: %b\n\n" % (head, encode_json(data))


async def _events(chunks: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield _event(chunk)
    yield b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends events until the client disconnects or a time limit, then closes the output streams behind them.

    `count_error` is called with the kind of an error that ends the stream; "client_disconnect" for a disconnect.
    """

    def __init__(
        self, events: AsyncIterator[bytes], streams: Iterable[RequestStream], settings: ServeSettings,
        count_error: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self._events, self._streams, self._settings, self._count_error = events, streams, settings, count_error
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            await until_disconnect(receive, self._pump(scope, send), self._settings.max_request_seconds)
        except ClientDisconnect:
            self._count_error("client_disconnect")
        except ApiError as error:
            # The time limit passed. A client that reads slowly may still get the end of its answer.
            await self._close()
            await _send(send, self._error_event(error, scope), more=False)
        finally:
            await self._close()

    async def _close(self) -> None:
        for stream in self._streams:
            await stream.aclose()

    async def _pump(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        pings, last = asyncio.ensure_future(self._ping(send)), b""
        try:
            async for data in self._events:
                self._num_sent += 1
                await _send(send, data)
        except Exception as error:
            last = self._error_event(api_error(error, scope), scope)
        finally:
            pings.cancel()
        await _send(send, last, more=False)

    async def _ping(self, send: Send) -> None:
        """Send a comment, which clients ignore, after a while without events."""
        while True:
            before = self._num_sent
            await asyncio.sleep(_PING_SECONDS)
            if self._num_sent == before:
                await _send(send, b": ping\n\n")

    def _error_event(self, error: ApiError, scope: Scope) -> bytes:
        """Count an error and return its event, since the status was already sent."""
        self._count_error(error.kind)
        body = error_body(error, scope)
        return _event(body, body.get("type"))


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


class Translation(ABC):
    """Translates a chat's answer, complete or in chunks, to another API with named events.

    The answer becomes `items`, texts and function calls; the last one is open until the next one begins. The chat must
    have one choice, and `usage` in every chunk.
    """

    is_never_empty = False
    """Whether an answer has at least an empty text."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.usage: UsageCounts = usage(0, 0)
        self._pieces: list[str] = []
        self._is_in_text = False

    @abstractmethod
    def _new_item(self, call: dict[str, Any] | None) -> dict[str, Any]:
        """Return a call with its id and name, without arguments; None: an empty text."""

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
        # Iterating over the events fills `items`.
        deque(self._add(choice["message"], choice["finish_reason"] or ""), maxlen=0)
        return self._body(choice)

    async def events(self, chunks: AsyncIterator[ChatCompletion]) -> AsyncIterator[bytes]:
        """Translate a chat's chunks to events."""
        is_first = True
        async for chunk in chunks:
            self.usage = chunk["usage"] or self.usage
            for kind, fields in self._chunk_events(chunk, is_first):
                yield _event(self._event(kind, fields), kind)
            is_first = False

    def _chunk_events(self, chunk: ChatCompletion, is_first: bool) -> Iterator[Event]:
        if is_first:
            yield from self._begin()
        for choice in chunk["choices"]:
            yield from self._add(choice["delta"], choice["finish_reason"])
            if choice["finish_reason"] is not None:
                yield from self._end(choice)

    def _event(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {"type": kind, **fields}

    def _add(self, message: AnswerMessage, finish_reason: str | None) -> Iterator[Event]:
        """Add a chat's message or delta, complete the last item if the chat is finished, and yield the events."""
        if content := message.get("content"):
            if not self._is_in_text:
                yield from self._append(None)
            yield self._add_piece(content)
        for call in message.get("tool_calls", ()):
            if "name" in call["function"]:
                yield from self._append(call)
            if arguments := call["function"]["arguments"]:
                yield self._add_piece(arguments)
        if finish_reason is not None:
            if not self.items and self.is_never_empty:
                yield from self._append(None)
            yield from self._end_last("completed" if finish_reason in ("stop", "tool_calls") else "incomplete")

    def _append(self, call: dict[str, Any] | None) -> Iterator[Event]:
        """Complete the last item and add another one."""
        yield from self._end_last("completed")
        self.items.append(self._new_item(call))
        self._pieces, self._is_in_text = [], call is None
        yield from self._begin_item(self.items[-1])

    def _end_last(self, status: str) -> Iterator[Event]:
        if self.items:
            yield from self._end_item(self.items[-1], "".join(self._pieces), status)

    def _add_piece(self, piece: str) -> Event:
        self._pieces.append(piece)
        return self._piece_event(self.items[-1], piece)
