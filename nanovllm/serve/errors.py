"""Errors in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from nanovllm.async_llm import QueueFullError
from nanovllm.text.structured_output import GrammarError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP's.
        message: what is wrong, for the client's user.
        param: the field at fault.
        headers: further ones of the answer.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = headers

    @property
    def kind(self) -> str:
        """The error's type in the API, and its name in the metrics."""
        return _TYPES.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Return the answer's body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}

    def response(self) -> JsonResponse:
        """Return the answer."""
        return JsonResponse(self.body(), self.status, self.headers)


class JsonResponse(Response):
    """JSON in ASCII alone, since a client's text may hold characters that UTF-8 cannot encode."""

    media_type = "application/json"

    def __init__(
        self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None, *, in_pieces: bool = False
    ) -> None:
        super().__init__(_encode_pieces(body) if in_pieces else encode_json(body), status, headers)


encode_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_PIECES_DEPTH = 5
"""Where the log-probabilities of one token are in an answer: below choices, a choice, its logprobs and their lists."""


def _encode_pieces(value: Any, depth: int = _PIECES_DEPTH) -> str:
    """Encode a large value in many calls: the encoder lets no other thread run during one."""
    if depth and isinstance(value, dict):
        items = (f"{encode_json(name)}:{_encode_pieces(item, depth - 1)}" for name, item in value.items())
        return "{" + ",".join(items) + "}"
    if depth and isinstance(value, list):
        return "[" + ",".join(_encode_pieces(item, depth - 1) for item in value) + "]"
    return encode_json(value)


def api_error(error: Exception) -> ApiError:
    """Return the answer to a request that raised an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), headers={"Retry-After": "1"})
    # A grammar may turn out to be too complex as its answer comes.
    if isinstance(error, ValueError) or isinstance(error.__cause__, GrammarError):
        return ApiError(400, str(error))
    # The engine is closed, or a step failed.
    if isinstance(error, RuntimeError):
        return ApiError(503, str(error))
    return ApiError(500, f"{type(error).__name__}: {error}")
