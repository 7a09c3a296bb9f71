"""Calls of tools in a model's answer, in the form that Qwen's chat templates teach (Hermes): JSON between tags."""

from __future__ import annotations

import json
import re
from typing import Any

from nanovllm.outputs import ToolCall

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Return the calls that an answer asks for; what is no call of a function by name is left out.

    Example:
        >>> parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        [ToolCall(name='add', arguments={'a': 1})]
    """
    found = (_parse(match[1]) for match in _CALL.finditer(text))
    return [call for call in found if call is not None]


def _parse(text: str) -> ToolCall | None:
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], arguments) if isinstance(arguments, dict) else None
