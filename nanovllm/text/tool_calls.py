"""Tool calls: the formats of models, a parser, and grammars that force calls.

Tags identify a format, so one parser accepts all tagged formats regardless of the model's template: fine-tuned models
may deviate from their templates. Calls without tags (Llama's JSON, lists of Python calls) are parsed only if the
format has them.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from nanovllm.outputs import ToolCall
from nanovllm.text.grammar_text import lark_json
from nanovllm.text.harmony import HarmonyParser
from nanovllm.text.reasoning import HARMONY_MARK, template_text
from nanovllm.text.text_reader import EndFinder, TextReader, partial_start
from nanovllm.text.tool_call_reader import CallReader, Events, ToolCallDelta
from nanovllm.text.tool_call_syntax import BARE_TAGS, SYNTAX_BY_TAG, ToolCallFormat

__all__ = ["HERMES", "LLAMA3_JSON", "TOOL_CALL_FORMATS", "ToolCallFormat", "ToolCallParser", "parse_tool_calls"]

_JSON = '{"name": "NAME", "arguments": ARGUMENTS}'
_LLAMA = '{"name": "NAME", "parameters": ARGUMENTS}'
_TAGGED = f"<tool_call>\n{_JSON}\n</tool_call>"

HERMES = ToolCallFormat(("<tool_call>",), _TAGGED)
LLAMA3_JSON = ToolCallFormat(('{"name": function name, "parameters":',), _LLAMA, ";", is_bare=True)
_MISTRAL = ToolCallFormat(
    ("[TOOL_CALLS]",), _JSON, ", ", list_begin="[TOOL_CALLS][", list_end="]", short_ids=True
)  # fmt: skip
_MISTRAL_11 = ToolCallFormat(("[ARGS]",), "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "", short_ids=True)
_DEEPSEEK_3 = ToolCallFormat(
    ("<｜tool▁sep｜>", "```json"),
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
    list_begin="<｜tool▁calls▁begin｜>", list_end="<｜tool▁calls▁end｜>",
)  # fmt: skip
_DEEPSEEK_31 = ToolCallFormat(
    ("<｜tool▁sep｜>",),
    "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>", "",
    list_begin="<｜tool▁calls▁begin｜>", list_end="<｜tool▁calls▁end｜>",
)  # fmt: skip
TOOL_CALL_FORMATS = {
    "openai": ToolCallFormat(
        (HARMONY_MARK,), "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
        has_channels=True, answer_begin="<|channel|>final<|message|>",
    ),
    "kimi_k2": ToolCallFormat(
        ("<|tool_call_argument_begin|>",),
        "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>", "",
        list_begin="<|tool_calls_section_begin|>", list_end="<|tool_calls_section_end|>",
    ),
    "deepseek_v32": ToolCallFormat(
        ("｜DSML｜",), _JSON, list_begin="<｜DSML｜function_calls>\n", list_end="\n</｜DSML｜function_calls>"
    ),
    "deepseek_v3": _DEEPSEEK_3,
    "deepseek_v31": _DEEPSEEK_31,
    "seed_oss": ToolCallFormat(("<seed:tool_call>",), f"<seed:tool_call>\n{_JSON}\n</seed:tool_call>"),
    "minimax_m2": ToolCallFormat(
        ("<minimax:tool_call>",), _JSON,
        list_begin="<minimax:tool_call>\n", list_end="\n</minimax:tool_call>",
    ),
    "gemma4": ToolCallFormat(("<|tool_call>",), f"<|tool_call>{_JSON}<tool_call|>", ""),
    "lfm2": ToolCallFormat(
        ("<|tool_call_start|>",), _JSON, ", ", list_begin="<|tool_call_start|>[", list_end="]<|tool_call_end|>"
    ),
    "granite": ToolCallFormat(("<|tool_call|>",), _JSON, ", ", list_begin="<|tool_call|>[", list_end="]"),
    "phi4_mini_json": ToolCallFormat(("functools[",), _JSON, ", ", list_begin="functools[", list_end="]"),
    "minimax": ToolCallFormat(("<tool_calls>",), _JSON, list_begin="<tool_calls>\n", list_end="\n</tool_calls>"),
    "nemotron_nano_v2": ToolCallFormat(
        ("<TOOLCALL>",), _JSON, ", ", list_begin="<TOOLCALL>[", list_end="]</TOOLCALL>"
    ),
    "cohere": ToolCallFormat(
        ("<|START_ACTION|>",), '{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ARGUMENTS}', ", ",
        list_begin="<|START_ACTION|>[", list_end="]<|END_ACTION|>",
    ),
    "gigachat3": ToolCallFormat(("<|function_call|>",), f"<|function_call|>{_JSON}"),
    "mistral_v11": _MISTRAL_11,
    "mistral": _MISTRAL,
    "glm45": ToolCallFormat(("<arg_key>",), _TAGGED, has_bare_names=True),
    "qwen3_coder": ToolCallFormat(("<function=",), _TAGGED),
    "hermes": HERMES,
    "pythonic": ToolCallFormat(("<|python_start|>",), _LLAMA, ";", is_bare=True),
    "llama3_json": LLAMA3_JSON,
}  # fmt: skip
"""Formats by name (vLLM's where it has one), in search order: a template of an earlier format may also contain the
marks of a later one."""
_SAME = {
    "deepseek_r1": "deepseek_v3", "glm4_moe": "glm45", "glm47": "glm45", "granite4": "hermes",
    "hunyuan_a13b": "minimax", "jamba": "minimax",
    "llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "phi4_mini": "phi4_mini_json",
    "qwen3_xml": "qwen3_coder", "step3p5": "qwen3_coder",
}  # fmt: skip
"""Aliases of formats."""


_UNKNOWN = (
    "the chat template takes tools, but the form in which it writes calls is not known: they are forced as Hermes' "
    "calls, and found if they have the tags of a known form; tool_call_parser names another one"
)


def tool_call_format(name: str, tokenizer: Any, template: str | None = None) -> ToolCallFormat:
    """Return a format by name; "auto" detects it in the chat template or the tokenizer's vocabulary.

    Args:
        name: the format's name.
        tokenizer: a transformers tokenizer, or None.
        template: a chat template to use instead of the tokenizer's.

    Raises:
        ValueError: an unknown name.
    """
    if name != "auto":
        found = TOOL_CALL_FORMATS.get(_SAME.get(name, name))
        if found is None:
            known = ", ".join(sorted([*TOOL_CALL_FORMATS, *_SAME]))
            raise ValueError(f"tool_call_parser must be auto or one of {known}, not {name!r}")
        return found
    template = template or template_text(tokenizer)
    for form in TOOL_CALL_FORMATS.values():
        if all(mark in template for mark in form.marks):
            return form
    # Llama's templates contain no tag.
    if tokenizer is not None and "<|python_tag|>" in tokenizer.get_vocab():
        return LLAMA3_JSON
    if "tools" in template:
        warnings.warn(_UNKNOWN, stacklevel=2)
    return HERMES


class ToolCallParser:
    """Splits the text of one output into calls and other text.

    A call's first delta has its name; its arguments follow as the model writes them, by character in JSON and by
    argument in other formats. Text that only resembles a call stays text.

    Args:
        form: the model's format of calls.
        allows_several: whether to keep calls after the first one.
        functions: the callable functions, each with its `name` and optionally `parameters`, a JSON schema that tells
            which arguments written without quotes are strings.
    """

    def __init__(
        self, form: ToolCallFormat, allows_several: bool = True, functions: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self._allows_several = allows_several
        self._tags = (*SYNTAX_BY_TAG, *((*BARE_TAGS, "{", "[") if form.is_bare else ()))
        self._tag_pattern = re.compile("|".join(map(re.escape, self._tags)))
        self._reader = TextReader()
        self._calls = CallReader(self._reader, form.has_bare_names, functions)
        self._events = self._run()
        # Whether only space precedes the position, on its line or since the last call.
        self._is_new_line = True

    def append(self, text: str, final: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """Parse new text; return new text outside of calls, and new parts of calls. `final`: no text follows."""
        self._reader.text += text
        self._reader.is_final = final
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        for event in self._events:
            if event is None:
                break
            if isinstance(event, str):
                content.append(event)
            elif self._allows_several or event.index == 0:
                calls.append(event)
        return "".join(content), calls

    def _run(self) -> Events:
        reader, space = self._reader, ""
        while True:
            space = yield from self._text()
            reader.trim()
            if not reader.text:
                yield space
                return self._calls.num_calls > 0
            tag = yield from reader.peek(*self._tags)
            if tag in SYNTAX_BY_TAG:
                is_call = yield from self._calls.tagged_calls(tag)
            else:
                reader.at += len(tag) if tag in BARE_TAGS else 0
                yield from reader.skip_space()
                is_call = yield from self._calls.bare_calls(self._is_new_line)
            if is_call:
                yield from reader.skip_space()
                self._is_new_line = True
            else:
                reader.at = len(tag)
                yield space + tag
                self._is_new_line = False
                if tag == "{":
                    yield from self._plain_object()

    def _text(self) -> Generator[str | None, None, str]:
        """Yield the text before the next tag or the end; return the space before it."""
        reader = self._reader
        while True:
            found = self._tag_pattern.search(reader.text, reader.at)
            end = found.start() if found else len(reader.text)
            if found is None and not reader.is_final:
                end = reader.at + partial_start(reader.text[reader.at :], self._tags)
            before = reader.text[reader.at : end]
            text = before.rstrip()
            if text:
                yield text
                reader.at += len(text)
                self._is_new_line = False
            if found or reader.is_final:
                space, reader.at = reader.text[reader.at : end], end
                self._is_new_line = self._is_new_line or "\n" in space
                return space
            reader.trim()
            yield None

    def _plain_object(self) -> Generator[str | None, None, None]:
        """Yield an object that neither is nor contains a call."""
        reader = self._reader
        start = reader.at
        yield from reader.skip_space()
        is_object = bool((yield from reader.peek('"')))
        reader.at = start
        finder = EndFinder(start, depth=1)
        while is_object:
            end = finder.find(reader.text)
            stop = len(reader.text) if end is None else end
            yield reader.text[reader.at : stop]
            reader.at = stop
            if end is not None or reader.is_final:
                return
            yield None


def parse_tool_calls(
    text: str, form: ToolCallFormat = HERMES, functions: Iterable[Mapping[str, Any]] = ()
) -> list[ToolCall]:
    """Return the calls in a whole answer, except calls whose arguments are not a JSON object.

    Args:
        text: the answer without its reasoning.
        form: the model's format of calls.
        functions: see `ToolCallParser`.

    Example:
        >>> parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        [ToolCall(name='add', arguments={'a': 1})]
    """
    if form.has_channels:
        _, _, deltas = HarmonyParser().append(text, final=True)
    else:
        _, deltas = ToolCallParser(form, functions=functions).append(text, final=True)
    return tool_calls(deltas)


def tool_calls(deltas: Iterable[ToolCallDelta]) -> list[ToolCall]:
    """Return complete calls, except calls whose arguments are not a JSON object."""
    calls = []
    for name, arguments in whole_calls(deltas):
        try:
            # Models that write code may forget to escape line breaks.
            value = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            calls.append(ToolCall(name, value))
    return calls


def whole_calls(deltas: Iterable[ToolCallDelta]) -> list[tuple[str, str]]:
    """Return the names and arguments of calls."""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append((delta.name, ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return calls


def tool_call_grammar(
    functions: Iterable[Mapping[str, Any]],
    form: ToolCallFormat,
    *,
    several: bool,
    answer: Any = None,
    tokens: Mapping[str, int] | None = None,
) -> str:
    """Return a Lark grammar of calls whose arguments match the functions' parameters.

    Args:
        functions: functions with a `name` and optionally `parameters`, a JSON schema.
        form: the format of calls.
        several: whether to allow several calls.
        answer: JSON schema of an answer that is allowed instead of calls; None: a call is required.
        tokens: tags that are single tokens, which a literal in a grammar does not match.
    """
    tags = tokens or {}
    calls, rules = [], []
    for index, function in enumerate(functions):
        calls.append(f"call{index}")
        # Escaped as in a JSON string; unquoted names contain no characters that JSON escapes.
        name = json.dumps(json.dumps(function["name"])[1:-1])
        own = {"NAME": name, "ARGUMENTS": f"arguments{index}", "NUMBER": "/[0-9]+/"}
        parts = [part for part in re.split("(NAME|ARGUMENTS|NUMBER)", form.call) if part]
        rules.append(f"call{index}: {' '.join(own.get(part) or _literal(part, tags) for part in parts)}")
        rules.append(f"arguments{index}: {lark_json(_object_schema(function.get('parameters')))}")
    more = f" ({_literal(form.separator, tags)} call)*" if several else ""
    listed = [_literal(form.list_begin, tags), f"call{more}", _literal(form.list_end, tags)]
    if answer is not None:
        rules.append(f"answer: {_literal(form.answer_begin, tags)} {lark_json(answer)}")
    start = f"start: {' '.join(part for part in listed if part)}" + (" | answer" if answer is not None else "")
    return "\n".join([start, f"call: {' | '.join(calls)}", *rules])


def _literal(text: str, tokens: Mapping[str, int]) -> str:
    """Return a literal of a Lark grammar that matches a text."""
    pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    parts = [part for part in (re.split(f"({pattern})", text) if tokens else [text]) if part]
    return " ".join(f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts)


def _object_schema(parameters: Any) -> dict[str, Any]:
    """Return the schema of a function's arguments, with type object even if the schema does not say so."""
    if not parameters or parameters == {"type": "object"}:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or "$ref" in parameters:
        return parameters
    # Some clients write null for missing fields.
    return {**{name: value for name, value in parameters.items() if value is not None}, "type": "object"}
