"""Anthropic's messages and tools as those of chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from nanovllm.serve.anthropic_protocol import CountTokensBody, MessagesBody, MessagesTool, Turn
from nanovllm.serve.protocol import ChatMessage, SamplingBody
from nanovllm.text.answers import AnswerFormat, AnswerOptions
from nanovllm.text.chat_template import normal_content

Block = dict[str, Any]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# The model does not get its thoughts back.
_THOUGHTS = ("thinking", "redacted_thinking")
_CONTENT = "content is a string, or a list of blocks of type text, tool_use or tool_result"


def chat_messages(body: CountTokensBody) -> list[ChatMessage]:
    """Return messages as those of chats.

    Raises:
        ValueError: there is a block that is neither text, nor a call of a tool or its result.
    """
    messages: list[Block] = []
    if body.system is not None:
        messages.append({"role": "system", "content": normal_content(body.system, _CONTENT)})
    for turn in body.messages:
        messages += _turn_messages(turn)
    return [ChatMessage.model_validate(message) for message in messages]


def _turn_messages(turn: Turn) -> Iterator[Block]:
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    texts, calls, has_results = list[Block](), list[Block](), False
    for block in turn.content:
        if block.get("type") == "tool_result" and turn.role == "user":
            has_results = True
            content = normal_content(block.get("content") or "", _CONTENT)
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": content}
        elif block.get("type") == "tool_use" and turn.role == "assistant":
            calls.append(_call(block))
        elif block.get("type") not in _THOUGHTS or turn.role != "assistant":
            texts.append(block)
    content = normal_content(texts, _CONTENT)
    # What tools have returned may be all that there is.
    if content or calls or not has_results:
        yield {"role": turn.role, "content": content or (None if calls else ""), "tool_calls": calls}


def _call(block: Block) -> Block:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"a tool_use has a name and an object as input, not {block!r:.80}")
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": str(block.get("id")), "type": "function", "function": function}


def sampling_body(body: MessagesBody) -> SamplingBody:
    """Return what a request says of sampling."""
    given = {name: getattr(body, name) for name in ("temperature", "top_k", "top_p", "max_tokens")}
    form = None if body.output_config is None else body.output_config.format
    if form is not None:
        given["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}}
    return SamplingBody.model_validate({**given, "stop": body.stop_sequences or None})


def tool_use(body: CountTokensBody, form: AnswerFormat) -> AnswerOptions:
    """Return what a request says of tools.

    Raises:
        ValueError: a call is required of a tool that is not there.
    """
    tools = [{"type": "function", "function": _function(tool)} for tool in body.tools or []]
    given = body.tool_choice
    if given is None:
        return AnswerOptions.of(form, tools)
    choice: str | dict[str, Any]
    if given.type == "tool":
        if given.name is None:
            raise ValueError("tool_choice of type tool needs a name")
        choice = {"function": {"name": given.name}}
    else:
        choice = _CHOICES[given.type]
    return AnswerOptions.of(form, tools, choice, not given.disable_parallel_tool_use)


def _function(tool: MessagesTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {name: value for name, value in function.items() if value is not None}
