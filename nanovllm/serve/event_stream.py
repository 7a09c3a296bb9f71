"""Sends server-sent events, and cancels answers when clients disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.client.engine_thread import RequestStream
from nanovllm.serve.errors import ApiError, api_error, encode_json, error_body
from nanovllm.serve.settings import ServeSettings

Result = TypeVar("Result")
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Keeps proxies such as nginx from buffering events.
    (b"x-accel-buffering", b"no"),
]


def event(data: Any, name: str | None = None) -> bytes:
    """Return an event with JSON data."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%bdata: %b\n\n" % (head, encode_json(data))


DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"
_PING_SECONDS = 15.0
"""Interval of pings: proxies close a connection that is silent for a minute, as during a long prefill."""


class EventStream(Response):
    """Sends events until the client disconnects or a time limit.

    Args:
        events: the answer's events.
        streams: output streams behind the events; always closed at the end.
        settings: the server's settings.
        count_error: called with the kind of an error that ends the stream; "client_disconnect" for a disconnect.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        streams: Iterable[RequestStream],
        settings: ServeSettings,
        count_error: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._events = events
        self._streams = streams
        self._settings = settings
        self._count_error = count_error
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
            await self._end(scope, send, error)
        finally:
            await self._close()

    async def _close(self) -> None:
        for stream in self._streams:
            await stream.aclose()

    async def _pump(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        pings = asyncio.ensure_future(self._ping(send))
        try:
            async for data in self._events:
                self._num_sent += 1
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            pings.cancel()
            await self._end(scope, send, api_error(error))
        else:
            pings.cancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            pings.cancel()

    async def _ping(self, send: Send) -> None:
        """Send a comment, which clients ignore, after a while without events."""
        while True:
            before = self._num_sent
            await asyncio.sleep(_PING_SECONDS)
            if self._num_sent == before:
                await send({"type": "http.response.body", "body": _PING, "more_body": True})

    async def _end(self, scope: Scope, send: Send, error: ApiError) -> None:
        """End with an error event, since the status was already sent."""
        self._count_error(error.kind)
        body = error_body(error, scope)
        await send({"type": "http.response.body", "body": event(body, body.get("type")), "more_body": False})


async def until_disconnect(receive: Receive, work: Awaitable[Result], seconds: float) -> Result:
    """Return the result of a coroutine; cancel it if the client disconnects or it takes too long.

    Raises:
        ClientDisconnect: the client disconnected.
        ApiError: it took longer than `seconds`.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientDisconnect
        raise ApiError(408, f"the request took longer than {seconds} s (max_request_seconds)")
    finally:
        await _cancel(task, gone)


async def _disconnect(receive: Receive) -> None:
    """Wait until the client disconnects, after its request was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for them; their errors are handled or irrelevant."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
