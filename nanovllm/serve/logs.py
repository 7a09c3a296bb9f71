"""Configures the server's logs: one line on stderr per event, with the request's id.

Requests may be confidential, so logs contain nothing that a client sent except its `X-Request-Id`. An error's message
is only in the answer, and the log has its kind and field; a path is logged as its route.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Collection
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from nanovllm.serve.errors import ApiError

_logger = logging.getLogger(__name__)
_VALID_ID = re.compile(rb"[!-~]{1,128}")
_MOST_CHARACTERS = 500


_current: ContextVar[Scope | None] = ContextVar("request", default=None)


def _known_path(scope: Scope) -> str:
    """Return the path if it is one of the API's, else the route's: clients can send anything."""
    path: str = scope["path"].removeprefix(scope["root_path"])
    return path if path in scope.get("known_paths", ()) else getattr(scope.get("route"), "path", "-")


def _add_request_id(record: logging.LogRecord) -> bool:
    record.request_id = (_current.get() or {}).get("request_id", "-")
    return True


def _replace_path(record: logging.LogRecord) -> bool:
    """Replace path and query in uvicorn's access log."""
    scope = _current.get()
    if scope is not None and isinstance(record.args, tuple):
        client, method, _, *others = record.args
        record.args = client, method, _known_path(scope), *others
    return True


def log_config(access_log: bool, log_requests: bool = False) -> dict[str, Any]:
    """Return the argument of `logging.config.dictConfig`; `log_requests`: log names of unknown fields."""
    own = {"handlers": ["stderr"], "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"request_id": {"()": lambda: _add_request_id}, "path": {"()": lambda: _replace_path}},
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["request_id"]}},
        "loggers": {
            "nanovllm": {**own, "level": "INFO"},
            "nanovllm.serve.protocol": {"level": "INFO" if log_requests else "WARNING"},
            "uvicorn": {**own, "level": "WARNING"},
            "uvicorn.access": {"level": "INFO" if access_log else "WARNING", "filters": ["path"]},
        },
    }


def log_refusal(scope: Scope, error: ApiError) -> None:
    """Log that a request gets an error, without its message and subfields, which may quote the client."""
    level = logging.ERROR if error.status >= 500 else logging.WARNING
    field, what = re.match(r"\w*", error.param or ""), error.code or error.kind
    what += f" ({field[0]})" if field and field[0] else ""
    path, client = _known_path(scope), scope.get("client")
    _logger.log(level, "%s %s from %s: %d %s", scope["method"], path, client, error.status, what)


def one_line(text: str) -> str:
    """Return the beginning of a possibly client-supplied text, without characters that could forge or hide lines."""
    return text[:_MOST_CHARACTERS].encode("unicode_escape").decode()


class RequestLogs:
    """ASGI middleware that sets the current request for the logs, and its id, which answers get as a header.

    The id is the client's `X-Request-Id` if valid. `paths`: the API's paths without parameters.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app, self._paths = app, paths

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

        scope.update(request_id=request_id.decode(), known_paths=self._paths)
        token = _current.set(scope)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            # The client got its answer, and uvicorn would log the error's message.
            _logger.error("a fault of the server:\n%s", _where(error))
        finally:
            _current.reset(token)


def _where(error: BaseException) -> str:
    """Return the tracebacks of an error and its causes, without their messages."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    own = "".join([*traceback.format_tb(error.__traceback__), type(error).__qualname__])
    return own if before is None else f"{_where(before)}, and then\n{own}"
