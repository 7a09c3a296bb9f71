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
from nanovllm.serve.errors import ApiError, JsonResponse, api_error, encode_json, encode_pieces, error_body
from nanovllm.serve.openai_format import UsageCounts, chat_finish_reason, usage
from nanovllm.serve.protocol import StreamOptions
from nanovllm.serve.service import Service, merged, until_disconnect
from nanovllm.serve.settings import ServeSettings
from nanovllm.text.answers import AnswerSplitter

Event = tuple[str, dict[str, Any]]
"""An event's type and other fields."""
_COMPLETE = ("stop", "tool_calls")
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
        """Return new parts of a prompt's output."""

    def _first_chunks(self) -> Iterable[Any]:
        """Return the chunks before all outputs."""
        return ()

    def _encoded(self, chunk: Any) -> bytes:
        return _event(chunk)

    def _last_events(self) -> Iterator[bytes]:
        if self._shows_usage:
            yield _event({**self._chunk([]), "usage": self._usage()})
        yield b"data: [DONE]\n\n"

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

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events."""
        for chunk in self._first_chunks():
            yield self._encoded(chunk)
        async for index, output in merged(self.streams):
            self._count(output)
            for chunk in self._new_chunks(index, output):
                yield self._encoded(chunk)
        for event in self._last_events():
            yield event

    async def respond(self, stream: bool | None) -> Response:
        """Return the HTTP response, in events if `stream`."""
        if stream:
            return EventStream(self.events(), self.streams, self.service.settings, self.service.metrics.count_error)
        outputs = await self.service.llm.gather(self.streams)
        for output in outputs:
            self._count(output)
        return await json_answer(lambda: self._whole(outputs), outputs, self.requests[0].params)


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
    return JsonResponse(await to_thread.run_sync(lambda: encode_pieces(build())))


def _event(data: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%bdata: %b\n\n" % (head, encode_json(data))


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


class TranslatedAnswer(Answer):
    """An answer to a chat in the format of another API, which has named events.

    The answer becomes `items`, texts and function calls; the last one is open until the next one begins. The reasons
    for its end are None until then.
    """

    is_never_empty = False
    """Whether an answer has at least an empty text."""

    def __init__(self, service: Service, streams: list[RequestStream], splitter: AnswerSplitter) -> None:
        super().__init__(service, streams, None, {})
        self.items: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._splitter = splitter
        self._pieces: list[str] = []
        self._is_in_text = False

    @abstractmethod
    def _new_item(self, name: str | None, call_id: str) -> dict[str, Any]:
        """Return a call without arguments; without a `name`, an empty text."""

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
    def _end(self) -> Iterator[Event]:
        """Yield the events after all items."""

    @abstractmethod
    def _body(self) -> dict[str, Any]:
        """Return the complete answer."""

    def _whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        # Iterating over the events fills `items`.
        deque(self._new_chunks(0, output), maxlen=0)
        return self._body()

    def _encoded(self, chunk: Event) -> bytes:
        kind, fields = chunk
        return _event({"type": kind, **fields}, kind)

    def _last_events(self) -> Iterator[bytes]:
        yield from ()

    def _new_chunks(self, index: int, output: RequestOutput) -> Iterator[Event]:
        """Add new parts to the items, and yield the events."""
        for choice in output.outputs:
            new = self._splitter.append(choice.text, choice.finish_reason is not None)
            if new.content:
                if not self._is_in_text:
                    yield from self._append()
                yield self._add_piece(new.content)
            for call in new.calls:
                if call.name is not None:
                    yield from self._append(call.name, self._splitter.call_ids[call.index])
                if call.arguments:
                    yield self._add_piece(call.arguments)
            if choice.finish_reason is not None:
                self.finish_reason = chat_finish_reason(choice, self._splitter)
                self.stop_reason = choice.stop_reason
                if not self.items and self.is_never_empty:
                    yield from self._append()
                yield from self._end_last("completed" if self.finish_reason in _COMPLETE else "incomplete")
                yield from self._end()

    def _append(self, name: str | None = None, call_id: str = "") -> Iterator[Event]:
        """Complete the last item and add another one."""
        yield from self._end_last("completed")
        self.items.append(self._new_item(name, call_id))
        self._pieces, self._is_in_text = [], name is None
        yield from self._begin_item(self.items[-1])

    def _end_last(self, status: str) -> Iterator[Event]:
        if self.items:
            yield from self._end_item(self.items[-1], "".join(self._pieces), status)

    def _add_piece(self, piece: str) -> Event:
        self._pieces.append(piece)
        return self._piece_event(self.items[-1], piece)
