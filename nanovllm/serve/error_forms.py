"""What an error looks like: in the form of the API whose path was asked for."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from nanovllm.serve.errors import ApiError, JsonResponse

_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(error: ApiError, scope: Scope) -> dict[str, Any]:
    """Return the body of the answer to a request."""
    path = scope["path"].removeprefix(scope["root_path"])
    if path != _ANTHROPIC_PATH and not path.startswith(f"{_ANTHROPIC_PATH}/"):
        return error.body()
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def error_response(error: ApiError, scope: Scope) -> JsonResponse:
    """Return the answer to a request."""
    return JsonResponse(error_body(error, scope), error.status, error.headers)
