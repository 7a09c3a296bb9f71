"""The answers of OpenAI's API as types, with vLLM's further fields; a missing field is an error of the type checker."""

from __future__ import annotations

from typing import Any, Literal

# Those of `typing` are for Python 3.11, and 3.12 where pydantic reads them.
from typing_extensions import NotRequired, TypedDict

PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class TopLogprob(TypedDict):
    """A token that was likely; `bytes` of a part of a character are those of the part."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of a chat's answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprob]
    refusal: NotRequired[None]


class TextLogprobs(TypedDict):
    """Log-probabilities of a completion; `text_offset`: where in its text the tokens begin."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptDetails(TypedDict):
    """Which tokens of the prompt did not have to be computed."""

    cached_tokens: int


class UsageCounts(TypedDict):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptDetails]


class CalledFunction(TypedDict):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCallItem(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(TypedDict):
    """An answer to messages; `reasoning` and `reasoning_content` are the same."""

    role: Literal["assistant"]
    content: str | None
    refusal: NotRequired[None]
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallItem]]


class ChatChoice(TypedDict):
    """One answer to messages."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """Answers to messages."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageCounts
    system_fingerprint: NotRequired[str]
    prompt_logprobs: NotRequired[PromptLogprobs | None]
    prompt_token_ids: NotRequired[list[int]]


class FunctionDelta(TypedDict):
    """What is new of a call's function; the name comes once."""

    name: NotRequired[str]
    arguments: str


class ToolCallPiece(TypedDict):
    """What is new of a call; id and type come once."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict, total=False):
    """What is new of an answer to messages."""

    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCallPiece]


class ChunkChoice(TypedDict):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """What is new of answers to messages."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: NotRequired[UsageCounts | None]
    prompt_token_ids: NotRequired[list[int]]


class TextChoice(TypedDict):
    """One completion, or what is new in it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class Completion(TypedDict):
    """Completions, or what is new in them."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: NotRequired[UsageCounts | None]
    system_fingerprint: NotRequired[str]


class OutputText(TypedDict):
    """Text of a response."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class MessageItem(TypedDict):
    """A message of a response."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: str
    content: list[OutputText]


class CallItem(TypedDict):
    """A call of a function that a response asks for."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: str


class ReasoningDetails(TypedDict):
    """Which tokens of the answer were thoughts."""

    reasoning_tokens: int


class InputDetails(PromptDetails):
    """Which tokens of the input did not have to be computed."""

    cache_write_tokens: int


class ResponseUsage(TypedDict):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    """Why a response is not complete."""

    reason: str


class ResponseAnswer(TypedDict):
    """A response, or where it stands."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: str
    incomplete_details: IncompleteDetails | None
    output: list[MessageItem | CallItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    text: dict[str, Any]
    metadata: dict[str, str]
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    store: bool
    error: None
