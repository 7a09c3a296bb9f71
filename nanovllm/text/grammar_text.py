"""Translates constraints to grammars in llguidance's form, and refuses those that llguidance could not handle.

llguidance resolves references and rules by unlimited native recursion: `MAX_RULES` is chosen to fit the stack of the
compiling thread.
"""

from __future__ import annotations

import json
import re
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # The trial process must not import numpy, which starts threads.
    from nanovllm.sampling_params import StructuredOutputsParams

_MAX_MESSAGE = 500
MAX_RULES = 20_000
"""Maximum lines and brackets of a Lark grammar. A rule takes about 3 KB of stack, and so does a bracket within it."""
_MAX_REGEX = 2**15
"""Maximum characters; compile time of a regular expression grows with the square of its length."""
_INSTEAD = {
    '"uniqueItems"': "instead of uniqueItems, bound the array by maxItems and drop repeated items afterwards",
    '"not"': "instead of not, say what is allowed, by enum, anyOf or a pattern",
    '"if"': "instead of if, then and else, give anyOf a branch for each case, told apart by a const",
    "oneOf constraints": "instead of oneOf, write anyOf, whose branches a const tells apart",
    '"propertyNames"': "instead of propertyNames, write patternProperties",
    '"contains"': "instead of contains, write prefixItems",
    '"dependentRequired"': "instead of dependentRequired, give anyOf a branch with the property and one without it",
    "look-around": "instead of look-around, write the alternatives out",
}
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""String formats that llguidance supports."""
_UNKNOWN_FORMAT = f"a format in a JSON schema is ignored, since it is none of {', '.join(sorted(_FORMATS))}"
_MEANINGS = {"NoExtensionBias": "no text matches it; perhaps it refers to itself without an end"}
"""Explanations of llguidance's messages that are only names."""
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_COMPACT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Fields of a schema that are not schemas themselves."""
_COMPOSING = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas"})
"""Fields that add properties to an object."""


def grammar_text(library: Any, params: StructuredOutputsParams) -> str:
    """Return a grammar in llguidance's form, not compiled yet.

    Args:
        library: the module llguidance.
        params: the constraint.

    Raises:
        ValueError: a regular expression or a Lark grammar is too large.
        TypeError: a value is of the wrong type.
    """
    matcher = library.LLMatcher
    text: str
    if params.json is not None or params.json_object:
        defaults, overrides = _whitespace(params)
        text = matcher.grammar_from_json_schema(_json_schema(params), defaults, overrides)
    elif params.regex is not None:
        if isinstance(params.regex, str) and len(params.regex) > _MAX_REGEX:
            raise ValueError(f"the regular expression has more than {_MAX_REGEX} characters; choice takes many texts")
        text = matcher.grammar_from_regex(params.regex)
    elif params.choice is not None:
        # One terminal: alternatives of a rule are parser items, limited to a few thousand.
        text = matcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, params.choice)))
    else:
        if isinstance(params.grammar, str) and sum(map(params.grammar.count, "\n([")) > MAX_RULES:
            raise ValueError(f"the grammar has more than {MAX_RULES} lines and brackets")
        if isinstance(params.grammar, str) and _GBNF.search(params.grammar):
            raise ValueError("a grammar is in Lark's syntax (start: ...), not in GBNF or EBNF (root ::= ...)")
        text = matcher.grammar_from_lark(params.grammar)
    return text


def lark_json(schema: Any) -> str:
    """Return a part of a Lark grammar that matches a JSON schema, without additional properties in its objects.

    Raises:
        ValueError: the schema is not an object, or cannot be written as JSON.
    """
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, not {schema!r:.80}")
    guidance = schema.get("x-guidance")
    options = _COMPACT | (guidance if isinstance(guidance, dict) else {})
    closed = _closed(_without_unknown_formats(schema))
    return f"%json {json.dumps({**closed, 'x-guidance': options})}"


def _json_schema(params: StructuredOutputsParams) -> str:
    """Return the schema as text."""
    if params.json_object:
        return '{"type": "object"}'
    text = params.json if isinstance(params.json, str) else json.dumps(params.json)
    if not params.disable_additional_properties and '"format"' not in text:
        return text
    try:
        schema = _without_unknown_formats(json.loads(text))
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError("the schema is nested too deeply, or has an integer of too many digits") from error
    return json.dumps(_closed(schema) if params.disable_additional_properties else schema)


def _without_unknown_formats(schema: Any) -> Any:
    """Return a schema without unsupported string formats, and warn about them."""
    if isinstance(schema, list):
        return [_without_unknown_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name == "format" and isinstance(value, str) and value not in _FORMATS:
            warnings.warn(_UNKNOWN_FORMAT, stacklevel=2)
            del found[name]
        elif name in _SCHEMAS_BY_NAME and isinstance(value, dict):
            found[name] = {key: _without_unknown_formats(item) for key, item in value.items()}
        elif name not in _VALUES:
            found[name] = _without_unknown_formats(value)
    return found


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have only the properties that it names.

    An object composed of parts stays open, as do its parts: a closed part would exclude the others.
    """
    parts: set[str] = set()
    while True:
        count, closed = len(parts), _close(schema, False, parts)
        # A definition is closed only once all references to it are known.
        if len(parts) == count:
            return closed


def _close(schema: Any, is_part: bool, parts: set[str]) -> Any:
    """Return a closed schema.

    Args:
        schema: a schema, a list of schemas, or any other value.
        is_part: whether its objects are parts of others.
        parts: references to schemas that are parts; newly found ones are added.
    """
    if isinstance(schema, list):
        return [_close(item, is_part, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    composing, named = _COMPOSING & set(schema), schema.get("properties")
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    is_open = is_part or several or len(composing) > 1 or bool(composing and named)
    if is_open and isinstance(schema.get("$ref"), str):
        parts.add(schema["$ref"])
    closed = dict(schema)
    for name, value in schema.items():
        if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
            closed[name] = {key: _close(item, f"#/{name}/{key}" in parts, parts) for key, item in value.items()}
        elif name not in _VALUES:
            closed[name] = _close(value, is_open and name in _COMPOSING, parts)
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    is_named = isinstance(named, dict) and all(isinstance(name, str) and name in named for name in names)
    if is_named and not is_open and not {"additionalProperties", "patternProperties"} & set(schema):
        closed["additionalProperties"] = False
    return closed


def _whitespace(params: StructuredOutputsParams) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return llguidance's whitespace options: the defaults that a schema may override, and the fixed ones."""
    if params.whitespace_pattern is not None:
        return None, {"whitespace_flexible": True, "whitespace_pattern": params.whitespace_pattern}
    if params.disable_any_whitespace is not None:
        return None, {"whitespace_flexible": not params.disable_any_whitespace}
    return _COMPACT, None


def with_advice(message: str) -> str:
    """Return llguidance's message, with advice on what to write instead."""
    advice = [text for refused, text in _INSTEAD.items() if refused in message]
    shown = message.replace("<non-verbose/>", "").strip()
    shown = _MEANINGS.get(shown, shown)
    # The message quotes the grammar, which may be long.
    return "; ".join([f"structured_outputs cannot be used: {shown[:_MAX_MESSAGE]}", *advice])
