"""Calls of tools in a model's answer, as text comes, and the grammars that make a model call them.

Two forms are known, each the one that the chat templates of its models teach. Hermes (Qwen): JSON between tags,
`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`. Llama 3: JSON alone, perhaps after `<|python_tag|>`,
`{"name": "add", "parameters": {"a": 1}}`, several with `;` between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.outputs import RequestOutput, ToolCall
from nanovllm.text.grammar_text import lark_json


@dataclass(frozen=True)
class ToolCallFormat:
    """How calls are written.

    Attributes:
        begin, end: what stands around each call.
        separator: what stands between calls.
        arguments: the key of a call's arguments.
        prefix: what may stand before the first call, and is no text.
        anywhere: whether text may stand before the first call.
    """

    begin: str
    end: str
    separator: str
    arguments: str
    prefix: str
    anywhere: bool


HERMES = ToolCallFormat("<tool_call>", "</tool_call>", "\n", "arguments", "", True)
LLAMA3_JSON = ToolCallFormat("", "", ";", "parameters", "<|python_tag|>", False)
TOOL_CALL_FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}


def tool_call_format(name: str, tokenizer: Any) -> ToolCallFormat:
    """Return a format by its name; "auto": the one that the tokenizer's chat template or vocabulary shows.

    Raises:
        ValueError: an unknown name.
    """
    if name != "auto":
        if name not in TOOL_CALL_FORMATS:
            raise ValueError(f"tool_call_parser must be auto, {' or '.join(TOOL_CALL_FORMATS)}, not {name!r}")
        return TOOL_CALL_FORMATS[name]
    template = str(getattr(tokenizer, "chat_template", None))
    if HERMES.begin in template or tokenizer is None:
        return HERMES
    return LLAMA3_JSON if LLAMA3_JSON.prefix in tokenizer.get_vocab() else HERMES


@dataclass
class ToolCallDelta:
    """What is new of a call.

    Attributes:
        index: of the answer's calls.
        name: of the function; None but for the call's first delta.
        arguments: a piece of its arguments, which together are a JSON object.
    """

    index: int
    name: str | None
    arguments: str


_NO_PARAMETERS: dict[str, Any] = {"properties": {}}
_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(rf'\s*\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)', re.DOTALL)
_FIRST_KEY = re.compile(r'\s*(?:$|\{\s*(?:$|"(?:$|(?:name|type|function|arguments|parameters)"|[a-z]{0,10}$)))')
_JSON_PARTS = re.compile(r'[{}"\\]')


class _ObjectScanner:
    """Finds the end of a JSON object that comes in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find_end(self, text: str) -> int | None:
        """Return where the object ends in further text; None if it goes on."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = _JSON_PARTS.search(text, at)
            if found is None:
                return None
            at = found.end()
            if found[0] == '"':
                self._in_string = not self._in_string
            elif found[0] == "\\":
                self._escaped = self._in_string
            elif not self._in_string:
                self._depth += 1 if found[0] == "{" else -1
                if self._depth <= 0:
                    return at
        return None


class ToolCallParser:
    """Splits the text of one output into calls and other text.

    The name comes with the first delta of a call, and its arguments as the model writes them. A call whose parts come
    in another order is one delta; what looks like a call and is none, stays text.

    Args:
        form: how calls are written.
        allows_several: whether calls after the first one are wanted; without, they are dropped.
    """

    def __init__(self, form: ToolCallFormat, allows_several: bool = True) -> None:
        self._form = form
        self._allows_several = allows_several
        self._state = "text"
        # Text that may be part of a tag or of a call.
        self._held = ""
        self._scanner = _ObjectScanner()
        # Of the held text, what the scanner has seen.
        self._num_scanned = 0
        self.num_calls = 0

    def append(self, text: str, final: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """Return what new text adds to the text beside the calls, and to the calls. `final`: no text follows."""
        self._held += text
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        steps = {
            "text": self._text, "call": self._call, "arguments": self._arguments, "after": self._after,
            "space": self._space, "plain": self._plain,
        }  # fmt: skip
        before = None
        while before != (self._state, self._held):
            before = self._state, self._held
            for item in steps[self._state](final):
                if isinstance(item, str):
                    content.append(item)
                elif self._allows_several or item.index == 0:
                    calls.append(item)
        return "".join(content), calls

    def _text(self, final: bool) -> Iterator[str | ToolCallDelta]:
        form = self._form
        if not form.anywhere:
            start = self._held.lstrip()
            if final or not form.prefix.startswith(start):
                self._state = "call"
                self._begin_call(start.removeprefix(form.prefix))
            return
        before, tag, rest = self._held.partition(form.begin)
        if tag:
            self._state = "call"
            self._begin_call(rest)
            yield before.rstrip()
        elif final:
            self._held = ""
            yield before
        else:
            # What may belong to the tag, and space before it, waits.
            length = next((n for n in range(len(form.begin) - 1, 0, -1) if before.endswith(form.begin[:n])), 0)
            end = len(before[: len(before) - length].rstrip())
            self._held = before[end:]
            yield before[:end]

    def _space(self, final: bool) -> Iterator[str | ToolCallDelta]:
        """Drop the space after a call."""
        self._held = self._held.lstrip()
        if self._held:
            self._state = "text"
        yield ""

    def _plain(self, final: bool) -> Iterator[str | ToolCallDelta]:
        held, self._held = self._held, ""
        yield held

    def _begin_call(self, held: str) -> None:
        self._held, self._scanner, self._num_scanned = held, _ObjectScanner(), 0

    def _call(self, final: bool) -> Iterator[str | ToolCallDelta]:
        """Wait for the name, or else for the whole call."""
        head = _HEAD.match(self._held)
        if head is not None and (name := _loads(head[1])) is not None:
            self._state = "arguments"
            self._begin_call(self._held[head.end() :])
            yield ToolCallDelta(self.num_calls, str(name), "")
            self.num_calls += 1
            return
        end = self._scanner.find_end(self._held[self._num_scanned :])
        whole = None if end is None else self._held[: self._num_scanned + end]
        self._num_scanned = len(self._held)
        call = None if whole is None else _call_of(_loads(whole), self._form)
        if whole is not None and call is not None:
            self._state, self._held = "after", self._held[len(whole) :]
            yield ToolCallDelta(self.num_calls, call.name, json.dumps(call.arguments, ensure_ascii=False))
            self.num_calls += 1
        elif whole is not None or final or _FIRST_KEY.match(self._held) is None:
            # It is no call. What follows the tag may have another one in it.
            self._state = "text" if self._form.anywhere else "plain"
            yield self._form.begin

    def _arguments(self, final: bool) -> Iterator[str | ToolCallDelta]:
        end = self._scanner.find_end(self._held)
        piece = self._held if end is None else self._held[:end]
        self._held = self._held[len(piece) :]
        if end is not None:
            self._state = "after"
        if piece:
            yield ToolCallDelta(self.num_calls - 1, None, piece)

    def _after(self, final: bool) -> Iterator[str | ToolCallDelta]:
        """Drop what ends a call, and find the next one."""
        form = self._form
        rest = self._held.lstrip().removeprefix("}").lstrip()
        if form.anywhere:
            if rest.startswith(form.end):
                self._state, self._held = "space", rest[len(form.end) :]
            elif final or not form.end.startswith(rest):
                self._state, self._held = "text", rest
        elif rest.startswith(form.separator):
            self._state = "call"
            self._begin_call(rest[len(form.separator) :].lstrip())
        elif rest:
            self._state, self._held = "plain", rest
        yield ""


def parse_tool_calls(text: str, form: ToolCallFormat = HERMES) -> list[ToolCall]:
    """Return the calls that a whole answer asks for; those whose arguments are no JSON object are left out.

    Example:
        >>> parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        [ToolCall(name='add', arguments={'a': 1})]
    """
    names: list[str] = []
    arguments: list[str] = []
    for delta in ToolCallParser(form).append(text, final=True)[1]:
        if delta.name is not None:
            names.append(delta.name)
            arguments.append("")
        arguments[-1] += delta.arguments
    parsed = [(name, _loads(written)) for name, written in zip(names, arguments, strict=True)]
    return [ToolCall(name, value) for name, value in parsed if isinstance(value, dict)]


def add_tool_calls(outputs: Iterable[RequestOutput], tokenizer: Any) -> None:
    """Set the `tool_calls` of answers, in the form that the tokenizer's chat template asks for."""
    form = tool_call_format("auto", tokenizer)
    for item in (item for output in outputs for item in output.outputs):
        item.tool_calls = parse_tool_calls(item.text, form)


def _loads(text: str) -> Any:
    """Return what JSON says; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any, form: ToolCallFormat) -> ToolCall | None:
    """Return the call that an object is; without tags around it, it must have parameters."""
    if not isinstance(value, dict):
        return None
    call = value["function"] if isinstance(value.get("function"), dict) else value
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {} if form.begin else None))
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    return ToolCall(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def tool_call_grammar(
    functions: Iterable[Mapping[str, Any]], form: ToolCallFormat, *, several: bool, answer: Any = None
) -> str:
    """Return a Lark grammar of calls whose arguments match the functions' parameters.

    Args:
        functions: each with its `name` and, if it has any, `parameters`, a JSON schema.
        form: how calls are written.
        several: whether there may be more than one call.
        answer: the JSON schema of an answer that may come instead of calls; None: there must be a call.
    """
    begin, end = (form.begin + "\n", "\n" + form.end) if form.begin else ("", "")
    calls, rules = [], []
    for index, function in enumerate(functions):
        head = f'{begin}{{"name": {json.dumps(function["name"])}, "{form.arguments}": '
        calls.append(f"call{index}")
        rules.append(f"call{index}: {json.dumps(head)} arguments{index} {json.dumps('}' + end)}")
        schema = {**_NO_PARAMETERS, **(function.get("parameters") or {}), "type": "object"}
        rules.append(f"arguments{index}: {lark_json(schema)}")
    more = f" ({json.dumps(form.separator)} call)*" if several else ""
    if answer is not None:
        rules.append(f"answer: {lark_json(answer)}")
    start = f"start: call{more}" + (" | answer" if answer is not None else "")
    return "\n".join([start, f"call: {' | '.join(calls)}", *rules])
