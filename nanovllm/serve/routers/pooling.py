"""Embeddings, and what is compared by them."""

from __future__ import annotations

from starlette.requests import Request

from nanovllm.serve.pooling import embed, rerank, score
from nanovllm.serve.pooling_protocol import (
    EmbeddingAnswer,
    EmbeddingBody,
    RerankAnswer,
    RerankBody,
    ScoreAnswer,
    ScoreBody,
)
from nanovllm.serve.routing import ERRORS, ServiceDep, make_router, within_limits

router = make_router()


@router.post("/v1/embeddings", responses=ERRORS)
async def embeddings(body: EmbeddingBody, request: Request, service: ServiceDep) -> EmbeddingAnswer:
    """Return embeddings of prompts."""
    return await within_limits(request, service, embed(service, body))


@router.post("/score", responses=ERRORS)
@router.post("/v1/score", responses=ERRORS)
async def scores(body: ScoreBody, request: Request, service: ServiceDep) -> ScoreAnswer:
    """Return how similar pairs of texts are, or how relevant the second is to the first."""
    return await within_limits(request, service, score(service, body))


@router.post("/rerank", responses=ERRORS)
@router.post("/v1/rerank", responses=ERRORS)
@router.post("/v2/rerank", responses=ERRORS)
async def rank(body: RerankBody, request: Request, service: ServiceDep) -> RerankAnswer:
    """Return documents by how relevant they are to a query."""
    return await within_limits(request, service, rerank(service, body))
