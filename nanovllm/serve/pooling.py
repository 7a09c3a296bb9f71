"""`POST /v1/embeddings`, and `/score` and `/rerank` by the cosine of embeddings, as vLLM does for embedding models."""

from __future__ import annotations

import base64
import time
from uuid import uuid4

import torch

from nanovllm.outputs import RequestOutput
from nanovllm.serve.pooling_protocol import (
    EmbeddingAnswer,
    EmbeddingBody,
    EmbeddingItem,
    PoolingUsage,
    RerankAnswer,
    RerankBody,
    RerankDocument,
    RerankItem,
    ScoreAnswer,
    ScoreBody,
    ScoreItem,
)
from nanovllm.serve.protocol import prompt_list
from nanovllm.serve.service import Service


async def embed(service: Service, body: EmbeddingBody) -> EmbeddingAnswer:
    """Return embeddings of prompts, each of length 1."""
    service.check_model(body.model)
    size = service.hidden_size
    if body.dimensions not in (None, size):
        raise ValueError(f"dimensions={body.dimensions}: this model's embeddings have {size}")
    vectors, outputs = await service.embed(prompt_list(body.input), body.pooling, body.priority)
    data = [
        EmbeddingItem(index=index, embedding=_encoded(vector, body.encoding_format))
        for index, vector in enumerate(vectors)
    ]
    return EmbeddingAnswer(data=data, model=service.model, usage=_usage(outputs))


def _encoded(vector: torch.Tensor, encoding: str) -> list[float] | str:
    values: list[float] = vector.tolist()
    return values if encoding == "float" else base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


async def score(service: Service, body: ScoreBody) -> ScoreAnswer:
    """Return the similarity of each pair of texts, or of one text with each of several."""
    service.check_model(body.model)
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(first) not in (1, len(second)):
        raise ValueError(f"text_1 has {len(first)} texts, and text_2 {len(second)}: it must have one or as many")
    vectors, outputs = await service.embed([*first, *second], body.pooling, body.priority)
    similar = (vectors[: len(first)] * vectors[len(first) :]).sum(1).tolist()
    data = [ScoreItem(index=index, score=value) for index, value in enumerate(similar)]
    return ScoreAnswer(id=f"score-{uuid4().hex}", created=int(time.time()), model=service.model, data=data,
                       usage=_usage(outputs))  # fmt: skip


async def rerank(service: Service, body: RerankBody) -> RerankAnswer:
    """Return documents, the most similar to the query first."""
    service.check_model(body.model)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    vectors, outputs = await service.embed([body.query, *texts], body.pooling, body.priority)
    similar = (vectors[1:] @ vectors[0]).tolist()
    order = sorted(range(len(texts)), key=lambda index: -similar[index])[: body.top_n or None]
    shown = [RerankDocument(text=text) if body.return_documents else None for text in texts]
    results = [RerankItem(index=i, document=shown[i], relevance_score=similar[i]) for i in order]
    return RerankAnswer(id=f"rerank-{uuid4().hex}", model=service.model, results=results, usage=_usage(outputs))


def _usage(outputs: list[RequestOutput]) -> PoolingUsage:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return PoolingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
