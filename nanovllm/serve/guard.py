"""What every request passes before it is looked at: the key, the number of requests, and the size of the body."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

import anyio
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.serve.error_forms import error_response
from nanovllm.serve.errors import ApiError
from nanovllm.serve.logs import log_refusal
from nanovllm.serve.server_counts import Counted, ServerCounts
from nanovllm.serve.settings import ServeSettings

_OPEN_PATHS = ("/", "/health", "/ping", "/version", "/openapi.json", "/favicon.ico")
"""Paths that need no key: they show nothing of requests or of the model."""

_READ_OF_TOO_LARGE = 8
"""How many times the largest body is read of a client that is refused."""
_MOST_VALUES = 2**18
"""Quotes and brackets in a body, of which each costs about 0.5 us of everybody's time: parsing lets nobody else run."""
_DISCARD_SECONDS = 1.0
_BEGIN_AT_ONCE = 8
"""Requests that one turn of the event loop begins, so that hundreds that arrive together do not hold it."""


class Guard:
    """An ASGI middleware that refuses requests before their body is read or parsed.

    Args:
        app: what it protects.
        settings: the server's.
        count_error: takes the kind of each error that is answered.
        counts: of the server.
    """

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, count_error: Callable[[str], None], counts: ServerCounts
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = [key.encode() for key in settings.api_key or []]
        self._count_error = count_error
        self._counts = counts
        self._begin_gate = asyncio.Semaphore(_BEGIN_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if self._takes_body(scope):
                await self._pass_counted(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except ApiError as error:
            self._count_error(error.kind)
            log_refusal(scope, error)
            await self._refuse(error, scope, receive, send)
        except ClientDisconnect:
            # Before its request was complete: nobody reads an answer.
            self._count_error("client_disconnect")

    def _takes_body(self, scope: Scope) -> bool:
        """Whether a request is one for the engine, which costs something and may have a body.

        Raises:
            ApiError: the key is wrong, or there is a body where none belongs.
        """
        path, headers = scope["path"].removeprefix(scope["root_path"]), dict(scope["headers"])
        is_open = path in _OPEN_PATHS or path.startswith("/page/")
        if self._keys and not is_open:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            # Anthropic's clients send the latter.
            key = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
            # In constant time, so that nobody can find a key byte by byte.
            if sum(hmac.compare_digest(key, own) for own in self._keys) == 0:
                raise ApiError(401, "the API key is missing or wrong", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST" and not is_open:
            return True
        if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
            raise ApiError(413, "this request takes no body")
        return False

    async def _pass_counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request's body and pass it on, unless there are too many."""
        if self._counts.total(Counted.REQUESTS) >= self._settings.max_requests:
            message = f"the server has {self._settings.max_requests} requests already (max_requests)"
            raise ApiError(429, message, headers={"Retry-After": "1"})
        self._counts.add(Counted.REQUESTS, 1)
        try:
            async with self._begin_gate:
                await asyncio.sleep(0)
            await self._app(scope, _replay(await self._read_body(receive), receive), send)
        finally:
            self._counts.add(Counted.REQUESTS, -1)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, and close the connection, whose body is not read."""
        response = error_response(error, scope)
        headers = [*response.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        # A client that is still sending when the connection is closed does not see the answer.
        await self._discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self, receive: Receive) -> None:
        """Read what comes of a body, for a second and up to a limit."""
        size, more = 0, True
        with anyio.move_on_after(_DISCARD_SECONDS):
            while more and size <= self._settings.max_body_bytes * _READ_OF_TOO_LARGE:
                message = await receive()
                size += len(message.get("body", b""))
                more = message.get("more_body", False)

    async def _read_body(self, receive: Receive) -> bytes:
        most = self._settings.max_body_bytes
        parts: list[bytes] = []
        size, more = 0, True
        try:
            with anyio.fail_after(self._settings.max_read_seconds):
                while more and size <= most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    more = message.get("more_body", False)
        except TimeoutError as error:
            seconds = self._settings.max_read_seconds
            raise ApiError(408, f"the body did not arrive within {seconds} s (max_read_seconds)") from error
        if size > most:
            raise ApiError(413, f"the body is over max_body_bytes={most}")
        body = b"".join(parts)
        if _num_values(body) > _MOST_VALUES:
            raise ApiError(413, f"the body has more than {_MOST_VALUES} quotes and brackets")
        return body


def _num_values(body: bytes) -> int:
    """Return how many quotes that are not in a string JSON has, and brackets, which may be in one."""
    return body.count(b'"') - body.count(b'\\"') + body.count(b"[") + body.count(b"{")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read, and then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
