"""Anthropic's endpoints: messages, and how many tokens they have."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nanovllm.serve.anthropic import answer_messages, count_tokens
from nanovllm.serve.anthropic_protocol import CountTokensBody, MessagesBody, MessagesError
from nanovllm.serve.routing import ERRORS, ServiceDep, make_router, within_limits

router = make_router()
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**answer, "model": MessagesError} for status, answer in ERRORS.items()
}


@router.post("/v1/messages", response_model=None, responses=_ERRORS)
async def messages(body: MessagesBody, request: Request, service: ServiceDep) -> Response:
    """Answer messages in Anthropic's form."""
    return await within_limits(request, service, answer_messages(service, body))


@router.post("/v1/messages/count_tokens", responses=_ERRORS)
async def num_tokens(body: CountTokensBody, request: Request, service: ServiceDep) -> dict[str, int]:
    """Return how many tokens messages have."""
    return await within_limits(request, service, count_tokens(service, body))
