"""`POST /v1/embeddings`, and `/score` and `/rerank` by what `LLM.rank` ranks by."""

from __future__ import annotations

import base64
import time
from uuid import uuid4

import torch

from nanovllm.outputs import RequestOutput
from nanovllm.serve.field_types import prompt_list
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
from nanovllm.serve.service import Service
from nanovllm.tasks.ranking import ranked


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
    scores, outputs = await service.relevance(first, second, body.pooling, body.priority)
    data = [ScoreItem(index=index, score=value) for index, value in enumerate(scores)]
    return ScoreAnswer(id=f"score-{uuid4().hex}", created=int(time.time()), model=service.model, data=data,
                       usage=_usage(outputs))  # fmt: skip


async def rerank(service: Service, body: RerankBody) -> RerankAnswer:
    """Return documents, the most relevant to the query first."""
    service.check_model(body.model)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    scores, outputs = await service.relevance([body.query], texts, body.pooling, body.priority)
    results = [
        RerankItem(
            index=found.index,
            document=RerankDocument(text=found.document) if body.return_documents else None,
            relevance_score=found.score,
        )
        for found in ranked(scores, texts, body.top_n or None)
    ]
    return RerankAnswer(id=f"rerank-{uuid4().hex}", model=service.model, results=results, usage=_usage(outputs))


def _usage(outputs: list[RequestOutput]) -> PoolingUsage:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return PoolingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
