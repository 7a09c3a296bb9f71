"""Limits connections, heads, bodies, requests, time and memory, so that no client can bring the server down.

uvicorn limits neither the time for receiving a head nor the time in which a client reads nothing, and it accepts any
number of pipelined requests; `Connection` adds these limits, by overriding methods of its protocol: no public setting
of uvicorn, granian 2.8 or hypercorn 0.18 disconnects a client that reads nothing. `Guard` checks the key, the number of
requests and the body size before the application sees a request.
"""

from __future__ import annotations

import asyncio
import ctypes
import hmac
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

import anyio
import httptools
from anyio import to_thread
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanovllm.serve.errors import ApiError, JsonResponse, error_response
from nanovllm.serve.logs import log_refusal
from nanovllm.serve.settings import Counted, ServerCounts, ServeSettings

_logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 128 * 2**10
_CHUNK_BYTES = 32
"""Bytes allowed around a body chunk's data; extensions and trailers count as bytes of a head."""
_LINGER_SECONDS = 1.0
"""Time for a refused client to finish sending: closing a connection with unread data would lose the answer."""
_MAX_LINGERING = 64
_MIN_WAIT_SECONDS = 1.0
"""Time that a connection can wait for a head before a new one may replace it."""
_MAX_DESCRIPTORS = 2**17
_OTHER_DESCRIPTORS = 8
"""Descriptors kept free for other files, besides `_MAX_LINGERING` for refused connections."""
_OPEN_PATHS = ("/", "/health", "/ping", "/version", "/openapi.json", "/favicon.ico")
"""Paths that need no key, since they reveal nothing about requests or the model."""
_MAX_VALUES = 2**18
"""Maximum quotes and brackets in a body. Each blocks all clients for about 0.5 us of parsing."""
_DISCARD_SECONDS = 1.0
_BEGIN_AT_ONCE = 8
"""Maximum requests started in one turn of the event loop, so that hundreds at once do not block it."""
_TRIM_SECONDS, _MAX_TRIM_SECONDS = 5.0, 320.0
_MIN_GROWTH_BYTES = 64 * 2**20
_STATM = Path("/proc/self/statm")


class ConnectionPool:
    """State shared by all connections of a process; the one idle for longest makes room for a new one.

    `count_error` is called with the kind of each refusal, and "slow_client" when a client reads nothing.
    """

    def __init__(
        self, settings: ServeSettings, count_error: Callable[[str], None], max_connections: int,
        counts: ServerCounts | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.count_error, self.counts = settings, count_error, counts or ServerCounts()
        self._max_connections = max_connections
        # Idle connections, longest first, with the start of their wait in seconds of the event loop.
        self.waiting: dict[Connection, float] = {}

    def make_room(self, newest: Connection) -> None:
        """Close a connection if there are too many."""
        excess = self.counts.total(Counted.CONNECTIONS) - self._max_connections
        if excess <= 0:
            return
        # Connections of this process; the newest one is idle too.
        oldest, since = next(iter(self.waiting.items()))
        # Otherwise clients without a key could occupy all connections, each for the time allowed for a head.
        loser = oldest if since < newest.loop.time() - _MIN_WAIT_SECONDS else newest
        message = f"the server has {self._max_connections} connections already (max_connections)"
        loser.refuse(ApiError(503, message), lingers=excess <= _MAX_LINGERING)


class Connection(HttpToolsProtocol):
    """A connection with one request at a time, and limits of time and size; `arguments`: uvicorn's."""

    def __init__(self, pool: ConnectionPool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._pool = pool
        self._settings = pool.settings
        # Bytes received since the head began, without body data.
        self._num_bytes = 0
        # Whether input is dropped. It is still read, to notice a disconnect.
        self._ignores_input = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._request_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for a request."""
        super().connection_made(transport)
        self._pool.counts.own[Counted.CONNECTIONS] += 1
        self._await_head()
        self._pool.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._pool.counts.own[Counted.CONNECTIONS] -= 1
        self._pool.waiting.pop(self, None)
        for timer in (self._head_timer, self._write_timer, self._request_timer):
            _cancel(timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse input, and refuse it if it is not HTTP or too large."""
        if self._ignores_input:
            return
        self._unset_keepalive_if_required()
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        self._num_bytes += len(data)
        try:
            self.parser.feed_data(data)
            self._check_head(self._num_bytes)
        except httptools.HttpParserUpgrade:
            # Answer with HTTP: no other protocol is supported.
            pass
        except httptools.HttpParserError as error:
            cause = error.__context__
            self.refuse(cause if isinstance(cause, ApiError) else ApiError(400, "what was sent is not HTTP/1.1"))
        except ApiError as error:
            self.refuse(error)

    def on_message_begin(self) -> None:
        """Begin a request, unless the previous one is not answered yet."""
        if self.cycle is not None and not self.cycle.response_complete:
            # This stops the parser; the previous request still gets its answer.
            raise ApiError(400, "a request came before the answer to the one before it")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Pass a request to the application."""
        if sum(name == b"host" for name, _ in self.headers) > 1:
            # A proxy could use a different one than this server.
            raise ApiError(400, "the request has more than one Host header")
        # 4: the separator between name and value, and the line end.
        self._check_head(len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers))
        _cancel(self._head_timer)
        _cancel(self._request_timer)
        self._head_timer = None
        self._pool.waiting.pop(self, None)
        settings = self._settings
        seconds = settings.max_read_seconds + settings.max_request_seconds + settings.max_write_seconds
        self._request_timer = self.loop.call_later(seconds, self._end_late_request)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Receive a part of a body."""
        self._num_bytes -= len(body)
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """Exclude the bytes around a chunk's data from the count."""
        self._num_bytes -= _CHUNK_BYTES

    def on_message_complete(self) -> None:
        """End a body."""
        self._num_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request once the answer is sent."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_writing()
        else:
            _cancel(self._request_timer)
        if not self.transport.is_closing():
            self._pool.waiting[self] = self.loop.time()

    def pause_writing(self) -> None:
        """Watch that the client reads."""
        self._watch_writing()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Continue, since the client has read nearly everything."""
        _cancel(self._write_timer)
        super().resume_writing()

    def refuse(self, error: ApiError, *, lingers: bool = True) -> None:
        """Answer invalid input with an error, and close the connection; `lingers`: the client gets time to read it.

        An answer in progress is completed and is the last one.
        """
        self._ignores_input = True
        self._pool.waiting.pop(self, None)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body:
                cycle.keep_alive = False
                return
            # Its body will stay incomplete.
            cycle.disconnected = True
            cycle.message_event.set()
        _logger.warning("refused a connection of %s: %d %s", self.client, error.status, error)
        self._pool.count_error(error.kind)
        _cancel(self._head_timer)
        if not lingers or self.transport.is_closing():
            self.transport.abort()
            return
        self.transport.write(_answer(error))
        self.transport.write_eof()
        self._head_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._settings.max_read_seconds, self.transport.abort)
        self._pool.waiting.setdefault(self, self.loop.time())

    def _check_head(self, num_bytes: int) -> None:
        if num_bytes > _MAX_HEAD_BYTES:
            raise ApiError(431, f"the request's head is over {_MAX_HEAD_BYTES} bytes")

    def _watch_writing(self) -> None:
        _cancel(self._write_timer)
        unsent = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self._settings.max_write_seconds, self._end_unless_written, unsent)

    def _end_unless_written(self, num_unsent: int) -> None:
        # `resume_writing` is called only when nearly all is sent, which takes long for a large answer.
        if self.transport.get_write_buffer_size() >= num_unsent:
            self._end_slow_client()
        elif self.transport.get_write_buffer_size():
            self._watch_writing()

    def _end_late_request(self) -> None:
        # The answer's own time limit was earlier, but a slow client may not have received the rest yet.
        if not self.cycle.response_complete or self.transport.get_write_buffer_size():
            self._end_slow_client()

    def _end_slow_client(self) -> None:
        self._pool.count_error("slow_client")
        _logger.warning("cut the connection of %s, which does not read its answer", self.client)
        self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _answer(error: ApiError) -> bytes:
    body = JsonResponse(error.body()).body
    phrase = HTTPStatus(error.status).phrase
    head = f"HTTP/1.1 {error.status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return (head + "Connection: close\r\n\r\n").encode() + bytes(body)


def raise_descriptor_limit(max_connections: int) -> int:
    """Raise the limit of open files; return how many connections it allows, up to `max_connections`, or ValueError."""
    if sys.platform == "win32":
        return max_connections
    import resource  # noqa: PLC0415

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    num_open = len(os.listdir("/dev/fd"))
    free = (sys.maxsize if soft == resource.RLIM_INFINITY else soft) - num_open - _MAX_LINGERING - _OTHER_DESCRIPTORS
    # Each may also be reading a file of the page.
    if free < 2:
        raise ValueError(f"{soft} open files are too few for a server, which has {num_open} already: see `ulimit -n`")
    return min(max_connections, free // 2)


class Guard:
    """ASGI middleware that refuses requests before their bodies are read or parsed."""

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, count_error: Callable[[str], None], counts: ServerCounts
    ) -> None:
        self._app, self._settings, self._count_error, self._counts = app, settings, count_error, counts
        self._keys = [key.encode() for key in settings.api_key or []]
        self._begin_gate = asyncio.Semaphore(_BEGIN_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or answer with an error."""
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
            # The request is incomplete, and its client is gone.
            self._count_error("client_disconnect")

    def _takes_body(self, scope: Scope) -> bool:
        """Whether a request is for the engine, and so is limited and may have a body; ApiError if it is refused."""
        path, headers = scope["path"].removeprefix(scope["root_path"]), dict(scope["headers"])
        is_open = path in _OPEN_PATHS or path.startswith("/page/")
        if self._keys and not is_open:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            # Anthropic's clients send `x-api-key`.
            key = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
            # Compare in constant time, so that a key cannot be guessed byte by byte.
            if sum(hmac.compare_digest(key, own) for own in self._keys) == 0:
                raise ApiError(401, "the API key is missing or wrong", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] == "POST" and not is_open:
            return True
        if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
            raise ApiError(413, "this request takes no body")
        return False

    async def _pass_counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request's body and pass it to the application, unless there are too many requests."""
        if self._counts.total(Counted.REQUESTS) >= self._settings.max_requests:
            message = f"the server has {self._settings.max_requests} requests already (max_requests)"
            raise ApiError(429, message, headers={"Retry-After": "1"})
        self._counts.own[Counted.REQUESTS] += 1
        try:
            async with self._begin_gate:
                await asyncio.sleep(0)
            messages: list[Message] = [{"type": "http.request", "body": await self._read_body(receive)}]

            async def replay() -> Message:
                return messages.pop() if messages else await receive()

            await self._app(scope, replay, send)
        finally:
            self._counts.own[Counted.REQUESTS] -= 1

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with an error, and close the connection without reading the body."""
        response = error_response(error, scope)
        headers = [*response.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        # A client that is still sending when the connection closes would not see the answer.
        with anyio.move_on_after(_DISCARD_SECONDS), suppress(ClientDisconnect):
            async for _ in _parts(receive, sys.maxsize):
                pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read_body(self, receive: Receive) -> bytes:
        most, seconds = self._settings.max_body_bytes, self._settings.max_read_seconds
        try:
            with anyio.fail_after(seconds):
                body = b"".join([part async for part in _parts(receive, most)])
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {seconds} s (max_read_seconds)") from error
        if len(body) > most:
            raise ApiError(413, f"the body is over max_body_bytes={most}")
        # Count quotes outside of strings, and all brackets.
        if body.count(b'"') - body.count(b'\\"') + body.count(b"[") + body.count(b"{") > _MAX_VALUES:
            raise ApiError(413, f"the body has more than {_MAX_VALUES} quotes and brackets")
        return body


async def _parts(receive: Receive, most: int) -> AsyncIterator[bytes]:
    """Yield the parts of a body until they are over `most` bytes."""
    size, more = 0, True
    while more and size <= most:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part: bytes = message.get("body", b"")
        yield part
        size, more = size + len(part), message.get("more_body", False)


async def give_back_memory() -> None:
    """Return freed memory to the system while the process is larger than before, until cancelled.

    Encoding a text of a few megabytes briefly takes hundreds of megabytes, which glibc would keep almost entirely if
    anything above them is still in use.
    """
    trim = None if os.name == "nt" else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None or not _STATM.exists():
        return
    least, pause = _resident_bytes(), _TRIM_SECONDS
    while True:
        await asyncio.sleep(pause)
        resident = _resident_bytes()
        least = min(least, resident)
        if resident <= least + _MIN_GROWTH_BYTES:
            pause = _TRIM_SECONDS
            continue
        # Takes about 0.1 s, without the interpreter's lock. Memory in use now may be freed later without notice.
        await to_thread.run_sync(trim, 0)
        pause = min(2 * pause, _MAX_TRIM_SECONDS)


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
