"""Parsers of answers: generators over a growing text that yield its text, reasoning and tool calls."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nanovllm.text.answer_formats import (
    BARE_ENDS,
    BARE_TAGS,
    SYNTAX_BY_TAG,
    Parameters,
    ReasoningFormat,
    Start,
    Syntax,
    ToolCallFormat,
)
from nanovllm.text.text_reader import PYTHON_PARTS, EndFinder, TextReader, Wait, partial_start


class Reasoning(str):
    """A piece of reasoning."""

    __slots__ = ()


@dataclass
class ToolCallDelta:
    """A new part of the answer's call number `index`: a piece of its arguments, which together are a JSON object.

    The call's first delta has the function's name, and the model's id of the call, if any.
    """

    index: int
    name: str | None
    arguments: str
    id: str | None = None


Events = Generator["str | ToolCallDelta | None", None, None]
"""Yields text, pieces of reasoning and of calls, and None to wait for more text."""
Calls = Generator["str | ToolCallDelta | None", None, bool]
"""Events of calls; returns whether there was a call. If not, the position is anywhere after the tag."""


def reasoning(reader: TextReader, start: Start, form: ReasoningFormat, keeps_tags: bool) -> Events:
    """Read the reasoning; the answer follows.

    Space around the tags belongs to neither part, unless it `keeps_tags`. A begin tag counts only at the start of the
    output. If the `start` is "unknown", text before an end tag is reasoning, so text waits for an end tag.
    """
    ends = tuple(end for _, end in form.tags)
    if start in ("before", "unknown"):
        begin = yield from reader.skip(*(begin for begin, _ in form.tags))
        if begin:
            start, ends = "inside", tuple(end for own, end in form.tags if own == begin)
            if keeps_tags:
                yield Reasoning(reader.text[: reader.at])
        else:
            reader.at = 0
        while start == "unknown" and not any(end in reader.text for end in ends):
            if reader.is_final:
                return
            yield None
        reader.trim()
    if start in ("inside", "unknown"):
        yield from _thoughts(reader, ends, keeps_tags)


def _thoughts(reader: TextReader, ends: tuple[str, ...], keeps_tags: bool) -> Events:
    """Read the text up to an end tag, and the tag."""
    if not keeps_tags:
        yield from reader.skip_space()
        reader.trim()
    while True:
        text = reader.text
        at, tag = min(((text.find(end), end) for end in ends if end in text), default=(len(text), ""))
        if not tag and not reader.is_final:
            # Hold back a possible start of an end tag, and space before it.
            at = len(text[: partial_start(text, ends)].rstrip())
        thoughts = text[:at]
        if tag:
            thoughts = thoughts + tag if keeps_tags else thoughts.rstrip()
        reader.at = at + len(tag)
        reader.trim()
        yield Reasoning(thoughts)
        if tag and not keeps_tags:
            yield from reader.skip_space()
        if tag or reader.is_final:
            return
        yield None


def plain(reader: TextReader) -> Events:
    """Read text without calls."""
    while True:
        yield reader.text[reader.at :]
        reader.at = len(reader.text)
        reader.trim()
        if reader.is_final:
            return
        yield None


_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_HEADER_WORDS = ("assistant", "to=", "analysis", "commentary", "final")
_HEADER = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")
_RECIPIENT = re.compile(r"to=([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def harmony(reader: TextReader) -> Events:
    """Read messages in OpenAI's harmony format (https://cookbook.openai.com/articles/openai-harmony).

    Messages in the channel `analysis` are reasoning, messages to `functions.name` are calls, and all others are text.
    """
    num_calls = 0
    while True:
        yield from reader.skip_space()
        reader.trim()
        if not reader.text:
            return
        header, is_tagged = "", bool((yield from reader.peek(*_HEADER)))
        # A prompt may end within a header, and a text may have no header.
        if is_tagged or (yield from reader.peek(*_HEADER_WORDS)):
            header, end = yield from reader.until("<|message|>")
            if not end and not is_tagged:
                yield header
        reader.trim()
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1].startswith("functions."):
            is_empty = True
            yield ToolCallDelta(num_calls, recipient[1].removeprefix("functions."), "")
            for piece in _message(reader):
                is_empty = is_empty and not piece
                yield ToolCallDelta(num_calls, None, piece) if piece else None
            if is_empty:
                yield ToolCallDelta(num_calls, None, "{}")
            num_calls += 1
        else:
            is_reasoning = channel is not None and channel[1] == "analysis"
            for piece in _message(reader):
                yield Reasoning(piece) if piece and is_reasoning else piece


def _message(reader: TextReader) -> Generator[str | None, None, None]:
    """Yield the text of a message, and skip its end."""
    while True:
        end = partial_start(reader.text, _ENDS) if not reader.is_final else len(reader.text)
        places = [(at, tag) for tag in _ENDS if (at := reader.text.find(tag)) >= 0]
        at, tag = min(places, default=(end, ""))
        if at:
            yield reader.text[:at]
        # The tag that opens the next message is part of its header.
        reader.at = at if tag in _HEADER else at + len(tag)
        reader.trim()
        if tag or reader.is_final:
            return
        yield None


_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)', re.DOTALL)
"""The beginning of a call whose name precedes its arguments."""
_FIRST_KEYS = tuple(
    f'"{key}"' for key in ("name", "type", "id", "index", "tool", "function", "arguments", "parameters", "tool_call_id")
)
_GEMMA = re.compile(r'<\|"\|>(.*?)<\|"\|>|([A-Za-z_][\w.-]*)(?=\s*:)|\bNone\b|.', re.DOTALL)
_NAME = re.compile(r"[\w.-]")
_CALL_ID = re.compile(r"[\w.:-]")
_PYTHON_CALLS = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_LITERAL_ERRORS = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
_PYTHON_START = re.compile(r"\[\s*(?:$|[A-Za-z_][\w.]*(?:$|\())")


class CallReader(TextReader):
    """A text reader that finds tool calls.

    A call's first delta has its name; its arguments follow as the model writes them, by character in JSON and by
    argument in other formats. Text that only resembles a call stays text.

    Args:
        form: the model's format of calls.
        functions: the callable functions, each with its `name` and optionally `parameters`, a JSON schema that tells
            which arguments written without quotes are strings.
    """

    def __init__(self, form: ToolCallFormat, functions: Iterable[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self._has_bare_names = form.has_bare_names
        self._tags = (*SYNTAX_BY_TAG, *((*BARE_TAGS, "{", "[") if form.is_bare else ()))
        self._tag_pattern = re.compile("|".join(map(re.escape, self._tags)))
        # Schemas of each function's arguments, by name.
        self._schemas: dict[str, dict[str, Any]] = {}
        for function in functions:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            self._schemas[function["name"]] = properties if isinstance(properties, dict) else {}
        self._num_calls = 0
        # Whether only space precedes the position, on its line or since a tag or a call.
        self._is_new_line = True

    def events(self) -> Events:
        """Read calls, and the text outside of them."""
        while True:
            space = yield from self._plain_text()
            self.trim()
            if not self.text:
                yield space
                return
            tag = yield from self.peek(*self._tags)
            if tag in SYNTAX_BY_TAG:
                is_call = yield from self._tagged_calls(tag)
            else:
                if tag in BARE_TAGS:
                    self.at += len(tag)
                    self._is_new_line = True
                yield from self.skip_space()
                is_call = yield from self._bare_calls()
            if is_call:
                yield from self.skip_space()
                self._is_new_line = True
            else:
                self.at = len(tag)
                yield space + tag
                self._is_new_line = False
                if tag == "{":
                    yield from self._plain_object()

    def _plain_text(self) -> Generator[str | None, None, str]:
        """Yield the text before the next tag or the end; return the space before it."""
        while True:
            found = self._tag_pattern.search(self.text, self.at)
            end = found.start() if found else len(self.text)
            if found is None and not self.is_final:
                end = self.at + partial_start(self.text[self.at :], self._tags)
            text = self.text[self.at : end].rstrip()
            if text:
                yield text
                self.at += len(text)
                self._is_new_line = False
            if found or self.is_final:
                space, self.at = self.text[self.at : end], end
                self._is_new_line = self._is_new_line or "\n" in space
                return space
            self.trim()
            yield None

    def _plain_object(self) -> Generator[str | None, None, None]:
        """Yield an object that neither is nor contains a call, without its first brace."""
        start = self.at
        yield from self.skip_space()
        is_object = bool((yield from self.peek('"')))
        self.at = start
        if is_object:
            yield from self.pieces_to(EndFinder(start, depth=1))

    def _tagged_calls(self, tag: str) -> Calls:
        syntax, count = SYNTAX_BY_TAG[tag], self._num_calls
        is_section = tag in syntax.sections
        if is_section:
            self.at += len(tag)
        while True:
            start = self.at
            is_call = bool((yield from self.skip(syntax.call)))
            if is_call or (is_section and (yield from self.peek("{", "["))):
                is_call = yield from self._call(syntax)
            if not is_call:
                self.at = start
                return self._num_calls > count
            yield from self._skip_ends(syntax.ends)

    def _call(self, syntax: Syntax) -> Calls:
        start = self.at
        if (yield from self.peek("{", "[")) and (yield from self._json_calls()):
            return True
        self.at = start
        if isinstance(syntax.body, str):
            return syntax.body in _READERS and (yield from _READERS[syntax.body](self))
        for parameters in syntax.body:
            self.at = start
            if (yield from self._parameters_call(parameters)):
                return True
        return False

    def _skip_ends(self, ends: tuple[str, ...]) -> Wait:
        while ends:
            start = self.at
            if not (yield from self.skip(*ends)):
                rest = self.text[self.at :]
                # The answer may have been cut within the tag.
                is_cut = bool(rest) and any(end.startswith(rest) for end in ends)
                self.at = len(self.text) if is_cut else start
                return

    def _begin(self, name: str, arguments: str = "", call_id: str | None = None) -> ToolCallDelta:
        """Return the first delta of a call; the parser does not backtrack before it."""
        self.trim()
        self._num_calls += 1
        return ToolCallDelta(self._num_calls - 1, name, arguments, call_id)

    def _more(self, arguments: str) -> ToolCallDelta:
        return ToolCallDelta(self._num_calls - 1, None, arguments)

    def _json_calls(self, is_bare: bool = False) -> Calls:
        """Read JSON objects: a single one, a list, or a sequence."""
        count = self._num_calls
        in_list = bool((yield from self.skip("[")))
        while True:
            start = self.at
            if self._num_calls > count:
                yield from self.skip(",", ";")
            if not (yield from self.peek("{")) or not (yield from self._json_call(is_bare)):
                self.at = start
                break
        if in_list:
            yield from self.skip("]")
        return self._num_calls > count

    def _json_call(self, is_bare: bool) -> Calls:
        """Read an object with a name and arguments; without tags its first key must be one of a call's."""
        start = self.at
        if is_bare:
            yield from self.skip("{")
            if not (yield from self.peek(*_FIRST_KEYS)):
                return False
        finder = EndFinder(start)
        while True:
            head = _HEAD.match(self.text, start)
            if head is not None and isinstance(name := json_value(head[1]), str):
                self.at = head.end()
                yield self._begin(name)
                yield from self._json_arguments()
                return True
            end = finder.find(self.text)
            if end is not None:
                found = call_of(json_value(self.text[start:end]), needs_arguments=is_bare)
                if found is not None:
                    self.at = end
                    yield self._begin(*found)
                return found is not None
            if self.is_final:
                return False
            yield None

    def _json_object(self) -> Events:
        """Read an object and yield it as pieces of arguments."""
        for piece in self.pieces_to(EndFinder(self.at)):
            yield self._more(piece) if piece else None

    def _json_arguments(self) -> Events:
        """Read arguments incrementally, and the rest of the call's object."""
        yield from self._json_object()
        if (yield from self.skip("}", ",")) == ",":
            for piece in self.pieces_to(EndFinder(self.at, depth=1)):
                if piece is None:
                    yield None

    def _bare_calls(self) -> Calls:
        """Read JSON, or a list of Python calls at the start of a line."""
        start = self.at
        is_python = False
        if (yield from self.peek("{", "[")) == "[" and self._is_new_line:
            while not (is_python := bool(_PYTHON_CALLS.match(self.text, start))):
                if not _PYTHON_START.match(self.text[start:]):
                    break
                if self.is_final:
                    return False
                yield None
        is_call = yield from self._python_calls() if is_python else self._json_calls(is_bare=True)
        if is_call:
            yield from self._skip_ends(BARE_ENDS)
        return is_call

    def _python_calls(self) -> Calls:
        """Read `[f(a=1), g()]`."""
        if not (yield from self.peek("[")):
            return False
        finder = EndFinder(self.at, PYTHON_PARTS)
        while (end := finder.find(self.text)) is None:
            if self.is_final:
                return False
            yield None
        calls = python_calls(self.text[self.at : end])
        if calls:
            self.at = end
            for name, arguments in calls:
                yield self._begin(name, json_text(arguments))
        return bool(calls)

    def _mistral_call(self) -> Calls:
        """Read `name[ARGS]{...}`, optionally with `[CALL_ID]id` in between."""
        yield from self.skip_space()
        name = yield from self.run_of(_NAME)
        call_id = None
        if (yield from self.skip("[CALL_ID]", after_space=False)):
            call_id = yield from self.run_of(_NAME)
        yield from self.skip("[ARGS]", after_space=False)
        return (yield from self._named_call(name, call_id))

    def _deepseek_call(self) -> Calls:
        """Read `name<｜tool▁sep｜>{...}` of V3.1, or `function<｜tool▁sep｜>name` and fenced arguments of V3 and R1."""
        name = yield from self.run_of(_NAME)
        if not (yield from self.skip("<｜tool▁sep｜>", after_space=False)):
            return False
        if not (yield from self.peek("{")):
            name = yield from self.run_of(_NAME)
            yield from self.skip("```json")
        is_call = yield from self._named_call(name)
        yield from self._skip_ends(("```",))
        return is_call

    def _kimi_call(self) -> Calls:
        """Read `functions.name:0<|tool_call_argument_begin|>{...}`."""
        yield from self.skip_space()
        call_id = yield from self.run_of(_CALL_ID)
        if not (yield from self.skip("<|tool_call_argument_begin|>")):
            return False
        name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id
        if name and (yield from self.peek("<|tool_call_end|>")):
            yield self._begin(name, "{}", call_id)
            return True
        return (yield from self._named_call(name, call_id))

    def _named_call(self, name: str, call_id: str | None = None) -> Calls:
        """Read the arguments of a call whose name is known."""
        if not name or not (yield from self.peek("{")):
            return False
        yield self._begin(name, call_id=call_id)
        yield from self._json_object()
        return True

    def _gemma_call(self) -> Calls:
        """Read `call:name{key:value}`, whose strings are enclosed in `<|"|>`."""
        if not (yield from self.skip("call:", after_space=False)):
            return False
        name = yield from self.run_of(_NAME)
        text, end = yield from self.until("<tool_call|>")
        arguments = gemma_object(text)
        if not name or not end or arguments is None:
            return False
        self.at -= len(end)
        yield self._begin(name, arguments)
        return True

    def _parameters_call(self, form: Parameters) -> Calls:
        """Read a call whose arguments follow its name one by one, or as JSON: `<function=f>{...}</function>`."""
        yield from self.skip_space()
        if form.name and not (yield from self.skip(form.name)):
            return False
        name = yield from self.run_of(_NAME)
        yield from self.skip_space()
        if not name or (form.name_end and not (yield from self.skip(form.name_end))):
            return False
        if form.name_end and (yield from self.peek("{")):
            is_call = yield from self._named_call(name)
            yield from self._skip_ends((form.call_end,))
            return is_call
        follows = yield from self.peek(form.key, form.call_end or "</tool_call>")
        if not follows or (follows != form.key and not form.name_end and not self._has_bare_names):
            return False
        yield self._begin(name)
        yield from self._parameters(self._schemas.get(name, {}), form)
        return True

    def _parameters(self, schemas: Mapping[str, Any], form: Parameters) -> Events:
        before = "{"
        while (yield from self.skip(form.key)):
            key, _ = yield from self.until(form.key_end)
            if form.value:
                yield from self.skip(form.value)
            # Models may forget the tag after a value.
            value, value_end = yield from self.until(form.value_end, form.key, form.call_end or "</tool_call>")
            if not value_end:
                # The answer was cut within a value: drop it.
                return
            self.at -= 0 if value_end == form.value_end else len(value_end)
            key, _, is_text = key.partition('" string="')
            schema = {"type": "string"} if is_text == "true" else schemas.get(key)
            yield self._more(f"{before}{json_text(key)}: {json_text(argument_value(value, schema))}")
            before = ", "
        if self.at < len(self.text):
            yield from self._skip_ends((form.call_end,) if form.call_end else ())
            yield self._more("{}" if before == "{" else "}")


_READERS: dict[str, Callable[[CallReader], Calls]] = {
    "mistral": CallReader._mistral_call, "deepseek": CallReader._deepseek_call, "kimi": CallReader._kimi_call,
    "gemma": CallReader._gemma_call, "pythonic": CallReader._python_calls,
}  # fmt: skip
"""By the name of the syntax."""


def argument_value(text: str, schema: Any) -> Any:
    """Parse a value written without quotes: a string if the schema says so, else JSON or Python."""
    text = text.removeprefix("\n").removesuffix("\n")
    types = _types(schema)
    if types and types <= {"string", "null"}:
        return None if "null" in types and text.strip() == "null" else text
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    with suppress(*_LITERAL_ERRORS):
        value = ast.literal_eval(text.strip())
        # Not every Python literal has a JSON equivalent.
        json.dumps(value, allow_nan=False)
        return value
    return text


def _types(schema: Any) -> set[str]:
    """Return the JSON types that a schema names; may be empty."""
    if not isinstance(schema, dict):
        return set()
    if isinstance(schema.get("enum"), list):
        return {"string" if isinstance(value, str) else "other" for value in schema["enum"]}
    own = schema.get("type", [])
    types = {own} if isinstance(own, str) else {name for name in own if isinstance(name, str)}
    for name in ("anyOf", "oneOf"):
        for branch in schema.get(name) or []:
            types |= _types(branch) or {"other"}
    return types


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls in a list of Python calls, with their keywords; a value may be a JSON constant. Else nothing."""
    try:
        found, calls = ast.parse(text.strip(), mode="eval").body, []
        for element in found.elts if isinstance(found, ast.List) else []:
            if not isinstance(element, ast.Call) or element.args:
                return []
            name = ast.unparse(element.func)
            values = [ast.literal_eval(_JsonNames().visit(keyword.value)) for keyword in element.keywords]
            arguments = {str(keyword.arg): value for keyword, value in zip(element.keywords, values, strict=True)}
            json.dumps(arguments, allow_nan=False)
            calls.append((name, arguments))
    except _LITERAL_ERRORS:
        return []
    return calls


class _JsonNames(ast.NodeTransformer):
    """Replaces names of JSON's constants by their values."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def gemma_object(text: str) -> str | None:
    """Return the JSON of an object in Gemma 4's form; None if invalid."""

    def convert(found: re.Match[str]) -> str:
        text = found[2] if found[1] is None else found[1]
        return json_text(text) if text is not None else "null" if found[0] == "None" else found[0]

    value = json_value(_GEMMA.sub(convert, text))
    return json_text(value) if isinstance(value, dict) else None


def call_of(value: Any, needs_arguments: bool) -> tuple[str, str] | None:
    """Return the name and the arguments (JSON) of a call object; None if it is not a call."""
    if not isinstance(value, dict):
        return None
    call = value["function"] if isinstance(value.get("function"), dict) else value
    name = next((call[key] for key in ("name", "tool_name", "function") if isinstance(call.get(key), str)), None)
    given = [call[key] for key in ("arguments", "parameters") if key in call]
    if name is None or (needs_arguments and not given):
        return None
    arguments = given[0] if given else None
    if isinstance(arguments, str) and isinstance(inner := json_value(arguments), dict):
        # Arguments as a JSON text, as in OpenAI's API.
        arguments = inner
    return name, json_text({} if arguments in (None, "") else arguments)


def json_value(text: str) -> Any:
    """Parse JSON; return None if invalid."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def json_text(value: Any) -> str:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False)
