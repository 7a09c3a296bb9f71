"""The values of arguments that are not written as JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

_GEMMA = re.compile(r'<\|"\|>(.*?)<\|"\|>|([A-Za-z_][\w.-]*)(?=\s*:)|\bNone\b|.', re.DOTALL)


def argument_schemas(parameters: Any) -> Mapping[str, Any]:
    """Return the schemas of a function's arguments, by name, as far as they are known."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def argument_value(text: str, schema: Any) -> Any:
    """Return the value that is written without quotes: a text where the schema has one, else what JSON or Python says.

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
    """Return the JSON types that a schema names; empty if it names none."""
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
    """Return whether a text is a literal of Python that JSON has too, and its value."""
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False, None
    return True, value


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls in a list of Python calls, each with its keywords; none if the text is something else.

    Names of JSON's constants stand for these.
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
    """Makes constants of the names that JSON has for them."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def _constant(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonNames().visit(node))


def gemma_object(text: str) -> str | None:
    """Return the JSON of an object in Gemma 4's form; None if it is none."""

    def convert(found: re.Match[str]) -> str:
        if found[1] is not None:
            return json_text(found[1])
        if found[2] is not None:
            return json_text(found[2])
        return "null" if found[0] == "None" else found[0]

    value = json_value(_GEMMA.sub(convert, text))
    return json_text(value) if isinstance(value, dict) else None


def call_of(value: Any, needs_arguments: bool) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of the call that an object is; None if it is none."""
    if not isinstance(value, dict):
        return None
    call = value["function"] if isinstance(value.get("function"), dict) else value
    name = next((call[key] for key in ("name", "tool_name", "function") if isinstance(call.get(key), str)), None)
    given = [call[key] for key in ("arguments", "parameters") if key in call]
    if name is None or (needs_arguments and not given):
        return None
    arguments = given[0] if given else None
    if isinstance(arguments, str) and isinstance(inner := json_value(arguments), dict):
        # A text of JSON, as OpenAI's API has it.
        arguments = inner
    return name, json_text({} if arguments in (None, "") else arguments)


def json_value(text: str) -> Any:
    """Return what JSON says; None if it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def json_text(value: Any) -> str:
    """Return a value as JSON."""
    return json.dumps(value, ensure_ascii=False)
