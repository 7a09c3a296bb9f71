"""Reads and writes OpenAI's requests and answers, for `nanovllm run` and the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

# `typing` has both since Python 3.11, but pydantic accepts them from there only since 3.12.
from typing_extensions import NotRequired, TypedDict

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams, make_params
from nanovllm.text.answers import AnswerSplitter, whole_calls


class UsageCounts(TypedDict):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[dict[str, int]]


class AnswerMessage(TypedDict, total=False):
    """An answer to messages, or a delta of it; `reasoning` and `reasoning_content` are equal."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None
    reasoning_content: str | None
    tool_calls: list[dict[str, Any]]


class ChatChoice(TypedDict):
    """One answer to messages: a `message`, or a `delta` in a stream."""

    index: int
    message: NotRequired[AnswerMessage]
    delta: NotRequired[AnswerMessage]
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class TextChoice(TypedDict):
    """One completion, or a delta of it."""

    index: int
    text: str
    logprobs: dict[str, list[Any]] | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[Any] | None]


class AnswerHead(TypedDict):
    """Fields of every answer, or chunk of one."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: NotRequired[UsageCounts | None]


class ChatCompletion(AnswerHead):
    """Answers to messages, or a chunk of them."""

    object: Literal["chat.completion", "chat.completion.chunk"]
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[list[Any] | None]
    prompt_token_ids: NotRequired[list[int]]


class Completion(AnswerHead):
    """Completions, or a chunk of them."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


# Fields of both endpoints; those up to "verbosity" have no effect on the answer, and the model is fixed.
_SHARED = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "request_id", "priority", "stream_options", "verbosity",
    "response_format", "add_special_tokens", "truncate_prompt_tokens", "cache_salt", "return_token_ids",
    "return_tokens_as_token_ids",
)  # fmt: skip
# Fields that `nanovllm run` does not support may have one of these neutral values.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,), "echo": (False,), "suffix": ("",), "best_of": (1,), "use_beam_search": (False,),
    "length_penalty": (1,), "logits_processors": ([],), "mm_processor_kwargs": ({},), "kv_transfer_params": ({},),
    "vllm_xargs": ({},), "modalities": (["text"],), "functions": ([],), "function_call": ("none", "auto"),
    "include_reasoning": (True,),
}  # fmt: skip
SAMPLING_FIELDS = {item.name for item in fields(SamplingParams)}
_RENAMED = {"max_completion_tokens": "max_tokens"}
LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON lacks, as in OpenAI's API."""


COMPLETION_FIELDS = {"prompt", *_SHARED, *NEUTRAL_VALUES, *SAMPLING_FIELDS}
CHAT_FIELDS = {
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "reasoning_effort", "documents", "chat_template", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "separate_reasoning", *COMPLETION_FIELDS,
} - {"prompt"}  # fmt: skip
ENDPOINTS = {"/v1/chat/completions": CHAT_FIELDS, "/v1/completions": COMPLETION_FIELDS}


def request_params(
    body: Mapping[str, Any],
    *, is_chat: bool, recommended: Mapping[str, Any], chosen: Mapping[str, Any] | None = None,
) -> SamplingParams:  # fmt: skip
    """Return a request's sampling parameters; ValueError if one is out of range.

    The request, without null values, has precedence, then the operator's choice, the endpoint's default, and the
    model's recommendation: a completion has at most 16 tokens unless the request or the operator sets another limit.
    """
    named = {_RENAMED.get(name, name): value for name, value in body.items()}
    given = {name: value for name, value in named.items() if name in SAMPLING_FIELDS}
    if "response_format" in body:
        structured = _structured_outputs(body["response_format"])
        if structured is not None and "structured_outputs" in given:
            raise ValueError("response_format and structured_outputs exclude each other")
        given |= {} if structured is None else {"structured_outputs": structured}
    if is_chat:
        wanted = given.pop("logprobs", False)
        if not isinstance(wanted, bool) or (body.get("top_logprobs") and not wanted):
            raise ValueError("top_logprobs needs logprobs to be true, and logprobs is true or false")
        given |= {"logprobs": body.get("top_logprobs", 0)} if wanted else {}
    default = {} if is_chat else {"max_tokens": 16}
    values = {"max_tokens": None, **recommended, **default, **(chosen or {}), **given}
    seed = values.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool) and seed != -1:
        # Seeds are signed in the API.
        values["seed"] = seed % 2**64
    return make_params(values)


def template_values(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets; ValueError if they are no object."""
    named = {name: body[name] for name in ("documents", "reasoning_effort") if name in body}
    further = body.get("chat_template_kwargs", {})
    if not isinstance(further, Mapping):
        raise ValueError(f"chat_template_kwargs must be an object, not {further!r:.80}")
    return {**named, **further}


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
class ShownTokens:
    """Options for showing tokens in an answer; `ids`: whether to include their ids.

    Attributes:
        num_logprobs: number of most likely tokens at each position.
        as_ids: whether log-probabilities name tokens by ids, such as "token_id:123", instead of texts.
        get_bytes: returns a token's bytes, or None if unknown; None uses the bytes of its text.
    """

    num_logprobs: int | None = None
    as_ids: bool = False
    ids: bool = False
    get_bytes: Callable[[int], bytes | None] | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any], get_bytes: Callable[[int], bytes | None] | None = None) -> ShownTokens:
        """Return the options of a request."""
        as_ids, ids = (bool(body.get(name)) for name in ("return_tokens_as_token_ids", "return_token_ids"))
        return cls(body.get("top_logprobs"), as_ids, ids, get_bytes)

    def name(self, token_id: int, text: str | None) -> str:
        """Return a token's name."""
        return f"token_id:{token_id}" if self.as_ids else text or ""

    def bytes_of(self, token_id: int, text: str | None) -> list[int] | None:
        """Return a token's bytes; None if unknown."""
        if self.get_bytes is not None:
            found = self.get_bytes(token_id)
            return None if found is None else list(found)
        # Part of a character, whose replacement character does not show the bytes.
        return None if "\ufffd" in (text or "") else list((text or "").encode())


def usage(num_prompt_tokens: int, num_tokens: int) -> UsageCounts:
    """Return token counts in the API's format."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


def chat_choice(choice: CompletionOutput, splitter: AnswerSplitter, shown: ShownTokens, echo: str = "") -> ChatChoice:
    """Return one complete answer to messages, split by an unused `splitter`; `echo`: text before the answer's."""
    new = splitter.append(choice.text, final=True)
    message: AnswerMessage = {"role": "assistant", "content": echo + new.content, "refusal": None}
    tool_calls: list[dict[str, Any]] = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(splitter.call_ids, whole_calls(new.calls), strict=True)
    ]
    if tool_calls:
        message["content"], message["tool_calls"] = message["content"] or None, tool_calls
    if splitter.separates:
        message["reasoning"] = message["reasoning_content"] = new.reasoning or None
    answer: ChatChoice = {
        "index": choice.index,
        "message": message,
        "logprobs": chat_logprobs(choice, shown),
        "finish_reason": chat_finish_reason(choice, splitter),
        "stop_reason": choice.stop_reason,
    }
    if shown.ids:
        answer["token_ids"] = choice.token_ids
    return answer


def chat_finish_reason(choice: CompletionOutput, splitter: AnswerSplitter) -> str | None:
    """Return the finish reason of a split answer: "tool_calls" if it has calls."""
    return "tool_calls" if splitter.call_ids and choice.finish_reason == "stop" else choice.finish_reason


def chat_logprobs(choice: CompletionOutput, shown: ShownTokens) -> dict[str, Any] | None:
    """Return an answer's log-probabilities; None if not requested."""
    if choice.logprobs is None:
        return None
    positions = zip(choice.logprobs, choice.token_ids, strict=True)
    return {"content": [_chat_position(logprobs, token_id, shown) for logprobs, token_id in positions]}


def _chat_position(logprobs: Mapping[int, Logprob], own_id: int, shown: ShownTokens) -> dict[str, Any]:
    def entry(token_id: int) -> dict[str, Any]:
        item = logprobs[token_id]
        return {
            "token": shown.name(token_id, item.decoded_token),
            "logprob": max(item.logprob, LEAST_LOGPROB),
            "bytes": shown.bytes_of(token_id, item.decoded_token),
        }

    # The position's own token is included even if it is unlikely.
    top = sorted(logprobs, key=lambda token_id: logprobs[token_id].rank or 0)
    top = top if shown.num_logprobs == -1 else top[: shown.num_logprobs or 0]
    return {**entry(own_id), "top_logprobs": [entry(token_id) for token_id in top]}


def prompt_positions(output: RequestOutput, shown: ShownTokens) -> list[Any] | None:
    """Return the log-probabilities of a prompt's tokens in vLLM's format, by token id; None if not requested."""

    def entry(token_id: int, item: Logprob) -> dict[str, Any]:
        name, logprob = shown.name(token_id, item.decoded_token), max(item.logprob, LEAST_LOGPROB)
        return {"logprob": logprob, "rank": item.rank, "decoded_token": name}

    if (positions := output.prompt_logprobs) is None:
        return None
    return [
        None if found is None else {str(token_id): entry(token_id, item) for token_id, item in found.items()}
        for found in positions
    ]


def text_choice(choice: CompletionOutput, shown: ShownTokens) -> TextChoice:
    """Return one answer to a prompt."""
    found = choice.logprobs
    logprobs = None if found is None else text_logprobs(found, choice.token_ids, shown)[0]
    return {"index": choice.index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def text_logprobs(
    positions: Sequence[Mapping[int, Logprob] | None], token_ids: Sequence[int], shown: ShownTokens,
    start: int = 0, first_token: str = "",
) -> tuple[dict[str, list[Any]], int]:  # fmt: skip
    """Return log-probabilities of tokens, and the number of characters up to their end, given that before them.

    A token without any, such as a prompt's first, has the text `first_token`. A token in the middle of a character has
    the offset of that character.
    """
    own = [None if found is None else found[token_id] for found, token_id in zip(positions, token_ids, strict=True)]
    texts = [first_token if item is None else item.decoded_token or "" for item in own]
    offsets = []
    for token_id, text in zip(token_ids, texts, strict=True):
        # In UTF-8, all bytes of a character but the first are 10xxxxxx in binary.
        begins = [byte & 0xC0 != 0x80 for byte in shown.bytes_of(token_id, text) or text.encode()]
        offsets.append(start - (begins[:1] == [False]))
        start += sum(begins)
    logprobs: dict[str, list[Any]] = {
        "tokens": [shown.name(token_id, text) for token_id, text in zip(token_ids, texts, strict=True)],
        "token_logprobs": [None if item is None else max(item.logprob, LEAST_LOGPROB) for item in own],
        "top_logprobs": [
            None
            if logprobs is None
            else {shown.name(i, item.decoded_token): max(item.logprob, LEAST_LOGPROB) for i, item in logprobs.items()}
            for logprobs in positions
        ],
        "text_offset": offsets,
    }
    return logprobs, start
