"""The HTTP application: routes, middlewares and error handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

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
from nanovllm.serve import (
    anthropic,
    chat_completions,
    completions,
    control,
    generate,
    pooling,
    responses,
    state,
    tokens,
)
from nanovllm.serve.errors import ApiError, api_error, error_response, validation_error
from nanovllm.serve.limits import Guard, give_back_memory
from nanovllm.serve.logs import RequestLogs, log_refusal
from nanovllm.serve.service import Service

_CONTENTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}


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
    modules = [chat_completions, completions, responses, tokens, generate, anthropic, pooling, state]
    routers = [module.router for module in modules]
    routers += [control.router] if settings.control else []
    for router in routers:
        app.include_router(router)
    app.mount("/page", StaticFiles(directory=state.PAGE))
    routes = (route for router in (app.router, *routers) for route in router.routes if isinstance(route, Route))
    return _protected(app, service, {route.path for route in routes if not route.param_convertors})


def _protected(app: ASGIApp, service: Service, paths: Collection[str]) -> ASGIApp:
    """Wrap an application in its middlewares; `paths`: its routes without parameters."""
    settings = service.settings
    # Outside of FastAPI, which dominates the cost of starting a request.
    app = Guard(app, settings, service.metrics.count_error, service.counts)
    app = TrustedHostMiddleware(app, settings.trusted_hosts, www_redirect=False)
    if settings.allowed_origins:
        options: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["X-Request-Id"]}
        app = CORSMiddleware(app, settings.allowed_origins, **options)
    return RequestLogs(app, paths)


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    """Add handlers that answer errors in OpenAI's or Anthropic's form and count them."""

    def answer(request: Request, error: ApiError) -> Response:
        service.metrics.count_error(error.kind)
        log_refusal(request.scope, error)
        return error_response(error, request.scope)

    async def on_error(request: Request, error: Exception) -> Response:
        found = api_error(error)
        is_too_long = found.code == "context_length_exceeded"
        return answer(request, _context_error(found, request.scope, service) if is_too_long else found)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(request, validation_error(error.errors()[0], error.body))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ApiError):
            # Raised while reading the body, which FastAPI wraps in an error of its own.
            return answer(request, error.__cause__)
        if isinstance(error.__cause__, ClientDisconnect):
            return await on_disconnect(request, error)
        return answer(request, ApiError(error.status_code, str(error.detail), headers=error.headers))

    async def on_disconnect(_: Request, error: Exception) -> Response:
        # The client is gone and does not read the answer.
        service.metrics.count_error("client_disconnect")
        return Response(status_code=499)

    handlers: dict[type[Exception], Callable[..., Any]] = {
        RequestValidationError: on_validation,
        HTTPException: on_http,
        ClientDisconnect: on_disconnect,
        ApiError: on_error,
        ValueError: on_error,
        RuntimeError: on_error,
        Exception: on_error,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _context_error(error: ApiError, scope: Scope, service: Service) -> ApiError:
    """Return the error of an overlong prompt with the phrases of Anthropic, OpenAI and vLLM that clients search for."""
    path = scope["path"].removeprefix(scope["root_path"])
    known = f"prompt is too long: this model's maximum context length is {service.limits.max_model_len} tokens"
    return ApiError(400, f"{known}; {error}", error.param or _CONTENTS.get(path), code=error.code)
