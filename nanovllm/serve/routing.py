"""What the routers share: the service, limits of time, and how the API's description names answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from nanovllm.serve.event_stream import until_disconnect
from nanovllm.serve.service import Service

Result = TypeVar("Result")


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: int | str | None


class ErrorBody(BaseModel):
    """An answer that is an error."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
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


class _Route(APIRoute):
    """A route whose requests do not keep their body, which they cache, until the end of a streamed answer."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_copy(request: Request) -> Response:
            return await handle(Request(request.scope, request.receive))

        return handle_copy


def make_router() -> APIRouter:
    """Return a router for requests to the engine."""
    return APIRouter(route_class=_Route)


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]


async def within_limits(request: Request, service: Service, answer: Awaitable[Result]) -> Result:
    """Return an answer, or the head of a stream, unless the client goes away or it takes too long."""
    return await until_disconnect(request, answer, service.settings.max_request_seconds)


def answers(name: str) -> dict[int | str, dict[str, Any]]:
    """Return what an endpoint that can stream may answer: a type of the package openai, whose clients read it.

    Without that package, which only describes the answers, the API's description says that they are objects.
    """
    module, _, kind = f"openai.types.{name}".rpartition(".")
    model = getattr(import_module(module), kind) if find_spec("openai") else dict[str, Any]
    return {200: {"model": model, "content": {"text/event-stream": {}}}, **ERRORS}
