"""Runs uvicorn: listens, prints the address, and shuts down within the grace period."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from nanovllm.client.async_llm import AsyncLLM
from nanovllm.client.model_client import ModelClient
from nanovllm.serve.app import create_app
from nanovllm.serve.limits import Connection, ConnectionPool
from nanovllm.serve.protocol import MOST_PROMPTS
from nanovllm.serve.server_counts import Counted, ServerCounts
from nanovllm.serve.service import Service
from nanovllm.serve.settings import ServeSettings

_SWITCH_SECONDS = 0.0005
"""Interpreter switch interval: time that a thread may run while another one waits.

The engine's thread waits for the device several times in each step. With Python's default of 5 ms it could lose that
time to answering threads at each wait.
"""
_ABORT_SHARE, _CUT_SHARE = 0.8, 0.95
"""Shares of the grace period after which requests are aborted, and connections with unread answers are closed."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerPlace:
    """A front end's state that is shared with the server's other front ends.

    Attributes:
        listener: the listening socket.
        counts: counts of the whole server, for its limits.
        metrics_folder: folder of the counters of all front ends.
        created: start time of the server, in seconds since 1970.
        on_ready: called once the front end is ready.
    """

    listener: socket.socket
    counts: ServerCounts
    metrics_folder: str
    created: int
    on_ready: Callable[[], None]


def run_server(
    llm: ModelClient, settings: ServeSettings, max_connections: int, place: ServerPlace | None = None
) -> int:
    """Serve until SIGINT or SIGTERM, or until the engine fails if settings say so; return the exit code.

    place: shared state of several front ends; None if this process is the only one.
    """
    # At least the largest allowed request; texts to compare are two lists.
    most_pending = settings.max_requests * max(settings.max_outputs, 2 * MOST_PROMPTS)
    llm.input_processor.constraints.grammars.bound(compiles_here=llm.engine_client.engine.is_in_process)
    async_llm = AsyncLLM.over(llm, max_pending_requests=most_pending)
    if place is None:
        service = Service(async_llm, settings)
    else:
        service = Service(async_llm, settings, place.counts, place.metrics_folder, place.created)
    app = create_app(service)
    pool = ConnectionPool(settings, service.metrics.count_error, max_connections, service.counts)
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Loaded objects stay alive: collecting garbage among them would block the event loop.
    gc.collect()
    gc.freeze()
    server = _Server(_uvicorn_config(app, settings, pool), service, place)
    server.run(None if place is None else [place.listener])
    return server.exit_code


def _uvicorn_config(app: ASGIApp, settings: ServeSettings, pool: ConnectionPool) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        uds=settings.uds,
        root_path=settings.root_path,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
        log_config=None,
        access_log=settings.access_log,
        proxy_headers=False,
        # uvicorn calls it with arguments, like a class.
        http=cast("type[asyncio.Protocol]", partial(Connection, pool)),
        ws="none",
        timeout_graceful_shutdown=math.ceil(settings.grace_seconds) + 1,
        # Clients keep connections for longer than uvicorn's 5 s, and fail when one closes while they send.
        timeout_keep_alive=75,
        lifespan="on",
    )


class _Server(uvicorn.Server):
    """A uvicorn server that prints its address and honours the grace period and `exit_when_engine_fails`."""

    def __init__(self, config: uvicorn.Config, service: Service, place: ServerPlace | None) -> None:
        super().__init__(config)
        self._service = service
        self._place = place
        self.exit_code = 0

    async def startup(self, sockets: Any = None) -> None:
        await _warm_up(self.config.app, self._service.settings)
        await super().startup(sockets)
        if self._place is not None:
            # The supervisor prints the address.
            self._place.on_ready()
            return
        scheme = "https" if self.config.is_ssl else "http"
        for name in (listening.getsockname() for server in self.servers for listening in server.sockets):
            place = f"{scheme}://{name[0]}:{name[1]}" if isinstance(name, tuple) else f"unix:{name}"
            print(f"nanovllm serve: {self._service.model} at {place}", flush=True)
            _logger.info("serving %s at %s", self._service.model, place)

    async def on_tick(self, counter: int) -> bool:
        self._service.counts.set(Counted.PENDING, self._service.llm.num_pending_requests)
        if self._service.settings.exit_when_engine_fails and self._service.llm.errored:
            _logger.error("ending, since the engine is lost")
            self.exit_code = 1
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        llm, grace = self._service.llm, self._service.settings.grace_seconds
        _logger.info("ending within %g s; %d requests are running", grace, llm.num_pending_requests)
        loop = asyncio.get_running_loop()
        loop.call_later(grace * _ABORT_SHARE, llm.abort_all)
        loop.call_later(grace * _CUT_SHARE, self._cut_connections)
        await super().shutdown(sockets)
        _logger.info("ended")

    def _cut_connections(self) -> None:
        left = list(self.server_state.connections)
        if left:
            _logger.warning("cutting %d connections, which have not ended", len(left))
        for connection in left:
            connection.transport.abort()


async def _warm_up(app: Any, settings: ServeSettings) -> None:
    """Answer a dummy request, since the first one imports modules and builds tables, for about 20 ms.

    Args:
        app: the ASGI application.
        settings: the server's settings.
    """
    host = settings.trusted_hosts[0].replace("*", "a")
    headers = [(b"content-type", b"application/json"), (b"host", host.encode())]
    headers.append((b"authorization", f"Bearer {settings.api_key[0] if settings.api_key else ''}".encode()))
    path = "/detokenize"
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
    }
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"tokens": []}', "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    if statuses != [200]:
        raise RuntimeError(f"the server answered its own request with {statuses}")
