"""OpenAI's endpoints: chats, completions, responses, and the model."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nanovllm.openai_answers import ChatCompletion, Completion, ResponseAnswer
from nanovllm.serve.chat_completions import answer_chat
from nanovllm.serve.completions import answer_completion
from nanovllm.serve.protocol import ChatBody, CompletionBody
from nanovllm.serve.response_protocol import ResponseBody
from nanovllm.serve.responses import answer_response
from nanovllm.serve.routing import ERRORS, ServiceDep, answers, make_router, within_limits

router = make_router()


@router.post("/v1/chat/completions", response_model=None, responses=answers(ChatCompletion))
async def chat_completions(body: ChatBody, request: Request, service: ServiceDep) -> Response:
    """Answer messages."""
    return await within_limits(request, service, answer_chat(service, body))


@router.post("/v1/completions", response_model=None, responses=answers(Completion))
async def completions(body: CompletionBody, request: Request, service: ServiceDep) -> Response:
    """Complete prompts."""
    return await within_limits(request, service, answer_completion(service, body))


@router.post("/v1/responses", response_model=None, responses=answers(ResponseAnswer))
async def responses(body: ResponseBody, request: Request, service: ServiceDep) -> Response:
    """Answer an input in text."""
    return await within_limits(request, service, answer_response(service, body))


@router.get("/v1/models", responses={401: ERRORS[401]})
async def models(service: ServiceDep) -> dict[str, Any]:
    """List the model, under each of its names."""
    return {"object": "list", "data": [service.describe(name) for name in service.names]}


@router.get("/v1/models/{name:path}", responses={401: ERRORS[401], 404: ERRORS[404]})
async def model_named(name: str, service: ServiceDep) -> dict[str, Any]:
    """Describe the model."""
    service.check_model(name)
    return service.describe(name)
