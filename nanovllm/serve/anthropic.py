"""Endpoints `/v1/messages` and `/v1/messages/count_tokens` of Anthropic's API, for text and tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from nanovllm.client.engine_thread import RequestStream
from nanovllm.serve.answers import Event, TranslatedAnswer
from nanovllm.serve.chat_completions import answer_options, submit_chat
from nanovllm.serve.errors import ERRORS
from nanovllm.serve.protocol import MOST_MESSAGES, MOST_TOOLS, Body, ChatBody, Stops, TextOrObjects
from nanovllm.serve.service import Service, ServiceDep, make_router
from nanovllm.text.answers import AnswerSplitter
from nanovllm.text.chat_template import normal_content

router = make_router(prompt=["messages"], stop=["stop_sequences"], structured_outputs=["tools", "output_config.format"])
Block = dict[str, Any]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Earlier reasoning is not shown to the model.
_THOUGHTS = ("thinking", "redacted_thinking")
_CONTENT = "{} is a string, or a list of blocks of type text, tool_use or tool_result"


class Turn(Body):
    """A message; its content is a text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: TextOrObjects


class MessagesTool(BaseModel):
    """A tool that the model may call; other fields are ignored."""

    model_config = ConfigDict(extra="allow")

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]


class MessagesToolChoice(Body):
    """The choice of a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class NoThinking(Body):
    """Disabled thinking; other values are not supported."""

    type: Literal["disabled"]


class OutputFormat(Body):
    """A JSON schema for the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The format of the answer."""

    format: OutputFormat | None = None


class CountTokensBody(Body):
    """A request to count the tokens of messages."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    system: TextOrObjects | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: NoThinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountTokensBody):
    """A request to answer messages."""

    max_tokens: int
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class MessagesErrorDetail(BaseModel):
    """An error's type and message."""

    type: str
    message: str


class MessagesError(BaseModel):
    """An error answer."""

    type: Literal["error"]
    error: MessagesErrorDetail


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**answer, "model": MessagesError} for status, answer in ERRORS.items()
}


@router.post("/v1/messages", response_model=None, responses=_ERRORS)
async def messages(body: MessagesBody, service: ServiceDep) -> Response:
    """Answer messages in Anthropic's format."""
    form = None if body.output_config is None else body.output_config.format
    fields = {name: getattr(body, name) for name in ("temperature", "top_k", "top_p", "max_tokens")}
    fields |= {"stop": body.stop_sequences or None, "stream": body.stream}
    if form is not None:
        schema = {"name": "answer", "schema": form.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    streams, (splitter,) = await submit_chat(service, messages_chat(body, **fields), cuts_output=True)
    return await _MessagesAnswer(service, streams, splitter).respond(body.stream)


@router.post("/v1/messages/count_tokens", responses=_ERRORS)
async def num_tokens(body: CountTokensBody, service: ServiceDep) -> dict[str, int]:
    """Count the tokens of messages."""
    service.check_model(body.model)
    chat = messages_chat(body)
    template = service.template(chat, answer_options(service, chat).template_tools())
    return {"input_tokens": len(await service.encode(chat.messages, None, template))}


def messages_chat(body: CountTokensBody, **fields: Any) -> ChatBody:
    """Translate a request to a chat with additional `fields`; ValueError or ApiError if a block or value is invalid."""
    found: list[Block] = []
    if body.system is not None:
        found.append({"role": "system", "content": normal_content(body.system, _CONTENT.format("system"))})
    for index, turn in enumerate(body.messages):
        found += _turn_messages(turn, _CONTENT.format(f"messages[{index}].content"))
    # The model continues a final assistant message.
    continues = body.messages[-1].role == "assistant"
    return ChatBody.translated(
        {
            "model": body.model,
            "messages": found,
            "tools": [{"type": "function", "function": _function(tool)} for tool in body.tools or []],
            **({} if body.tool_choice is None else _tool_choice(body.tool_choice)),
            "chat_template_kwargs": None if body.thinking is None else {"enable_thinking": False},
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
            "separate_reasoning": False,
            **fields,
        }
    )


def _turn_messages(turn: Turn, error: str) -> Iterator[Block]:
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    texts, calls, has_results = list[Block](), list[Block](), False
    for block in turn.content:
        if block.get("type") == "tool_result" and turn.role == "user":
            has_results = True
            content = normal_content(block.get("content") or "", error)
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": content}
        elif block.get("type") == "tool_use" and turn.role == "assistant":
            calls.append(_call(block))
        elif block.get("type") not in _THOUGHTS or turn.role != "assistant":
            texts.append(block)
    content = normal_content(texts, error)
    # A turn may consist of tool results only.
    if content or calls or not has_results:
        yield {"role": turn.role, "content": content or (None if calls else ""), "tool_calls": calls}


def _call(block: Block) -> Block:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"a tool_use has a name and an object as input, not {block!r:.80}")
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": str(block.get("id")), "type": "function", "function": function}


def _tool_choice(given: MessagesToolChoice) -> dict[str, Any]:
    choice: Any = _CHOICES.get(given.type)
    if given.type == "tool":
        if given.name is None:
            raise ValueError("tool_choice of type tool needs a name")
        choice = {"type": "function", "function": {"name": given.name}}
    return {"tool_choice": choice, "parallel_tool_calls": not given.disable_parallel_tool_use}


def _function(tool: MessagesTool) -> dict[str, Any]:
    return {**tool.model_dump(include={"name", "description"}, exclude_none=True), "parameters": tool.input_schema}


class _MessagesAnswer(TranslatedAnswer):
    def __init__(self, service: Service, streams: list[RequestStream], splitter: AnswerSplitter) -> None:
        super().__init__(service, streams, splitter)
        self.head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": service.model}

    def _first_chunks(self) -> Iterator[Event]:
        head: Block = {**self.head, "content": [], "stop_reason": None, "stop_sequence": None}
        yield "message_start", {"message": {**head, "usage": self._counts()}}

    def _new_item(self, name: str | None, call_id: str) -> Block:
        if name is None:
            return {"type": "text", "text": ""}
        return {"type": "tool_use", "id": f"toolu_{call_id.removeprefix('call_')}", "name": name, "input": {}}

    def _begin_item(self, item: Block) -> Iterator[Event]:
        yield "content_block_start", {"index": len(self.items) - 1, "content_block": item}

    def _piece_event(self, item: Block, piece: str) -> Event:
        delta = {"type": "input_json_delta", "partial_json": piece}
        if item["type"] == "text":
            delta = {"type": "text_delta", "text": piece}
        return "content_block_delta", {"index": len(self.items) - 1, "delta": delta}

    def _end_item(self, item: Block, content: str, status: str) -> Iterator[Event]:
        item |= {"text": content} if item["type"] == "text" else {"input": _input(content)}
        yield "content_block_stop", {"index": len(self.items) - 1}

    def _end(self) -> Iterator[Event]:
        yield "message_delta", {"delta": self._stop_reason(), "usage": self._counts()}
        yield "message_stop", {}

    def _body(self) -> dict[str, Any]:
        return {**self.head, "content": self.items, **self._stop_reason(), "usage": self._counts()}

    def _counts(self) -> dict[str, int]:
        return {"input_tokens": self._num_prompt_tokens, "output_tokens": self._num_tokens}

    def _stop_reason(self) -> dict[str, Any]:
        if self.finish_reason not in ("stop", "tool_calls"):
            reason = "max_tokens"
        elif isinstance(self.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stop_reason}
        else:
            reason = "tool_use" if self.finish_reason == "tool_calls" else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; empty if they are missing, or if the answer was cut within them."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
