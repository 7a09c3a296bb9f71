"""The HTTP application: which handler answers what, and what an error looks like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
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
from starlette.types import ASGIApp

import nanovllm
from nanovllm.serve import anthropic, chat_completions, completions, generate, pooling, responses, tokens
from nanovllm.serve.batches import Batches
from nanovllm.serve.error_forms import error_response
from nanovllm.serve.errors import ApiError, api_error, validation_error
from nanovllm.serve.guard import Guard
from nanovllm.serve.logs import RequestLogs, log_refusal
from nanovllm.serve.memory import give_back_memory
from nanovllm.serve.routers import batches, control, state
from nanovllm.serve.service import Service

_CONTENTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}


def create_app(service: Service) -> ASGIApp:
    """Return the application of a service, whose engine it closes when it is shut down."""

    settings = service.settings
    settings.check_access()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(_beside(give_back_memory()))
                if settings.batch_dir is not None:
                    max_lines = 2 * service.config.max_num_seqs
                    app.state.batches = Batches(service, Path(settings.batch_dir), max_lines)
                    await stack.enter_async_context(_beside(app.state.batches.run()))
                yield
        finally:
            await service.llm.shutdown()

    app = FastAPI(title="nanovllm", version=nanovllm.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_error_handlers(app, service)
    # The first router that matches answers, so the most frequent requests come first.
    modules = [chat_completions, completions, responses, tokens, generate, anthropic, pooling, state]
    routers = [module.router for module in modules]
    routers += [batches.router] if settings.batch_dir is not None else []
    routers += [control.router] if settings.control else []
    for router in routers:
        app.include_router(router)
    app.mount("/page", StaticFiles(directory=state.PAGE))
    routes = (route for router in (app.router, *routers) for route in router.routes if isinstance(route, Route))
    return _protected(app, service, {route.path for route in routes if not route.param_convertors})


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do work inside the `with` block, at whose end it is cancelled."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _protected(app: ASGIApp, service: Service, paths: Collection[str]) -> ASGIApp:
    """Return an application behind what each request passes first; `paths`: of its routes without parameters."""
    settings = service.settings
    # Outside of FastAPI, whose own work on a request is most of what it costs to begin one.
    app = Guard(app, settings, service.metrics.count_error, service.counts)
    app = TrustedHostMiddleware(app, settings.trusted_hosts, www_redirect=False)
    if settings.allowed_origins:
        options: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["X-Request-Id"]}
        app = CORSMiddleware(app, settings.allowed_origins, **options)
    return RequestLogs(app, paths)


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    """Answer every error in OpenAI's form, and count it."""

    def answer(request: Request, error: ApiError) -> Response:
        service.metrics.count_error(error.kind)
        log_refusal(request.scope, error)
        return error_response(error, request.scope)

    async def on_error(request: Request, error: Exception) -> Response:
        found = api_error(error)
        if found.code == "context_length_exceeded":
            path = request.scope["path"].removeprefix(request.scope["root_path"])
            # What programs look for in the texts of Anthropic's API, and of OpenAI's and vLLM's.
            known = f"prompt is too long: this model's maximum context length is {service.limits.max_model_len} tokens"
            found = ApiError(400, f"{known}; {found}", found.param or _CONTENTS.get(path), code=found.code)
        return answer(request, found)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(request, validation_error(error.errors()[0], error.body))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ApiError):
            # Of reading a body, which FastAPI answers with an error of its own.
            return answer(request, error.__cause__)
        if isinstance(error.__cause__, ClientDisconnect):
            return await on_disconnect(request, error)
        return answer(request, ApiError(error.status_code, str(error.detail), headers=error.headers))

    async def on_disconnect(_: Request, error: Exception) -> Response:
        # Nobody reads the answer.
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
