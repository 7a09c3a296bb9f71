"""Endpoints `/v1/embeddings`, and `/score` and `/rerank` by the method of `LLM.rank`."""

from __future__ import annotations

import base64
from typing import Annotated, Literal
from uuid import uuid4

import torch
from pydantic import BaseModel, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from nanovllm.outputs import RequestOutput
from nanovllm.serve.answers import answer_head
from nanovllm.serve.errors import ERRORS, JsonResponse
from nanovllm.serve.openai_format import AnswerHead, UsageCounts, usage
from nanovllm.serve.protocol import Body, Prompts, TextOrTexts, prompt_list
from nanovllm.serve.service import ServiceDep, make_router
from nanovllm.tasks import ranking

router = make_router(prompt=["input"], prompts=["input"])


class PoolingBody(Body):
    """Common fields of pooling requests."""

    model: str | None = None
    pooling: Literal["last", "mean"] | None = Field(
        None, description="the last token's state, or the mean of all; None: as the model's folder says"
    )
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="lower ones run first")


class EmbeddingBody(PoolingBody):
    """A request for embeddings of prompts: texts or token ids."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, description="the size of the model's hidden states")


class ScoreBody(PoolingBody):
    """A request for the similarity of pairs of texts; a single `text_1`, the query, goes with each `text_2`."""

    text_1: TextOrTexts
    text_2: TextOrTexts


class RerankDocument(BaseModel):
    """A document as an object."""

    text: str


class RerankBody(PoolingBody):
    """A request to rank documents by relevance to a query; `top_n`: number to return, all if None or 0."""

    query: str
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=1023, fail_fast=True)]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool = True


class EmbeddingItem(TypedDict):
    """The embedding of one prompt, as numbers or as their bytes, float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(AnswerHead):
    """Embeddings in the order of the prompts."""

    object: Literal["list"]
    data: list[EmbeddingItem]


class ScoreItem(TypedDict):
    """The score of one pair: a cosine, -1 ... 1, or a judge's probability, 0 ... 1."""

    object: Literal["score"]
    index: int
    score: float


class ScoreAnswer(AnswerHead):
    """Scores in the order of the pairs."""

    object: Literal["list"]
    data: list[ScoreItem]


class RerankItem(TypedDict):
    """A document with its index in the request."""

    index: int
    document: RerankDocument | None
    relevance_score: float


class RerankAnswer(TypedDict):
    """Documents by descending relevance."""

    id: str
    model: str
    results: list[RerankItem]
    usage: UsageCounts


# Described alone: answers are encoded without being validated, number by number.
_EMBEDDINGS, _SCORES, _RANKS = (
    {200: {"model": model}, **ERRORS} for model in (EmbeddingAnswer, ScoreAnswer, RerankAnswer)
)


@router.post("/v1/embeddings", response_model=None, responses=_EMBEDDINGS)
async def embeddings(body: EmbeddingBody, service: ServiceDep) -> Response:
    """Return embeddings of prompts in their order."""
    service.check_model(body.model)
    size = service.llm.llm.model_config.hidden_size
    if body.dimensions not in (None, size):
        raise ValueError(f"dimensions={body.dimensions}: this model's embeddings have {size}")
    priority = service.priority(body.priority)
    outputs = await service.llm.pool(prompt_list(body.input), body.pooling, priority=priority)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(ranking.embeddings(outputs, size))
    ]
    return JsonResponse({**answer_head(service, "embd", "list"), "data": data, "usage": _usage(outputs)})


def _encoded(vector: torch.Tensor, encoding: str) -> list[float] | str:
    """Return an embedding as numbers, or as their bytes, float32 in base64."""
    values: list[float] = vector.tolist()
    return values if encoding == "float" else base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


@router.post("/score", response_model=None, responses=_SCORES)
@router.post("/v1/score", response_model=None, responses=_SCORES)
async def scores(body: ScoreBody, service: ServiceDep) -> Response:
    """Return the scores of pairs of texts: cosines, -1 ... 1, or a judge's probabilities, 0 ... 1."""
    service.check_model(body.model)
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        raise ValueError(f"text_1 has {len(first)} texts, and text_2 {len(second)}: it must have one or equally many")
    priority = service.priority(body.priority)
    found, outputs = await service.llm.relevance(first, second, pooling=body.pooling, priority=priority)
    data = [{"object": "score", "index": index, "score": value} for index, value in enumerate(found)]
    return JsonResponse({**answer_head(service, "score", "list"), "data": data, "usage": _usage(outputs)})


@router.post("/rerank", response_model=None, responses=_RANKS)
@router.post("/v1/rerank", response_model=None, responses=_RANKS)
@router.post("/v2/rerank", response_model=None, responses=_RANKS)
async def rank(body: RerankBody, service: ServiceDep) -> Response:
    """Return documents by descending relevance to a query, with their index in the request."""
    service.check_model(body.model)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    priority = service.priority(body.priority)
    found, outputs = await service.llm.relevance([body.query], texts, pooling=body.pooling, priority=priority)
    results = [
        {
            "index": item.index,
            "document": {"text": item.document} if body.return_documents else None,
            "relevance_score": item.score,
        }
        for item in ranking.ranked(found, texts, body.top_n or None)
    ]
    head = {"id": f"rerank-{uuid4().hex}", "model": service.model}
    return JsonResponse({**head, "results": results, "usage": _usage(outputs)})


def _usage(outputs: list[RequestOutput]) -> UsageCounts:
    return usage(sum(len(output.prompt_token_ids) for output in outputs), 0)
