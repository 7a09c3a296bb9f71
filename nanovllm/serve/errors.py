"""Formats errors as OpenAI or Anthropic, by request path; parses and encodes JSON."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, from_json, to_json
from starlette.responses import Response
from starlette.types import Scope

from nanovllm.client.async_llm import QueueFullError
from nanovllm.engine.request import PromptTooLongError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.grammar_trials import GrammarError

# OpenAI's codes and our names in the metrics, by status.
_CODES = {
    401: "invalid_api_key", 405: "method_not_allowed", 408: "timeout", 413: "request_too_large",
    429: "rate_limit_exceeded", 500: "internal_error", 503: "service_unavailable",
}  # fmt: skip
_KINDS = {
    401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large",
    429: "rate_limit_error", 500: "server_error", 503: "service_unavailable",
}  # fmt: skip
_ANTHROPIC_KINDS = _KINDS | {403: "permission_error", 500: "api_error", 503: "overloaded_error"}
_ANTHROPIC_PATH = "/v1/messages"
_MODULE = re.compile(r"^[\w.]+\.(?=\w+: )")
"""Prefix of an exception class's name in tracebacks."""
_FIELD = re.compile(r"(?:the |an? [a-z ]*of |one of )?(\w+)((?:\[\d+\]|\.\w+)*)")
"""The place in a request with which a message begins: a field, and what is within it."""
_FIELDS = {item.name for item in fields(SamplingParams)} | {
    "response_format", "tool_choice", "best_of", "echo", "cache_salt", "priority", "chat_template_kwargs", "dimensions",
    "sampling_params", "prompt", "messages", "chat_template", "level", "top_logprobs", "input",
}  # fmt: skip


class ApiError(Exception):
    """An error answer; `code` is machine-readable, by default OpenAI's for the status."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.headers = status, param, headers
        self.code = code or _CODES.get(status)

    @property
    def kind(self) -> str:
        """The error's name in the metrics."""
        return _KINDS.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Return the answer's body in OpenAI's format, which has few types and distinguishes errors by code."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


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
        # Otherwise FastAPI would document its own errors of status 422.
        ("4XX", "another fault of the request"),
    )
}


def answers(model: Any) -> dict[int | str, dict[str, Any]]:
    """Return the possible answers of a streaming endpoint: events, or `model`."""
    return {200: {"model": model, "content": {"text/event-stream": {}}}, **ERRORS}


class JsonResponse(Response):
    """JSON in UTF-8."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode a body; bytes are encoded already."""
        return content if isinstance(content, bytes) else encode_json(content)


def error_body(error: ApiError, scope: Scope) -> dict[str, Any]:
    """Return the body of the error answer to a request."""
    path = scope["path"].removeprefix(scope["root_path"])
    if path != _ANTHROPIC_PATH and not path.startswith(f"{_ANTHROPIC_PATH}/"):
        return error.body()
    kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def error_response(error: ApiError, scope: Scope) -> JsonResponse:
    """Return the error answer to a request."""
    return JsonResponse(error_body(error, scope), error.status, error.headers)


_PIECES_DEPTH = 5
"""Depth of one token's log-probabilities in an answer: below choices, a choice, its logprobs and their lists."""


def parse_json(body: bytes) -> Any:
    """Parse a body; ApiError if it is not JSON in UTF-8, or has more than 201 lists and objects within each other."""
    try:
        return from_json(body.removeprefix(BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"what was sent cannot be read as JSON: {error}", code="invalid_json") from None


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON in UTF-8, or in ASCII if it has a lone surrogate, which a model may write as an escape."""
    try:
        return to_json(value, inf_nan_mode="null")
    except PydanticSerializationError:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def encode_pieces(value: Any, depth: int = _PIECES_DEPTH) -> bytes:
    """Encode a large value in many calls, since the encoder blocks other threads during each."""
    if depth and isinstance(value, dict):
        items = (encode_json(name) + b":" + encode_pieces(item, depth - 1) for name, item in value.items())
        return b"{" + b",".join(items) + b"}"
    if depth and isinstance(value, list):
        return b"[" + b",".join(encode_pieces(item, depth - 1) for item in value) + b"]"
    return encode_json(value)


def sent_names(names: Mapping[str, Sequence[str]], body: Any) -> dict[str, str]:
    """Map our fields to the names that a client used: for each the last one of the API's `names` that the body has."""
    return {ours: name for ours, sent in names.items() for name in sent if _has(body, name)}


def _has(body: Any, name: str) -> bool:
    for part in name.split("."):
        body = body.get(part) if isinstance(body, dict) else None
    return body is not None


def api_error(error: Exception, scope: Scope) -> ApiError:
    """Convert an exception of a request to an error answer, in which fields have the `names` that the client sent."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), headers={"Retry-After": "1"})
    if isinstance(error.__cause__, GrammarError):
        # The grammar turned out to be too complex or endless during generation.
        error = error.__cause__
    # Of a number that no float holds.
    if isinstance(error, (ValueError, OverflowError)):
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else "invalid_value"
        names, found, param = scope.get("names", {}), _FIELD.match(str(error)), None
        # Our messages about a field begin with its name, and write others as name=value.
        if found and (found[1] in _FIELDS or found[1] in names):
            param = names.get(found[1], found[1]) + found[2]
        message = re.sub(r"^\w+|\b\w+(?==)", lambda name: names.get(name[0], name[0]), str(error))
        return ApiError(400, message, param, code=code)
    # A closed engine or a failed step.
    if isinstance(error, RuntimeError):
        return ApiError(503, _sentence(str(error)))
    return ApiError(500, f"{type(error).__name__}: {error}")


def _sentence(text: str) -> str:
    """Return the first and last line of a text that may contain a traceback: the event and the exception."""
    first, *others = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    is_whole = not others or _MODULE.sub("", others[-1]) in first
    return first if is_whole else f"{first.removesuffix(':')}: {others[-1]}"


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Return the answer to a malformed request.

    `errors`: pydantic's for the parsed `body`; a `loc` begins with a part of the request: "body", "query".
    """
    # Each form that a field may have has an error of its own: those that got farthest are about what was meant.
    field_errors = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    first = max(field_errors, key=_progress)
    kind, place = first["type"], _place(first, body)
    others = [error for error in field_errors if _place(error, body) == place and _progress(error) == _progress(first)]
    if not place and kind != "value_error":
        # FastAPI treats the body as text if its content type is not JSON.
        message = "the body must be a JSON object, sent as Content-Type: application/json"
        return ApiError(400, message, code="invalid_json")
    problems, given = dict.fromkeys(map(_problem, others)), first.get("input")
    problem = " or ".join(problems).replace(" or Input should be", " or")
    if isinstance(given, (bool, int, float)):
        problem += f", not {json.dumps(given):.40}"
    is_type = kind.endswith(("_type", "_parsing"))
    code = "missing_required_parameter" if kind == "missing" else "invalid_type" if is_type else "invalid_value"
    return ApiError(400, f"{place or 'body'}: {problem}", place or None, code=code)


def _progress(error: Mapping[str, Any]) -> tuple[bool, list[int], int]:
    """Return how far validation got before an error: over the type, to which place in lists, and how deep."""
    kind, places = error["type"], [part for part in error["loc"] if isinstance(part, int)]
    # Of a literal that is a string, any other input is of another type.
    is_type = kind.endswith("_type") or (kind == "literal_error" and not isinstance(error["input"], str))
    return not is_type, places, len(error["loc"])


def _problem(error: Mapping[str, Any]) -> str:
    is_object = error["type"] in ("dict_type", "model_type", "model_attributes_type")
    return "Input should be an object" if is_object else str(error["msg"]).removeprefix("Value error, ")


def _place(error: Mapping[str, Any], body: Any) -> str:
    """Return an error's location, such as "messages[0].role", without pydantic's type names."""
    (source, *parts), is_missing = error["loc"], error["type"] == "missing"
    if source != "body":
        return str(parts[0])
    place = ""
    for part in parts:
        if isinstance(body, dict) and (part in body or (is_missing and part == parts[-1])):
            place += f".{part}" if place else str(part)
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            place += f"[{part}]"
            body = body[part]
    return place
