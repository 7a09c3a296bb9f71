"""The bodies of requests for embeddings, scores and ranks, and of their answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from nanovllm.serve.field_types import IsObject, Prompts, Text, TextOrTexts, one_of
from nanovllm.serve.protocol import Body


class PoolingBody(Body):
    """What requests for hidden states share."""

    model: str | None = None
    pooling: Literal["last", "mean"] | None = Field(
        None, description="of which token; of all; what the model's folder asks for"
    )
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="lower ones run first")
    user: str | None = Field(None, description="without effect")


class EmbeddingBody(PoolingBody):
    """A request for embeddings of prompts: texts or token ids."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, description="that of the model's hidden states")


class ScoreBody(PoolingBody):
    """A request for the similarity of pairs of texts; a single `text_1`, the query, goes with each `text_2`."""

    text_1: TextOrTexts
    text_2: TextOrTexts


class RerankDocument(BaseModel):
    """A document as an object."""

    text: str


_Document = Annotated[Text | Annotated[RerankDocument, IsObject], one_of("a string or an object with a text")]


class RerankBody(PoolingBody):
    """A request for documents in the order of their relevance to a query; `top_n`: how many, all if None or 0."""

    query: str
    documents: Annotated[list[_Document], Field(min_length=1, max_length=1023, fail_fast=True)]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool = True


class PoolingUsage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(BaseModel):
    """The embedding of one prompt, as numbers or as their bytes, float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(BaseModel):
    """Embeddings in the order of the prompts."""

    object: Literal["list"] = "list"
    data: list[EmbeddingItem]
    model: str
    usage: PoolingUsage


class ScoreItem(BaseModel):
    """The score of one pair: a cosine, -1 ... 1, or a judge's probability, 0 ... 1."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreAnswer(BaseModel):
    """Scores in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreItem]
    usage: PoolingUsage


class RerankItem(BaseModel):
    """A document, with its place in the request."""

    index: int
    document: RerankDocument | None
    relevance_score: float


class RerankAnswer(BaseModel):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankItem]
    usage: PoolingUsage
