"""The server's logs: one line of stderr for each event, with the id of the request that it belongs to."""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from nanovllm.serve.errors import ApiError

_logger = logging.getLogger(__name__)
_request_id: ContextVar[str] = ContextVar("request_id", default="-")
_VALID_ID = re.compile(rb"[!-~]{1,128}")
_MOST_CHARACTERS = 500


class _RequestIdFilter(logging.Filter):
    """Adds the id of the current request to each record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = _request_id.get()
        return True


def log_config(access_log: bool) -> dict[str, Any]:
    """Return what `logging.config.dictConfig` takes; `access_log`: whether each request gets a line of uvicorn's."""
    own = {"handlers": ["stderr"], "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"request_id": {"()": _RequestIdFilter}},
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["request_id"]}},
        "loggers": {
            "nanovllm": {**own, "level": "INFO"},
            "uvicorn": {**own, "level": "WARNING"},
            "uvicorn.access": {"level": "INFO" if access_log else "WARNING"},
        },
    }


def log_refusal(scope: Scope, error: ApiError) -> None:
    """Log that a request is answered with an error."""
    level = logging.ERROR if error.status >= 500 else logging.WARNING
    method, path = scope["method"], one_line(scope["path"])
    _logger.log(level, "%s %s from %s: %d %s", method, path, scope.get("client"), error.status, one_line(str(error)))


def one_line(text: str) -> str:
    """Return the beginning of a text that may come from a client, without characters that forge or hide lines."""
    return text[:_MOST_CHARACTERS].encode("unicode_escape").decode()


class RequestIds:
    """An ASGI middleware that gives each request an id, the client's `X-Request-Id` if it has a valid one.

    Args:
        app: gets the requests; its answers get the id as a header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if _VALID_ID.fullmatch(given) else uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
            await send(message)

        token = _request_id.set(request_id.decode())
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            _request_id.reset(token)
