"""Errors in OpenAI's form, and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import Response

from nanovllm.async_llm import QueueFullError
from nanovllm.engine.request_limits import PromptTooLongError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.grammar_compiler import GrammarError

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


_FIELD = re.compile(r"(?:an? [a-z ]*of |one of )?(\w+)")
_CODES = {
    401: "invalid_api_key",
    405: "method_not_allowed",
    408: "timeout",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    500: "internal_error",
    503: "service_unavailable",
}
_FIELDS = {item.name for item in fields(SamplingParams)} | {
    "response_format", "tool_choice", "best_of", "echo", "cache_salt", "priority", "chat_template_kwargs", "dimensions",
    "sampling_params", "prompt", "messages", "chat_template",
}  # fmt: skip


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP's.
        message: what is wrong, for the client's user.
        param: the field at fault.
        headers: further ones of the answer.
        code: what is wrong, for programs; what OpenAI's API has for the status if None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = headers
        self.code = code or _CODES.get(status)

    @property
    def kind(self) -> str:
        """The error's name in the metrics."""
        return _KINDS.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Return the answer's body, in OpenAI's form, which has few types and tells errors apart by their code."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JsonResponse:
        """Return the answer."""
        return JsonResponse(self.body(), self.status, self.headers)


class JsonResponse(Response):
    """JSON in UTF-8."""

    media_type = "application/json"

    def __init__(
        self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None, *, in_pieces: bool = False
    ) -> None:
        super().__init__(_encode_pieces(body) if in_pieces else encode_json(body), status, headers)


_PIECES_DEPTH = 5
"""Where the log-probabilities of one token are in an answer: below choices, a choice, its logprobs and their lists."""


def encode_json(value: Any) -> bytes:
    """Return a value as JSON in UTF-8; in ASCII if it has half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        return to_json(value, inf_nan_mode="null")
    except PydanticSerializationError:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _encode_pieces(value: Any, depth: int = _PIECES_DEPTH) -> bytes:
    """Encode a large value in many calls: the encoder lets no other thread run during one."""
    if depth and isinstance(value, dict):
        items = (encode_json(name) + b":" + _encode_pieces(item, depth - 1) for name, item in value.items())
        return b"{" + b",".join(items) + b"}"
    if depth and isinstance(value, list):
        return b"[" + b",".join(_encode_pieces(item, depth - 1) for item in value) + b"]"
    return encode_json(value)


def api_error(error: Exception) -> ApiError:
    """Return the answer to a request that raised an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), headers={"Retry-After": "1"})
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), code="context_length_exceeded")
    # A grammar may turn out to be too complex as its answer comes.
    if isinstance(error, ValueError) or isinstance(error.__cause__, GrammarError):
        # What we say of a field begins with its name.
        found = _FIELD.match(str(error))
        return ApiError(400, str(error), found[1] if found and found[1] in _FIELDS else None, code="invalid_value")
    # The engine is closed, or a step failed.
    if isinstance(error, RuntimeError):
        return ApiError(503, str(error))
    return ApiError(500, f"{type(error).__name__}: {error}")


def validation_error(first: Mapping[str, Any], body: Any) -> ApiError:
    """Return the answer to a request whose body has no valid form.

    Args:
        first: the first error that pydantic has found.
        body: as it was parsed.
    """
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['msg']}", code="invalid_json")
    place = _place(first["loc"], body, is_missing=first["type"] == "missing")
    if not place and first["type"] != "value_error":
        # FastAPI takes the body for a text if its type is not JSON's.
        message = "the body must be a JSON object, sent as Content-Type: application/json"
        return ApiError(400, message, code="invalid_json")
    is_type = first["type"].endswith(("_type", "_parsing"))
    code = (
        "missing_required_parameter" if first["type"] == "missing" else "invalid_type" if is_type else "invalid_value"
    )
    return ApiError(400, f"{place or 'body'}: {first['msg']}", place or None, code=code)


def _place(loc: Sequence[int | str], body: Any, *, is_missing: bool) -> str:
    """Return where in a body an error is, such as "messages[0].role", without what pydantic calls types."""
    place, parts = "", [part for part in loc if part != "body"]
    for part in parts:
        if isinstance(body, dict) and (part in body or (is_missing and part == parts[-1])):
            place += f".{part}" if place else str(part)
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            place += f"[{part}]"
            body = body[part]
    return place
