"""HTTP connections that a client can neither hold by doing nothing nor fill without end.

uvicorn's protocol has no limit of heads and of connections, takes any number of requests ahead of their answers, and
waits for ever for clients that begin a head or do not read. What follows adds this, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanovllm.serve.errors import ApiError
from nanovllm.serve.server_counts import Counted, ServerCounts
from nanovllm.serve.settings import ServeSettings

_logger = logging.getLogger(__name__)

_MOST_HEAD_BYTES = 128 * 2**10
_MOST_URL_BYTES = 2**16 - 1
"""What the parser of URLs takes."""
_MOST_EARLY_BYTES = 2**16
_CHUNK_BYTES = 32
"""What a chunk of a body may have around its data; extensions and trailers count like a head's bytes."""
_LINGER_SECONDS = 1.0
"""How long a refused client may send on: a connection that is closed on what it sends would lose the answer."""
_MOST_LINGERING = 64
_LEAST_WAIT_SECONDS = 1.0
"""How long a connection can wait for a head without losing its place to a new one."""
_MOST_DESCRIPTORS = 2**17
_OTHER_DESCRIPTORS = 8
"""Descriptors kept free for what is no connection, beside those of the refused connections."""


class ConnectionPool:
    """What all connections of a server share.

    Args:
        settings: the server's.
        count_error: is told "slow_client" for a connection that is cut since nothing can be sent on it, and the kinds
            of what is refused.
        max_connections: more are refused; those that wait for a request longest make room first.
        counts: of the server.

    Attributes:
        waiting: the connections without a request, longest first, and since when, in seconds of the event loop.
    """

    def __init__(
        self,
        settings: ServeSettings,
        count_error: Callable[[str], None],
        max_connections: int,
        counts: ServerCounts | None = None,
    ) -> None:
        self.counts = counts or ServerCounts()
        self.settings = settings
        self.count_error = count_error
        self.max_connections = max_connections
        self.waiting: dict[Connection, float] = {}

    def make_room(self, newest: Connection) -> None:
        """Close a connection if there are too many."""
        excess = self.counts.total(Counted.CONNECTIONS) - self.max_connections
        if excess <= 0:
            return
        # Of this process; the newest waits, too.
        oldest, since = next(iter(self.waiting.items()))
        # Clients without a key could otherwise hold every place, each for as long as a head may take.
        loser = oldest if since < newest.loop.time() - _LEAST_WAIT_SECONDS else newest
        message = f"the server has {self.max_connections} connections already (max_connections)"
        loser.refuse(ApiError(503, message), lingers=excess <= _MOST_LINGERING)


class Connection(HttpToolsProtocol):
    """A connection with one request at a time, and limits of time and size; see `ServeSettings`.

    Args:
        pool: shared by all connections.
        arguments: uvicorn's.
    """

    def __init__(self, pool: ConnectionPool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._pool = pool
        self._settings = pool.settings
        # Of what is not the body of the request that is being read.
        self._num_bytes = 0
        self._early = b""
        # Nothing that comes is looked at any more. Not reading it would hide that the client has gone.
        self._ignores_input = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._request_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for a request."""
        super().connection_made(transport)
        self._pool.counts.add(Counted.CONNECTIONS, 1)
        self._await_head()
        self._pool.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._pool.counts.add(Counted.CONNECTIONS, -1)
        self._pool.waiting.pop(self, None)
        for timer in (self._head_timer, self._write_timer, self._request_timer):
            _cancel(timer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what was sent, unless it comes before an answer or is no HTTP."""
        if self._ignores_input:
            return
        if self._answer_is_sent():
            # The client may send the next request before the application ends the answer.
            self._early += data
            self._ignores_input = len(self._early) > _MOST_EARLY_BYTES
            self.cycle.keep_alive &= not self._ignores_input
            return
        self._unset_keepalive_if_required()
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        self._num_bytes += len(data)
        try:
            self.parser.feed_data(data)
            self._check_head(self._num_bytes)
        except httptools.HttpParserUpgrade:
            # The answer is HTTP's: there is no other protocol here.
            pass
        except httptools.HttpParserError as error:
            cause = error.__context__
            self.refuse(cause if isinstance(cause, ApiError) else ApiError(400, "what was sent is not HTTP/1.1"))
        except ApiError as error:
            self.refuse(error)

    def _answer_is_sent(self) -> bool:
        """Whether the client has a whole answer that the application has not ended yet."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started or cycle.more_body:
            return False
        return not cycle.chunked_encoding and cycle.expected_content_length == 0

    def on_message_begin(self) -> None:
        """Begin a request."""
        if self.cycle is not None and not self.cycle.response_complete:
            # This ends the parser's work, and the request before it gets its answer.
            raise ApiError(400, "a request came before the answer to the one before it")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        super().on_url(url)
        if len(self.url) > _MOST_URL_BYTES:
            raise ApiError(414, f"the request's URL is over {_MOST_URL_BYTES} bytes")

    def on_headers_complete(self) -> None:
        """Hand a request on."""
        if sum(name == b"host" for name, _ in self.headers) > 1:
            # Each on the way could look at another one.
            raise ApiError(400, "the request has more than one Host header")
        # With what stands between a name and a value, and at the end of the line.
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
        """Take a part of a body."""
        self._num_bytes -= len(body)
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """Count out what stands around the data of a chunk."""
        self._num_bytes -= _CHUNK_BYTES

    def on_message_complete(self) -> None:
        """End a body."""
        self._num_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, once the answer is sent."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_writing()
        else:
            _cancel(self._request_timer)
        if not self.transport.is_closing():
            self._pool.waiting[self] = self.loop.time()
            early, self._early = self._early, b""
            if early:
                self.loop.call_soon(self.data_received, early)

    def pause_writing(self) -> None:
        """Watch that the client reads."""
        self._watch_writing()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Go on: the client has read nearly all."""
        _cancel(self._write_timer)
        super().resume_writing()

    def refuse(self, error: ApiError, *, lingers: bool = True) -> None:
        """Answer what is no request with an error, and close the connection.

        An answer that is under way goes on, and is the last one.

        Args:
            error: the answer.
            lingers: whether the client gets time to read it.
        """
        self._ignores_input = True
        self._pool.waiting.pop(self, None)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body:
                cycle.keep_alive = False
                return
            # Its body will not be complete.
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
        if num_bytes > _MOST_HEAD_BYTES:
            raise ApiError(431, f"the request's head is over {_MOST_HEAD_BYTES} bytes")

    def _watch_writing(self) -> None:
        _cancel(self._write_timer)
        unsent = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self._settings.max_write_seconds, self._end_unless_written, unsent)

    def _end_unless_written(self, num_unsent: int) -> None:
        # Writing goes on only when nearly all is sent, which takes a large answer long.
        if self.transport.get_write_buffer_size() >= num_unsent:
            self._end_slow_client()
        elif self.transport.get_write_buffer_size():
            self._watch_writing()

    def _end_late_request(self) -> None:
        # The answer has ended by itself before, but a client that reads little at a time may not have got it.
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
    """Return a whole answer as it is sent."""
    body = error.response().body
    phrase = HTTPStatus(error.status).phrase
    head = f"HTTP/1.1 {error.status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return (head + "Connection: close\r\n\r\n").encode() + bytes(body)


def raise_descriptor_limit(max_connections: int) -> int:
    """Raise the process's limit of open files as far as it may, and return how many connections it leaves room for.

    Args:
        max_connections: as many at most.

    Raises:
        ValueError: there is room for none.
    """
    if sys.platform == "win32":
        return max_connections
    import resource  # noqa: PLC0415

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    num_open = len(os.listdir("/dev/fd"))
    free = (sys.maxsize if soft == resource.RLIM_INFINITY else soft) - num_open - _MOST_LINGERING - _OTHER_DESCRIPTORS
    # Each may be reading a file of the page.
    if free < 2:
        raise ValueError(f"{soft} open files are too few for a server, which has {num_open} already: see `ulimit -n`")
    return min(max_connections, free // 2)
