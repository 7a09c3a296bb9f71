"""Parses tool calls incrementally, with one generator for each syntax."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.text.text_reader import PYTHON_PARTS, EndFinder, TextReader, Wait
from nanovllm.text.tool_call_syntax import BARE_ENDS, SYNTAX_BY_TAG, Parameters, Syntax


@dataclass
class ToolCallDelta:
    """A new part of a tool call.

    Attributes:
        index: index of the call in the answer.
        name: the function's name, in the call's first delta; else None.
        arguments: a piece of the arguments; all pieces together are a JSON object.
        id: the model's id of the call, if any, together with the name.
    """

    index: int
    name: str | None
    arguments: str
    id: str | None = None


Events = Generator["str | ToolCallDelta | None", None, bool]
"""Yields text, pieces of calls, and None to wait for more; returns whether there was a call."""
Pieces = Generator["ToolCallDelta | None", None, None]


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
_PYTHON_START = re.compile(r"\[\s*(?:$|[A-Za-z_][\w.]*(?:$|\())")


class CallReader:
    """Parses calls where a tag was found.

    A method that parses calls returns whether there was one; if not, the position is anywhere after the tag.

    Args:
        reader: the text reader.
        has_bare_names: whether a name alone between `<tool_call>` tags is a call.
        functions: see `ToolCallParser`.

    Attributes:
        num_calls: number of calls so far.
    """

    def __init__(self, reader: TextReader, has_bare_names: bool, functions: Iterable[Mapping[str, Any]]) -> None:
        self._reader = reader
        self._has_bare_names = has_bare_names
        self._schemas = {function["name"]: argument_schemas(function.get("parameters")) for function in functions}
        self.num_calls = 0

    def tagged_calls(self, tag: str) -> Events:
        """Read the calls after a tag, which is next."""
        reader, syntax, count = self._reader, SYNTAX_BY_TAG[tag], self.num_calls
        is_section = tag in syntax.sections
        if is_section:
            reader.at += len(tag)
        while True:
            start = reader.at
            yield from reader.skip_space()
            is_call = bool((yield from reader.skip(syntax.call)))
            if is_call or (is_section and (yield from reader.peek("{", "["))):
                is_call = yield from self._call(syntax)
            if not is_call:
                reader.at = start
                return self.num_calls > count
            yield from self._skip_ends(syntax.ends)

    def _call(self, syntax: Syntax) -> Events:
        """Read a call after its tag, or several in JSON."""
        reader, start = self._reader, self._reader.at
        yield from reader.skip_space()
        if (yield from reader.peek("{", "[")) and (yield from self._json_calls()):
            return True
        reader.at = start
        if isinstance(syntax.body, str):
            readers: dict[str, Callable[[], Events]] = {
                "mistral": self._mistral_call, "deepseek": self._deepseek_call, "kimi": self._kimi_call,
                "gemma": self._gemma_call, "pythonic": self._python_calls,
            }  # fmt: skip
            return syntax.body in readers and (yield from readers[syntax.body]())
        for parameters in syntax.body:
            reader.at = start
            if (yield from self._parameters_call(parameters)):
                return True
        return False

    def _skip_ends(self, ends: tuple[str, ...]) -> Wait:
        """Skip tags that end a call."""
        reader = self._reader
        while ends:
            start = reader.at
            yield from reader.skip_space()
            if not (yield from reader.skip(*ends)):
                rest = reader.text[reader.at :]
                # The answer may have been cut within the tag.
                is_cut = bool(rest) and reader.is_final and any(end.startswith(rest) for end in ends)
                reader.at = len(reader.text) if is_cut else start
                return

    def _begin(self, name: str, arguments: str = "", call_id: str | None = None) -> ToolCallDelta:
        """Return the first delta of a call; the parser does not backtrack before it."""
        self._reader.trim()
        self.num_calls += 1
        return ToolCallDelta(self.num_calls - 1, name, arguments, call_id)

    def _more(self, arguments: str) -> ToolCallDelta:
        return ToolCallDelta(self.num_calls - 1, None, arguments)

    def _json_calls(self, is_bare: bool = False) -> Events:
        """Read JSON objects: a single one, a list, or a sequence."""
        reader, count = self._reader, self.num_calls
        in_list = bool((yield from reader.skip("[")))
        while True:
            start = reader.at
            yield from reader.skip_space()
            if self.num_calls > count and (yield from reader.skip(",", ";")):
                yield from reader.skip_space()
            if not (yield from reader.peek("{")) or not (yield from self._json_call(is_bare)):
                reader.at = start
                break
        if in_list and self.num_calls > count:
            yield from reader.skip_space()
            yield from reader.skip("]")
        return self.num_calls > count

    def _json_call(self, is_bare: bool) -> Events:
        """Read an object with a name and arguments; without tags its first key must be one of a call's."""
        reader, start = self._reader, self._reader.at
        if is_bare:
            yield from reader.skip("{")
            yield from reader.skip_space()
            if not (yield from reader.peek(*_FIRST_KEYS)):
                return False
        finder = EndFinder(start)
        while True:
            head = _HEAD.match(reader.text, start)
            if head is not None and isinstance(name := json_value(head[1]), str):
                reader.at = head.end()
                yield self._begin(name)
                yield from self._json_arguments()
                return True
            end = finder.find(reader.text)
            if end is not None:
                found = call_of(json_value(reader.text[start:end]), needs_arguments=is_bare)
                if found is not None:
                    reader.at = end
                    yield self._begin(*found)
                return found is not None
            if reader.is_final:
                return False
            yield None

    def _json_object(self) -> Pieces:
        """Read an object and yield it as a piece of arguments."""
        reader, finder = self._reader, EndFinder(self._reader.at)
        while True:
            end = finder.find(reader.text)
            stop = len(reader.text) if end is None else end
            if piece := reader.text[reader.at : stop]:
                reader.at = stop
                yield self._more(piece)
            if end is not None or reader.is_final:
                return
            yield None

    def _json_arguments(self) -> Pieces:
        """Read arguments incrementally, and the rest of the call's object."""
        reader = self._reader
        yield from self._json_object()
        yield from reader.skip_space()
        if (yield from reader.skip("}", ",")) != ",":
            return
        finder = EndFinder(reader.at, depth=1)
        while (end := finder.find(reader.text)) is None and not reader.is_final:
            yield None
        reader.at = len(reader.text) if end is None else end

    def bare_calls(self, is_new_line: bool) -> Events:
        """Read JSON, or a list of Python calls at the start of a line."""
        reader, start = self._reader, self._reader.at
        if (yield from reader.peek("{", "[")) == "[" and is_new_line:
            while _PYTHON_START.match(reader.text[start:]) and not _PYTHON_CALLS.match(reader.text[start:]):
                if reader.is_final:
                    return False
                yield None
            if _PYTHON_CALLS.match(reader.text[start:]):
                is_call = yield from self._python_calls()
                yield from self._skip_ends(BARE_ENDS)
                return is_call
        if (yield from self._json_calls(is_bare=True)):
            yield from self._skip_ends(BARE_ENDS)
            return True
        return False

    def _python_calls(self) -> Events:
        """Read `[f(a=1), g()]`."""
        reader = self._reader
        yield from reader.skip_space()
        finder = EndFinder(reader.at, PYTHON_PARTS)
        if not (yield from reader.peek("[")):
            return False
        while (end := finder.find(reader.text)) is None:
            if reader.is_final:
                return False
            yield None
        calls = python_calls(reader.text[reader.at : end])
        if calls:
            reader.at = end
            for name, arguments in calls:
                yield self._begin(name, json_text(arguments))
        return bool(calls)

    def _mistral_call(self) -> Events:
        """Read `name[ARGS]{...}`, optionally with `[CALL_ID]id` in between."""
        reader = self._reader
        yield from reader.skip_space()
        name = yield from reader.run_of(_NAME)
        call_id = None
        if (yield from reader.skip("[CALL_ID]")):
            call_id = yield from reader.run_of(_NAME)
        yield from reader.skip("[ARGS]")
        return (yield from self._named_call(name, call_id))

    def _deepseek_call(self) -> Events:
        """Read `name<｜tool▁sep｜>{...}` of V3.1, or `function<｜tool▁sep｜>name` and fenced arguments of V3 and R1."""
        reader = self._reader
        name = yield from reader.run_of(_NAME)
        if not (yield from reader.skip("<｜tool▁sep｜>")):
            return False
        yield from reader.skip_space()
        if not (yield from reader.peek("{")):
            name = yield from reader.run_of(_NAME)
            yield from reader.skip_space()
            yield from reader.skip("```json")
        is_call = yield from self._named_call(name)
        yield from self._skip_ends(("```",))
        return is_call

    def _kimi_call(self) -> Events:
        """Read `functions.name:0<|tool_call_argument_begin|>{...}`."""
        reader = self._reader
        yield from reader.skip_space()
        call_id = yield from reader.run_of(_CALL_ID)
        yield from reader.skip_space()
        if not (yield from reader.skip("<|tool_call_argument_begin|>")):
            return False
        name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id
        yield from reader.skip_space()
        if name and (yield from reader.peek("<|tool_call_end|>")):
            yield self._begin(name, "{}", call_id)
            return True
        return (yield from self._named_call(name, call_id))

    def _named_call(self, name: str, call_id: str | None = None) -> Events:
        """Read the arguments of a call whose name is known."""
        yield from self._reader.skip_space()
        if not name or not (yield from self._reader.peek("{")):
            return False
        yield self._begin(name, call_id=call_id)
        yield from self._json_object()
        return True

    def _gemma_call(self) -> Events:
        """Read `call:name{key:value}`, whose strings are enclosed in `<|"|>`."""
        reader = self._reader
        if not (yield from reader.skip("call:")):
            return False
        name = yield from reader.run_of(_NAME)
        text, end = yield from reader.until("<tool_call|>")
        arguments = gemma_object(text)
        if not name or not end or arguments is None:
            return False
        reader.at -= len(end)
        yield self._begin(name, arguments)
        return True

    def _parameters_call(self, form: Parameters) -> Events:
        """Read a call whose arguments follow its name one by one, or as JSON: `<function=f>{...}</function>`."""
        reader = self._reader
        yield from reader.skip_space()
        if form.name and not (yield from reader.skip(form.name)):
            return False
        name = yield from reader.run_of(_NAME)
        yield from reader.skip_space()
        if not name or (form.name_end and not (yield from reader.skip(form.name_end))):
            return False
        yield from reader.skip_space()
        if form.name_end and (yield from reader.peek("{")):
            is_call = yield from self._named_call(name)
            yield from self._skip_ends((form.call_end,))
            return is_call
        ends = form.call_end or "</tool_call>"
        follows = yield from reader.peek(form.key, ends)
        if not follows or (follows != form.key and not form.name_end and not self._has_bare_names):
            return False
        yield self._begin(name)
        yield from self._parameters(self._schemas.get(name, {}), form)
        return True

    def _parameters(self, schemas: Mapping[str, Any], form: Parameters) -> Pieces:
        reader, before = self._reader, "{"
        while True:
            yield from reader.skip_space()
            if not (yield from reader.skip(form.key)):
                break
            key, _ = yield from reader.until(form.key_end)
            if form.value:
                yield from reader.skip_space()
                yield from reader.skip(form.value)
            # Models may forget the tag after a value.
            call_end = form.call_end or "</tool_call>"
            value, value_end = yield from reader.until(form.value_end, form.key, call_end)
            if not value_end:
                # The answer was cut within a value: drop it.
                return
            reader.at -= 0 if value_end == form.value_end else len(value_end)
            key, _, is_text = key.partition('" string="')
            schema = {"type": "string"} if is_text == "true" else schemas.get(key)
            yield self._more(f"{before}{json_text(key)}: {json_text(argument_value(value, schema))}")
            before = ", "
        if reader.at < len(reader.text):
            yield from self._skip_ends((form.call_end,) if form.call_end else ())
            yield self._more("{}" if before == "{" else "}")


def argument_schemas(parameters: Any) -> Mapping[str, Any]:
    """Return the known schemas of a function's arguments, by name."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def argument_value(text: str, schema: Any) -> Any:
    """Parse a value written without quotes: a string if the schema says so, else JSON or Python.

    One line break around it belongs to the tags.
    """
    text = text.removeprefix("\n").removesuffix("\n")
    types = _types(schema)
    if types and types <= {"string", "null"}:
        return None if "null" in types and text.strip() == "null" else text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        found, value = _literal(text)
        return value if found else text


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


def _literal(text: str) -> tuple[bool, Any]:
    """Return whether a text is a Python literal with a JSON equivalent, and its value."""
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None
    return True, value


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls in a list of Python calls, each with its keywords; empty if the text is anything else.

    The names of JSON's constants are accepted as values.
    """
    try:
        found, calls = ast.parse(text.strip(), mode="eval").body, []
        for element in found.elts if isinstance(found, ast.List) else []:
            if not isinstance(element, ast.Call) or element.args:
                return []
            name = ast.unparse(element.func)
            arguments = {str(keyword.arg): _constant(keyword.value) for keyword in element.keywords}
            json.dumps(arguments, allow_nan=False)
            calls.append((name, arguments))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return []
    return calls


class _JsonNames(ast.NodeTransformer):
    """Replaces names of JSON's constants by their values."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def _constant(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonNames().visit(node))


def gemma_object(text: str) -> str | None:
    """Return the JSON of an object in Gemma 4's form; None if invalid."""

    def convert(found: re.Match[str]) -> str:
        if found[1] is not None:
            return json_text(found[1])
        if found[2] is not None:
            return json_text(found[2])
        return "null" if found[0] == "None" else found[0]

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
