"""Token ids: of texts and messages, texts of them, and answers in them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from nanovllm.serve.errors import JsonResponse
from nanovllm.serve.generate import answer_generate
from nanovllm.serve.protocol import DetokenizeBody, GenerateBody, TokenizeBody
from nanovllm.serve.routing import ERRORS, ServiceDep, make_router, within_limits
from nanovllm.serve.tokens import detokenize, tokenize, tokenizer_info

router = make_router()


@router.post("/tokenize", response_model=None, responses=ERRORS)
async def tokenize_text(body: TokenizeBody, request: Request, service: ServiceDep) -> Response:
    """Return the token ids of a text or of messages."""
    return JsonResponse(await within_limits(request, service, tokenize(service, body)))


@router.post("/detokenize", response_model=None, responses=ERRORS)
async def detokenize_tokens(body: DetokenizeBody, service: ServiceDep) -> Response:
    """Return the text of token ids."""
    return JsonResponse(await detokenize(service, body))


@router.get("/tokenizer_info", responses={401: ERRORS[401]})
async def describe_tokenizer(service: ServiceDep) -> dict[str, Any]:
    """Describe the tokenizer, with its special tokens and its chat template."""
    return tokenizer_info(service)


@router.post("/inference/v1/generate", response_model=None, responses=ERRORS)
async def generate(body: GenerateBody, request: Request, service: ServiceDep) -> Response:
    """Complete token ids with token ids."""
    return await within_limits(request, service, answer_generate(service, body))
