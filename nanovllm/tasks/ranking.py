"""Embeds prompts, and ranks documents by their relevance to queries.

With embedding models the score is the cosine of two embeddings. With rerankers that are causal models it is the
probability of "yes" versus "no" after the prompt of Qwen3-Reranker (Zhang et al. 2025, arXiv:2506.05176).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch.nn import functional

from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.input_processor import InputProcessor

RankBy = Literal["embedding", "judgement"]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_PROMPT = (
    "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n"
    "<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def embeddings(outputs: Sequence[RequestOutput], hidden_size: int) -> torch.Tensor:
    """Return the normalised embeddings of pooled prompts, [num_prompts, hidden_size] float32.

    `hidden_size` is used only if there are no prompts: some models project their last states.
    """
    # Chunks return sums, which have the direction of the mean; normalisation keeps only the direction.
    states = [np.sum(output.hidden_states, axis=0) for output in outputs]
    stacked = np.array(states, dtype=np.float32) if states else np.empty((0, hidden_size), dtype=np.float32)
    return functional.normalize(torch.from_numpy(stacked), dim=1)


def rank_method(by: RankBy | None, model: str) -> RankBy:
    """Return a model's ranking method: the requested one, else by its name, since rerankers' configs do not tell."""
    if by is None:
        return "judgement" if "reranker" in Path(model).name.lower() else "embedding"
    if by not in get_args(RankBy):
        raise ValueError(f"by must be 'embedding' or 'judgement', not {by!r}")
    return by


def text_pairs(queries: list[str], documents: list[str]) -> list[tuple[str, str]]:
    """Return each document with its query, or with the single query."""
    for text in (*queries, *documents):
        if not isinstance(text, str):
            raise ValueError(f"queries and documents are texts, not {text!r:.80}")
    if len(queries) not in (1, len(documents)):
        raise ValueError(f"{len(queries)} queries for {len(documents)} documents: give one, or one for each")
    return list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))


def cosines(vectors: torch.Tensor, num_queries: int) -> list[float]:
    """Return cosine similarities; vectors: embeddings of the queries, then of the documents."""
    values: list[float] = (vectors[:num_queries] * vectors[num_queries:]).sum(1).tolist()
    return values


@dataclass
class RankedDocument:
    """A document with its relevance to a query.

    Attributes:
        index: its index in the given documents.
        score: a cosine, -1 ... 1, or a probability, 0 ... 1.
        document: its text.
    """

    index: int
    score: float
    document: str


def ranked(scores: Sequence[float], documents: Sequence[str], top_n: int | None = None) -> list[RankedDocument]:
    """Return the documents by descending score, all or `top_n`; ties keep their order."""
    order = sorted(range(len(documents)), key=lambda index: -scores[index])[:top_n]
    return [RankedDocument(index, scores[index], documents[index]) for index in order]


class Judge:
    """Asks a causal model whether documents match queries; ValueError if its tokenizer has no such answers."""

    def __init__(self, processor: InputProcessor) -> None:
        self._yes, self._no = (token_ids[0] for token_ids in processor.tokenize(["yes", "no"], False))
        if self._yes == self._no:
            raise ValueError("the model's tokenizer begins 'yes' and 'no' with the same token")
        answers, num_logprobs = [self._yes, self._no], processor.limits.max_logprobs
        self.params = SamplingParams(0, 1, allowed_token_ids=answers, logprobs=num_logprobs, detokenize=False)

    def prompts(self, pairs: Sequence[tuple[str, str]], instruction: str | None = None) -> list[str]:
        """Return a prompt for each pair of query and document."""
        return [
            _PROMPT.format(system=_SYSTEM, instruction=instruction or INSTRUCTION, query=query, document=document)
            for query, document in pairs
        ]

    def scores(self, outputs: Sequence[RequestOutput]) -> list[float]:
        """Return the probability of "yes" versus "no", 0 ... 1.

        An answer that is not among the `max_logprobs` most likely tokens gets the probability of the last of them.
        """
        scores = []
        for output in outputs:
            (logprobs,) = output.outputs[0].logprobs or ()
            found = {token_id: logprob.logprob for token_id, logprob in logprobs.items()}
            least = min(found.values())
            scores.append(1 / (1 + math.exp(found.get(self._no, least) - found.get(self._yes, least))))
        return scores
