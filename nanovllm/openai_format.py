"""OpenAI's form of requests and answers: `/v1/chat/completions` and `/v1/completions`, in batch files and over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from nanovllm.logprobs import Logprob
from nanovllm.openai_answers import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    PromptLogprobs,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
    UsageCounts,
)
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


@dataclass(frozen=True)
class TokenNames:
    """How log-probabilities show tokens.

    Attributes:
        get_bytes: returns a token's bytes, or None where they are not known; None: those of its text.
        as_ids: show ids, such as "token_id:123", instead of texts.
    """

    get_bytes: Callable[[int], bytes | None] | None = None
    as_ids: bool = False

    def name(self, token_id: int, text: str | None) -> str:
        """Return what stands for a token."""
        return f"token_id:{token_id}" if self.as_ids else text or ""

    def bytes_of(self, token_id: int, text: str | None) -> list[int] | None:
        """Return a token's bytes; None if they are not known."""
        if self.get_bytes is not None:
            found = self.get_bytes(token_id)
            return None if found is None else list(found)
        # Half a character's bytes: its replacement is not what they are.
        return None if "\ufffd" in (text or "") else list((text or "").encode())


_BY_TEXT = TokenNames()


def completion_body(
    output: RequestOutput, line: int, model: str, is_chat: bool, num_logprobs: int | None
) -> ChatCompletion | Completion:
    """Return the answer's body.

    Args:
        output: a finished request's.
        line: the number of the request's line; the answer's id holds it, and so is the same in every run.
        model: the model's name.
        is_chat: whether messages were answered.
        num_logprobs: how many most likely tokens were asked for at each position.
    """
    created = int(time.time())
    counts = usage(len(output.prompt_token_ids), sum(len(choice.token_ids) for choice in output.outputs))
    if is_chat:
        chats = [chat_choice(choice, num_logprobs) for choice in output.outputs]
        return {
            "id": f"chatcmpl-{line}", "object": "chat.completion", "created": created, "model": model,
            "choices": chats, "usage": counts,
        }  # fmt: skip
    texts = [text_choice(choice) for choice in output.outputs]
    return {
        "id": f"cmpl-{line}", "object": "text_completion", "created": created, "model": model,
        "choices": texts, "usage": counts,
    }  # fmt: skip


def usage(num_prompt_tokens: int, num_tokens: int) -> UsageCounts:
    """Return token counts in the API's form."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


def chat_choice(choice: CompletionOutput, num_logprobs: int | None, names: TokenNames = _BY_TEXT) -> ChatChoice:
    """Return one answer to messages; `num_logprobs`: most likely tokens to show at each position."""
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": chat_logprobs(choice, num_logprobs, names),
        "finish_reason": choice.finish_reason,
    }


def chat_logprobs(
    choice: CompletionOutput, num_logprobs: int | None, names: TokenNames = _BY_TEXT
) -> ChatLogprobs | None:
    """Return an answer's log-probabilities; None if it has none."""
    if choice.logprobs is None:
        return None
    positions = zip(choice.logprobs, choice.token_ids, strict=True)
    return {
        "content": [_chat_position(logprobs, token_id, num_logprobs or 0, names) for logprobs, token_id in positions]
    }


def _chat_position(logprobs: Mapping[int, Logprob], own_id: int, num_logprobs: int, names: TokenNames) -> TokenLogprob:
    def entry(token_id: int) -> TopLogprob:
        item = logprobs[token_id]
        return {
            "token": names.name(token_id, item.decoded_token),
            "logprob": max(item.logprob, LEAST_LOGPROB),
            "bytes": names.bytes_of(token_id, item.decoded_token),
        }

    # The token's own entry is there also if it is none of the most likely ones.
    top = sorted(logprobs, key=lambda token_id: logprobs[token_id].rank or 0)[:num_logprobs]
    return {**entry(own_id), "top_logprobs": [entry(token_id) for token_id in top]}


def prompt_positions(output: RequestOutput, names: TokenNames = _BY_TEXT) -> PromptLogprobs | None:
    """Return the log-probabilities of a prompt's tokens in vLLM's form, by token id; None if it has none."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if logprobs is None
        else {
            str(token_id): {
                "logprob": max(item.logprob, LEAST_LOGPROB),
                "rank": item.rank,
                "decoded_token": names.name(token_id, item.decoded_token),
            }
            for token_id, item in logprobs.items()
        }
        for logprobs in output.prompt_logprobs
    ]


def text_choice(choice: CompletionOutput) -> TextChoice:
    """Return one answer to a prompt."""
    logprobs = None if choice.logprobs is None else text_logprobs(choice.logprobs, choice.token_ids)
    return {"index": choice.index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def text_logprobs(
    positions: Sequence[Mapping[int, Logprob] | None],
    token_ids: Sequence[int],
    offsets: list[int] | None = None,
    first_token: str = "",
    names: TokenNames = _BY_TEXT,
) -> TextLogprobs:
    """Return log-probabilities of tokens.

    Args:
        positions: of each token; None for one that has none, as the first of a prompt.
        token_ids: the tokens.
        offsets: where in the answer's text they begin; by the lengths of their texts if None.
        first_token: the text of a first token that has no log-probabilities.
        names: how tokens are shown.
    """
    own = [None if found is None else found[token_id] for found, token_id in zip(positions, token_ids, strict=True)]
    texts = [first_token if item is None else item.decoded_token or "" for item in own]
    if offsets is None:
        offsets = [0, *accumulate(map(len, texts[:-1]))] if texts else []
    return {
        "tokens": [names.name(token_id, text) for token_id, text in zip(token_ids, texts, strict=True)],
        "token_logprobs": [None if item is None else max(item.logprob, LEAST_LOGPROB) for item in own],
        "top_logprobs": [
            None
            if logprobs is None
            else {names.name(i, item.decoded_token): max(item.logprob, LEAST_LOGPROB) for i, item in logprobs.items()}
            for logprobs in positions
        ],
        "text_offset": offsets,
    }
