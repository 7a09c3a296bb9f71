"""The HTTP application: which handler answers what, and what an error looks like."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from nanovllm.serve.chat import answer_chat
from nanovllm.serve.completions import answer_completion
from nanovllm.serve.errors import ApiError, JsonResponse, api_error
from nanovllm.serve.event_stream import until_disconnect
from nanovllm.serve.guard import Guard
from nanovllm.serve.logs import RequestIds, log_refusal
from nanovllm.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, ResponseBody, TokenizeBody
from nanovllm.serve.responses import answer_response
from nanovllm.serve.service import Service
from nanovllm.serve.tokens import detokenize, tokenize


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: int | str | None


class ErrorBody(BaseModel):
    """An answer that is an error."""

    error: ErrorDetail


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in (
        (400, "a value is out of range, or the body is not JSON"),
        (401, "the API key is missing or wrong"),
        (404, "there is no such model"),
        (408, "the request took too long"),
        (413, "the body is too large"),
        (422, "the body has an unknown field, or a value of another type"),
        (429, "there are too many requests"),
        (503, "the engine has failed or is shutting down"),
    )
}


def create_app(service: Service) -> ASGIApp:
    """Return the application of a service, whose engine it closes when it is shut down."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.llm.shutdown()

    app = FastAPI(title="nanovllm", lifespan=lifespan, redoc_url=None)
    app.router.route_class = _Route
    _add_error_handlers(app, service)
    _add_api(app, service)
    _add_state(app, service)
    return _protected(app, service)


class _Route(APIRoute):
    """A route whose requests do not keep their body, which they cache, until the end of a streamed answer."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_copy(request: Request) -> Response:
            return await handle(Request(request.scope, request.receive))

        return handle_copy


def _protected(app: ASGIApp, service: Service) -> ASGIApp:
    """Return an application behind what each request passes first."""
    settings = service.settings
    # Outside of FastAPI, whose own work on a request is most of what it costs to begin one.
    app = Guard(app, settings, service.metrics.count_error)
    app = TrustedHostMiddleware(app, settings.trusted_hosts, www_redirect=False)
    if settings.allowed_origins:
        options: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["X-Request-Id"]}
        app = CORSMiddleware(app, settings.allowed_origins, **options)
    return RequestIds(app)


def _answers(name: str) -> dict[int | str, dict[str, Any]]:
    """Return what an endpoint that can stream may answer: a type of the package openai, whose clients read it.

    Without that package, which only describes the answers, the API's description says that they are objects.
    """
    module, _, kind = f"openai.types.{name}".rpartition(".")
    model = getattr(import_module(module), kind) if find_spec("openai") else dict[str, Any]
    return {200: {"model": model, "content": {"text/event-stream": {}}}, **_ERRORS}


def _add_api(app: FastAPI, service: Service) -> None:
    """Add OpenAI's endpoints."""
    seconds = service.settings.max_request_seconds

    async def within_limits(request: Request, answer: Awaitable[Response]) -> Response:
        """Return an answer, or the head of a stream, unless the client goes away or it takes too long."""
        return await until_disconnect(request, answer, seconds)

    @app.post("/v1/chat/completions", response_model=None, responses=_answers("chat.ChatCompletion"))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer messages."""
        return await within_limits(request, answer_chat(service, body))

    @app.post("/v1/completions", response_model=None, responses=_answers("Completion"))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Complete prompts."""
        return await within_limits(request, answer_completion(service, body))

    @app.post("/v1/responses", response_model=None, responses=_answers("responses.Response"))
    async def responses(body: ResponseBody, request: Request) -> Response:
        """Answer an input in text."""
        return await within_limits(request, answer_response(service, body))

    @app.post("/tokenize", response_model=None, responses=_ERRORS)
    async def tokenize_text(body: TokenizeBody, request: Request) -> Response:
        """Return the token ids of a text or of messages."""
        return JsonResponse(await until_disconnect(request, tokenize(service, body), seconds))

    @app.post("/detokenize", response_model=None, responses=_ERRORS)
    async def detokenize_tokens(body: DetokenizeBody) -> Response:
        """Return the text of token ids."""
        return JsonResponse(await detokenize(service, body))

    model = {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "nanovllm",
        "max_model_len": service.llm.llm.llm_engine.limits.max_model_len,
    }

    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def models() -> dict[str, Any]:
        """List the model."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def model_named(name: str) -> dict[str, Any]:
        """Describe the model."""
        service.check_model(name)
        return model


def _add_state(app: FastAPI, service: Service) -> None:
    """Add what says how the server is: health, metrics, and the page."""

    @app.get("/health", responses={503: _ERRORS[503]})
    async def health() -> dict[str, str]:
        """Say whether requests are answered."""
        if not service.llm.is_running:
            raise ApiError(503, "the engine is closed")
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response, responses={401: _ERRORS[401]})
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text form."""
        text, media_type = service.metrics.render()
        return Response(text, media_type=media_type)

    @app.get("/stats", responses={401: _ERRORS[401]})
    async def stats() -> dict[str, Any]:
        """Return the engine's state."""
        return service.state()

    html = (_PAGE / "index.html").read_bytes()

    @app.get("/", response_class=Response)
    async def index() -> Response:
        """Return a page to chat with the model and to see the engine's state."""
        return Response(html, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    app.mount("/page", StaticFiles(directory=_PAGE))


_PAGE = Path(__file__).parent / "page"
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    """Answer every error in OpenAI's form, and count it."""

    def answer(request: Request, error: ApiError) -> Response:
        service.metrics.count_error(error.kind)
        log_refusal(request.scope, error)
        return error.response()

    async def on_error(request: Request, error: Exception) -> Response:
        return answer(request, api_error(error))

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        is_json = first["type"] != "json_invalid"
        if is_json and not place and first["type"] != "value_error":
            # FastAPI takes the body for a text if its type is not JSON's.
            return answer(
                request, ApiError(422, "the body must be a JSON object, sent as Content-Type: application/json")
            )
        message = f"{place or 'body'}: {first['msg']}" if is_json else f"the body is not JSON: {first['msg']}"
        return answer(request, ApiError(422 if is_json else 400, message, place if is_json else None))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
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
