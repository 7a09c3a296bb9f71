"""Endpoints for the model, `/v1/models`, and vLLM's `/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.responses import Response

from nanovllm.serve.errors import ERRORS, JsonResponse
from nanovllm.serve.protocol import DetokenizeBody, TokenizeBody
from nanovllm.serve.service import Service, ServiceDep, make_router
from nanovllm.text.input_processor import work_of_size

router = make_router(prompt=["messages"])


@router.get("/v1/models", responses={401: ERRORS[401]})
async def models(service: ServiceDep) -> dict[str, Any]:
    """List the model under each of its names."""
    return {"object": "list", "data": [_describe(service, name) for name in service.names]}


@router.get("/v1/models/{name:path}", responses={401: ERRORS[401], 404: ERRORS[404]})
async def model_named(name: str, service: ServiceDep) -> dict[str, Any]:
    """Describe the model."""
    service.check_model(name)
    return _describe(service, name)


def _describe(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "nanovllm",
        "root": service.config.model,
        "parent": None,
        "max_model_len": service.limits.max_model_len,
    }


@router.post("/tokenize", response_model=None, responses=ERRORS)
async def tokenize_text(body: TokenizeBody, service: ServiceDep) -> Response:
    """Return the token ids of a text or of messages."""
    service.check_model(body.model)
    if body.messages is not None and body.prompt is None:
        token_ids = await service.encode(body.messages, None, service.template(body, body.tools))
    elif body.prompt is not None and body.messages is None:
        token_ids = await service.encode(body.prompt, body.add_special_tokens, None)
    else:
        raise ValueError("give either a prompt or messages")
    answer = {"tokens": token_ids, "count": len(token_ids), "max_model_len": service.limits.max_model_len}
    if body.return_token_strs:
        convert = partial(service.tokenizer.convert_ids_to_tokens, token_ids)
        answer["token_strs"] = await service.llm.run_beside(convert, work_of_size(len(token_ids)))
    return JsonResponse(answer)


@router.post("/detokenize", response_model=None, responses=ERRORS)
async def detokenize_tokens(body: DetokenizeBody, service: ServiceDep) -> Response:
    """Return the text of token ids."""
    service.check_model(body.model)
    vocab_size = service.limits.vocab_size
    highest = max(body.tokens, default=0)
    if highest >= vocab_size:
        raise ValueError(f"token id {highest} is outside the vocabulary, 0 ... {vocab_size - 1}")
    decode = partial(service.decode, body.tokens)
    return JsonResponse({"prompt": await service.llm.run_beside(decode, work_of_size(len(body.tokens)))})


@router.get("/tokenizer_info", responses={401: ERRORS[401]})
async def describe_tokenizer(service: ServiceDep) -> dict[str, Any]:
    """Return the tokenizer's configuration, with special tokens and chat template."""
    tokenizer = service.tokenizer
    if tokenizer is None:
        raise ValueError("the model has no tokenizer")
    plain = (str, int, float, bool, type(None))
    return {
        **{name: value for name, value in tokenizer.init_kwargs.items() if isinstance(value, plain)},
        "tokenizer_class": type(tokenizer).__name__,
        "special_tokens": tokenizer.special_tokens_map,
        "chat_template": service.chat_template or getattr(tokenizer, "chat_template", None),
    }
