"""Endpoint `/v1/responses` for text and function calls, translated to a chat; nothing is stored."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BeforeValidator, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from nanovllm.client.engine_thread import RequestStream
from nanovllm.serve.answers import Event, TranslatedAnswer
from nanovllm.serve.chat_completions import submit_chat
from nanovllm.serve.errors import answers, encode_json
from nanovllm.serve.protocol import (
    MOST_FIELDS,
    MOST_TOOLS,
    Body,
    ChatBody,
    JsonSchemaFormat,
    TextOrObjects,
    ToolChoiceMode,
    ToolFunction,
    at_most,
)
from nanovllm.serve.service import Service, ServiceDep, make_router
from nanovllm.text.answers import AnswerSplitter
from nanovllm.text.chat_template import normal_content

router = make_router(
    prompt=["input"], messages=["input"], max_tokens=["max_output_tokens"], response_format=["text.format"],
    structured_outputs=["tools", "text.format"],
)  # fmt: skip
_CONTENT = "{} is a string, or a list of parts of text"


class ResponseTextFormat(JsonSchemaFormat):
    """The format of a response's text; the fields of a JSON schema are its own."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""


class ResponseText(Body):
    """The format of a response's text."""

    format: ResponseTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="without effect")


class ResponseTool(ToolFunction):
    """A function that the model may call."""

    type: Literal["function"]


class ResponseToolChoice(Body):
    """The function to call."""

    type: Literal["function"]
    name: str


class ResponseBody(Body):
    """A request for a text response."""

    model: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(partial(at_most, MOST_FIELDS))] | None = None
    input: TextOrObjects
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: ResponseText | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoiceMode | ResponseToolChoice | None = None
    # Not supported.
    truncation: Literal["disabled"] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    parallel_tool_calls: bool | None = None


class ResponseAnswer(TypedDict):
    """A response, or its state in a stream."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: str
    incomplete_details: dict[str, str] | None
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: None


@router.post("/v1/responses", response_model=None, responses=answers(ResponseAnswer))
async def responses(body: ResponseBody, service: ServiceDep) -> Response:
    """Answer a text input."""
    streams, (splitter,) = await submit_chat(service, response_chat(body))
    return await _TranslatedResponse(service, streams, splitter, body).respond(body.stream)


def response_chat(body: ResponseBody) -> ChatBody:
    """Translate a request to a chat; ValueError or ApiError if an item or a value is invalid."""
    choice: Any = body.tool_choice
    if isinstance(choice, ResponseToolChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    form = body.text and body.text.format
    schema = form and form.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
    tools = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in body.tools or []]
    return ChatBody.translated(
        {
            **{name: getattr(body, name) for name in ("model", "temperature", "top_p", "parallel_tool_calls")},
            "messages": [*_messages(body)],
            "max_tokens": body.max_output_tokens,
            "response_format": form and {"type": form.type, "json_schema": schema},
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "tool_choice": choice,
            "separate_reasoning": False,
            "stream": body.stream,
        }
    )


def _messages(body: ResponseBody) -> list[dict[str, Any]]:
    """Return the input as messages; the calls of one turn become one message."""
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    for index, item in enumerate(items):
        kind, place = item.get("type", "message"), f"input[{index}]"
        if kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(_call(item, place))
        elif kind == "function_call_output":
            content = normal_content(item.get("output"), _CONTENT.format(f"{place}.output"))
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content})
        # Earlier reasoning is not shown to the model.
        elif kind != "reasoning":
            messages.append(_message(item, place))
    return messages


def _call(item: dict[str, Any], place: str) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    if not all(isinstance(value, str) for value in function.values()):
        raise ValueError(f"{place}: a function_call has a name and arguments as text, not {item!r:.80}")
    return {"id": str(item.get("call_id")), "type": "function", "function": function}


def _message(item: dict[str, Any], place: str) -> dict[str, Any]:
    role = item.get("role")
    if item.get("type", "message") != "message" or not isinstance(role, str):
        raise ValueError(f"{place} is no message, function_call or its output: {item!r:.80}")
    return {"role": role, "content": normal_content(item.get("content"), _CONTENT.format(f"{place}.content"))}


class _TranslatedResponse(TranslatedAnswer):
    is_never_empty = True

    def __init__(
        self, service: Service, streams: list[RequestStream], splitter: AnswerSplitter, body: ResponseBody
    ) -> None:
        super().__init__(service, streams, splitter)
        # Kept as JSON: parsed fields could take twenty times the memory for as long as the answer runs.
        self._begun = encode_json(_begun(service, body))
        self._number = -1

    def _encoded(self, chunk: Event) -> bytes:
        kind, fields = chunk
        self._number += 1
        return super()._encoded((kind, {"sequence_number": self._number, **fields}))

    def _first_chunks(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield kind, {"response": json.loads(self._begun)}

    def _new_item(self, name: str | None, call_id: str) -> dict[str, Any]:
        if name is None:
            head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant"}
            return {**head, "status": "in_progress", "content": []}
        head = {"id": f"fc_{uuid4().hex}", "type": "function_call", "call_id": call_id, "name": name}
        return {**head, "arguments": "", "status": "in_progress"}

    def _begin_item(self, item: dict[str, Any]) -> Iterator[Event]:
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": item}
        if item["type"] == "message":
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": _part("")}

    def _piece_event(self, item: dict[str, Any], piece: str) -> Event:
        fields = {**self._place(), "delta": piece}
        if item["type"] == "message":
            return "response.output_text.delta", {**fields, "content_index": 0, "logprobs": []}
        return "response.function_call_arguments.delta", fields

    def _end_item(self, item: dict[str, Any], content: str, status: str) -> Iterator[Event]:
        item["status"], place = status, self._place()
        if item["type"] == "message":
            item["content"] = [_part(content)]
            yield "response.output_text.done", {**place, "content_index": 0, "text": content, "logprobs": []}
            yield "response.content_part.done", {**place, "content_index": 0, "part": _part(content)}
        else:
            item["arguments"] = content
            yield "response.function_call_arguments.done", {**place, "arguments": content, "name": item["name"]}
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _end(self) -> Iterator[Event]:
        response = self._body()
        kind = "completed" if response["status"] == "completed" else "incomplete"
        yield f"response.{kind}", {"response": response}

    def _body(self) -> dict[str, Any]:
        statuses = {"stop": "completed", "tool_calls": "completed", "abort": "cancelled"}
        status, usage = statuses.get(self.finish_reason or "", "incomplete"), self._usage()
        return {
            **json.loads(self._begun),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self.items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": self._num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _begun(service: Service, body: ResponseBody) -> dict[str, Any]:
    """Return the response to a request, before any output."""
    choice = body.tool_choice
    text = {} if body.text is None else body.text.model_dump(exclude_none=True, exclude_unset=True, by_alias=True)
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": service.model,
        **{name: getattr(body, name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")},
        "text": {"format": {"type": "text"}, **text},
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": choice.model_dump() if isinstance(choice, ResponseToolChoice) else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or []],
        "store": False,
        "error": None,
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
