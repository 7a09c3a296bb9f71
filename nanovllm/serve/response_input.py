"""The input of `POST /v1/responses` as messages."""

from __future__ import annotations

from typing import Any

from nanovllm.serve.protocol import ChatMessage
from nanovllm.serve.response_protocol import ResponseBody
from nanovllm.text.chat_template import normal_content

_CONTENT = "a message's content is a string, or a list of parts of text"


def response_messages(body: ResponseBody) -> list[ChatMessage]:
    """Return the input as messages; the calls of one turn are one message's.

    Raises:
        ValueError: an item is neither a message of text, nor a call of a function or what it has returned.
    """
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(_call(item))
        elif kind == "function_call_output":
            content = normal_content(item.get("output"), _CONTENT)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content})
        # The model does not get its thoughts back.
        elif kind != "reasoning":
            messages.append(_message(item))
    return [ChatMessage.model_validate(message) for message in messages]


def _call(item: dict[str, Any]) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise ValueError(f"a function_call has a name and arguments as text, not {item!r:.80}")
    function = {"name": name, "arguments": arguments}
    return {"id": str(item.get("call_id")), "type": "function", "function": function}


def _message(item: dict[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if item.get("type", "message") != "message" or not isinstance(role, str):
        raise ValueError(f"an item of input is a message, a function_call or its output, not {item!r:.80}")
    return {"role": role, "content": normal_content(item.get("content"), _CONTENT)}
