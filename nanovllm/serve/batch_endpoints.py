"""The endpoints whose requests batches may have, called without HTTP."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from nanovllm.serve.chat_completions import answer_chat
from nanovllm.serve.completions import answer_completion
from nanovllm.serve.errors import validation_error
from nanovllm.serve.pooling import EmbeddingBody, embed
from nanovllm.serve.protocol import ChatBody, CompletionBody
from nanovllm.serve.responses import ResponseBody, answer_response
from nanovllm.serve.service import Service

ENDPOINTS: dict[str, tuple[type[BaseModel], Callable[[Service, Any], Awaitable[Response | BaseModel]]]] = {
    "/v1/chat/completions": (ChatBody, answer_chat),
    "/v1/completions": (CompletionBody, answer_completion),
    "/v1/responses": (ResponseBody, answer_response),
    "/v1/embeddings": (EmbeddingBody, embed),
}


async def answer_line(service: Service, endpoint: str, body: dict[str, Any]) -> Any:
    """Return the body of the answer to a request.

    Raises:
        ValueError, ApiError: the request is wrong.
        RuntimeError: the engine failed.
    """
    kind, answer = ENDPOINTS[endpoint]
    if body.get("stream"):
        raise ValueError("a request of a batch cannot be streamed")
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise validation_error({**first, "loc": ("body", *first["loc"])}, body) from error
    found = await answer(service, request)
    return json.loads(bytes(found.body)) if isinstance(found, Response) else found.model_dump()
