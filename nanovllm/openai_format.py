"""OpenAI's form of requests and answers: `/v1/chat/completions` and `/v1/completions`, in batch files and over HTTP."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from nanovllm.logprobs import Logprob
from nanovllm.outputs import CompletionOutput, RequestOutput

# No effect on an answer here. The model is the one that runs.
_IGNORED = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options"}
)
# What is not supported may be there with these values, which ask for nothing.
_NEUTRAL: Mapping[str, Any] = {"stream": False, "echo": False, "suffix": "", "best_of": 1, "tools": []}
_RENAMED = {"max_completion_tokens": "max_tokens"}
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; as in OpenAI's API."""


@dataclass(frozen=True)
class Endpoint:
    """One of OpenAI's endpoints.

    Attributes:
        content: the field that holds what is to be answered.
        defaults: sampling parameters of the API where they are not ours.
        own_fields: fields that the other endpoint has not.
    """

    content: str
    defaults: Mapping[str, Any]
    own_fields: frozenset[str]

    @property
    def is_chat(self) -> bool:
        """Whether it answers messages."""
        return self.content == "messages"

    @property
    def fields(self) -> frozenset[str]:
        """What a body may have, beside the content and our sampling parameters."""
        return self.own_fields | _IGNORED | {"stream", "response_format"}


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(
        "messages", {"max_tokens": None}, frozenset({"max_completion_tokens", "top_logprobs", "tools"})
    ),
    "/v1/completions": Endpoint("prompt", {"max_tokens": 16}, frozenset({"echo", "suffix", "best_of"})),
}


def sampling_values(
    body: Mapping[str, Any], endpoint: Endpoint, names: set[str], supported: Collection[str] = ()
) -> dict[str, Any]:
    """Return the sampling parameters of a request's body, by our names.

    Args:
        body: without null values.
        endpoint: the request's.
        names: all sampling parameters.
        supported: further fields of the API, which the caller takes care of.

    Raises:
        ValueError: the body asks for what is not supported.
    """
    for name, value in _NEUTRAL.items():
        if name not in supported and body.get(name, value) != value:
            raise ValueError(f"{name}={body[name]!r:.80} is not supported")
    values = {_RENAMED.get(name, name): value for name, value in body.items() if _RENAMED.get(name, name) in names}
    if "response_format" in body:
        structured = _structured_outputs(body["response_format"])
        if structured is not None and "structured_outputs" in values:
            raise ValueError("response_format and structured_outputs exclude each other")
        values |= {} if structured is None else {"structured_outputs": structured}
    if endpoint.is_chat:
        wanted = values.pop("logprobs", False)
        if not isinstance(wanted, bool) or ("top_logprobs" in body and not wanted):
            raise ValueError("logprobs must be true or false, and true with top_logprobs")
        values |= {"logprobs": body.get("top_logprobs", 0)} if wanted else {}
    return values


def _structured_outputs(response_format: Any) -> dict[str, Any] | None:
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    schema = response_format.get("json_schema") if kind == "json_schema" else None
    if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return {"json": schema["schema"]}
    raise ValueError(f"response_format is of type text, json_object or json_schema, not {response_format!r:.80}")


def completion_body(
    output: RequestOutput, line: int, model: str, is_chat: bool, num_logprobs: int | None
) -> dict[str, Any]:
    """Return the answer's body.

    Args:
        output: a finished request's.
        line: the number of the request's line; the answer's id holds it, and so is the same in every run.
        model: the model's name.
        is_chat: whether messages were answered.
        num_logprobs: how many most likely tokens were asked for at each position.
    """
    choices = [chat_choice(choice, num_logprobs) if is_chat else text_choice(choice) for choice in output.outputs]
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{line}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(len(output.prompt_token_ids), sum(len(choice.token_ids) for choice in output.outputs)),
    }


def usage(num_prompt_tokens: int, num_tokens: int) -> dict[str, Any]:
    """Return token counts in the API's form."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


def chat_choice(choice: CompletionOutput, num_logprobs: int | None) -> dict[str, Any]:
    """Return one answer to messages; `num_logprobs`: most likely tokens to show at each position."""
    message = {"role": "assistant", "content": choice.text}
    logprobs = chat_logprobs(choice, num_logprobs)
    return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def chat_logprobs(choice: CompletionOutput, num_logprobs: int | None) -> dict[str, Any] | None:
    """Return an answer's log-probabilities; None if it has none."""
    if choice.logprobs is None:
        return None
    positions = zip(choice.logprobs, choice.token_ids, strict=True)
    return {"content": [_chat_position(at, token_id, num_logprobs or 0) for at, token_id in positions]}


def _chat_position(at: Mapping[int, Logprob], token_id: int, num_logprobs: int) -> dict[str, Any]:
    def entry(item: Logprob) -> dict[str, Any]:
        token = item.decoded_token or ""
        # A part of a character, which is decoded to U+FFFD, is not the bytes of that.
        own = None if "\ufffd" in token else list(token.encode())
        return {"token": token, "logprob": max(item.logprob, LEAST_LOGPROB), "bytes": own}

    # The token's own entry is there also if it is none of the most likely ones.
    top = sorted(at.values(), key=lambda item: item.rank or 0)[:num_logprobs]
    return {**entry(at[token_id]), "top_logprobs": [entry(item) for item in top]}


def prompt_positions(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of a prompt's tokens in vLLM's form, by token id; None if it has none."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if at is None
        else {
            str(token_id): {
                "logprob": max(item.logprob, LEAST_LOGPROB), "rank": item.rank, "decoded_token": item.decoded_token
            }
            for token_id, item in at.items()
        }
        for at in output.prompt_logprobs
    ]  # fmt: skip


def text_choice(choice: CompletionOutput) -> dict[str, Any]:
    """Return one answer to a prompt."""
    logprobs = None if choice.logprobs is None else text_logprobs(choice.logprobs, choice.token_ids)
    return {"index": choice.index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def text_logprobs(
    positions: Sequence[Mapping[int, Logprob] | None], token_ids: Sequence[int], offset: int = 0, first_token: str = ""
) -> dict[str, Any]:
    """Return log-probabilities of tokens; `offset`: characters of the answer before them.

    `first_token` is the text of a first token that has none, as that of a prompt.
    """
    own = [None if at is None else at[token_id] for at, token_id in zip(positions, token_ids, strict=True)]
    tokens = [first_token if item is None else item.decoded_token or "" for item in own]
    return {
        "tokens": tokens,
        "token_logprobs": [None if item is None else max(item.logprob, LEAST_LOGPROB) for item in own],
        "top_logprobs": [
            None if at is None else {item.decoded_token or "": max(item.logprob, LEAST_LOGPROB) for item in at.values()}
            for at in positions
        ],
        "text_offset": [offset, *(offset + end for end in accumulate(map(len, tokens[:-1])))] if tokens else [],
    }
