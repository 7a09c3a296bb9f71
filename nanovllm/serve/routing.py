"""Shared parts of the routers: the service, the time limit, and the error schemas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from nanovllm.serve.errors import parse_json
from nanovllm.serve.event_stream import until_disconnect
from nanovllm.serve.service import Service

Result = TypeVar("Result")


class ErrorDetail(BaseModel):
    """An error's message, type, field and code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error answer."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in (
        (400, "a field is missing, or has a wrong value"),
        (401, "the API key is missing or wrong"),
        (404, "there is no such model"),
        (408, "the request took too long"),
        (413, "the body is too large"),
        (429, "there are too many requests"),
        (503, "the engine has failed or is shutting down"),
    )
}
# Otherwise FastAPI would document its own errors of status 422.
ERRORS["4XX"] = {"model": ErrorBody, "description": "another fault of the request"}


class _Request(Request):
    """A request whose body is parsed by `parse_json`."""

    async def json(self) -> Any:
        """Return the body's value."""
        return parse_json(await self.body())


class _Route(APIRoute):
    """A route whose requests drop their cached body before a streamed answer ends."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_copy(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return handle_copy


def make_router(**options: Any) -> APIRouter:
    """Return a router for requests with a body; `options`: options of `APIRouter`."""
    return APIRouter(route_class=_Route, **options)


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]


async def within_limits(request: Request, service: Service, answer: Awaitable[Result]) -> Result:
    """Return an answer, or the start of a stream, unless the client disconnects or a time limit passes."""
    return await until_disconnect(request.receive, answer, service.settings.max_request_seconds)


def answers(model: Any) -> dict[int | str, dict[str, Any]]:
    """Return the possible answers of a streaming endpoint: events, or `model`."""
    return {200: {"model": model, "content": {"text/event-stream": {}}}, **ERRORS}
