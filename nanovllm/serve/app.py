"""The HTTP application, and the uvicorn server that runs it and shuts down within the grace period."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

import nanovllm
from nanovllm.client.async_llm import AsyncLLM
from nanovllm.client.model_client import ModelClient
from nanovllm.serve import anthropic, chat_completions, completions, pooling, responses, state, tokens
from nanovllm.serve.errors import ApiError, api_error, error_response, validation_error
from nanovllm.serve.limits import Connection, ConnectionPool, Guard, give_back_memory
from nanovllm.serve.logs import RequestLogs, log_refusal
from nanovllm.serve.protocol import MOST_PROMPTS
from nanovllm.serve.service import Service
from nanovllm.serve.settings import ServeSettings, SharedServer

_logger = logging.getLogger(__name__)
_SWITCH_SECONDS = 0.0005
"""Interpreter switch interval: time that a thread may run while another one waits.

The engine's thread waits for the device several times in each step. With Python's default of 5 ms it could lose that
time to answering threads at each wait.
"""
_ABORT_SHARE, _CUT_SHARE = 0.8, 0.95
"""Shares of the grace period after which requests are aborted, and connections with unread answers are closed."""
_UVICORN_SETTINGS = (
    "host", "port", "uds", "root_path", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "access_log",
)  # fmt: skip


def create_app(service: Service) -> ASGIApp:
    """Return a service's application, which closes the engine on shutdown."""
    settings = service.settings
    settings.check_access()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        trimming = asyncio.create_task(give_back_memory())
        try:
            yield
        finally:
            trimming.cancel()
            await service.llm.shutdown()

    app = FastAPI(title="nanovllm", version=nanovllm.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_error_handlers(app, service)
    # Routers are tried in order, so the most frequent requests come first.
    modules = [chat_completions, completions, responses, tokens, anthropic, pooling, state]
    routers = [module.router for module in modules] + ([state.control] if settings.control else [])
    for router in routers:
        app.include_router(router)
    app.mount("/page", StaticFiles(directory=state.PAGE))
    routes = (route for router in (app.router, *routers) for route in router.routes if isinstance(route, Route))
    paths = {route.path for route in routes if not route.param_convertors}
    # Middlewares are outside of FastAPI, which dominates the cost of starting a request.
    guarded: ASGIApp = Guard(app, settings, service.metrics.count_error, service.counts)
    guarded = TrustedHostMiddleware(guarded, settings.trusted_hosts, www_redirect=False)
    if settings.allowed_origins:
        options: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["X-Request-Id"]}
        guarded = CORSMiddleware(guarded, settings.allowed_origins, **options)
    return RequestLogs(guarded, paths)


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    """Add handlers that answer errors in OpenAI's or Anthropic's form and count them."""

    async def handle(request: Request, error: Exception) -> Response:
        # FastAPI wraps errors of reading the body in one of its own.
        cause = error.__cause__ if isinstance(error, HTTPException) else None
        if isinstance(error, ClientDisconnect) or isinstance(cause, ClientDisconnect):
            # The client is gone and does not read the answer.
            service.metrics.count_error("client_disconnect")
            return Response(status_code=499)
        found = cause if isinstance(cause, ApiError) else _answered(error, request.scope, service)
        service.metrics.count_error(found.kind)
        log_refusal(request.scope, found)
        return error_response(found, request.scope)

    expected = RequestValidationError, HTTPException, ClientDisconnect, ApiError, ValueError, OverflowError
    for kind in (*expected, RuntimeError, Exception):
        app.add_exception_handler(kind, handle)


def _answered(error: Exception, scope: Scope, service: Service) -> ApiError:
    if isinstance(error, RequestValidationError):
        return validation_error(error.errors(), error.body)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    found = api_error(error, scope)
    if found.code != "context_length_exceeded":
        return found
    # Phrases of Anthropic, OpenAI and vLLM that clients search for.
    known = f"prompt is too long: this model's maximum context length is {service.limits.max_model_len} tokens"
    return ApiError(400, f"{known}; {found}", found.param, code=found.code)


def run_server(
    llm: ModelClient, settings: ServeSettings, max_connections: int,
    shared: SharedServer | None = None, on_ready: Callable[[], None] | None = None,
) -> int:  # fmt: skip
    """Serve until SIGINT or SIGTERM, or until the engine fails if settings say so; return the exit code.

    `on_ready` is called once the server answers, instead of printing its address.
    """
    # At least the largest allowed request; texts to compare are two lists.
    most_pending = settings.max_requests * max(settings.max_outputs, 2 * MOST_PROMPTS)
    llm.input_processor.constraints.grammars.bound(compiles_here=llm.engine_client.engine.is_in_process)
    async_llm = AsyncLLM.over(llm, max_pending_requests=most_pending)
    service = Service(async_llm, settings, shared)
    app = create_app(service)
    pool = ConnectionPool(settings, service.metrics.count_error, max_connections, service.counts)
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Loaded objects stay alive: collecting garbage among them would block the event loop.
    gc.collect()
    gc.freeze()
    server = _Server(_uvicorn_config(app, settings, pool), service, on_ready)
    server.run(None if shared is None else [socket.socket(fileno=shared.listener)])
    return server.exit_code


def _uvicorn_config(app: ASGIApp, settings: ServeSettings, pool: ConnectionPool) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        **{name: getattr(settings, name) for name in _UVICORN_SETTINGS},
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
        log_config=None,
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

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._service, self._on_ready = service, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self.exit_code = 0

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()
            return
        scheme = "https" if self.config.is_ssl else "http"
        for name in (listening.getsockname() for server in self.servers for listening in server.sockets):
            place = f"{scheme}://{name[0]}:{name[1]}" if isinstance(name, tuple) else f"unix:{name}"
            print(f"nanovllm serve: {self._service.model} at {place}", flush=True)
            _logger.info("serving %s at %s", self._service.model, place)

    async def on_tick(self, counter: int) -> bool:
        if self._service.settings.exit_when_engine_fails and self._service.llm.errored:
            _logger.error("ending, since the engine is lost")
            self.exit_code = 1
            return True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif self._loop is not None:
            # uvicorn would cancel answers half-way.
            self._loop.call_soon_threadsafe(self._end_requests)

    async def shutdown(self, sockets: Any = None) -> None:
        grace, num_pending = self._service.settings.grace_seconds, self._service.llm.num_pending_requests
        _logger.info("ending within %g s, or at a second signal; requests running: %d", grace, num_pending)
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(grace * _ABORT_SHARE, self._end_requests)
        await super().shutdown(sockets)
        _logger.info("ended")

    def _end_requests(self) -> None:
        """End all requests with their tokens so far, and soon cut connections whose clients do not read them."""
        self._service.llm.abort_all()
        seconds = self._service.settings.grace_seconds * (_CUT_SHARE - _ABORT_SHARE)
        asyncio.get_running_loop().call_later(seconds, self._cut_connections)

    def _cut_connections(self) -> None:
        left = list(self.server_state.connections)
        if left:
            _logger.warning("cutting %d connections, which have not ended", len(left))
        for connection in left:
            connection.transport.abort()
