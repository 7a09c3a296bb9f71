"""Calls of tools: taken out of text as it comes, forced by grammars, and rendered for chat templates."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from nanovllm.assets import BUNDLED_MODEL
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.text.chat_template import plain_messages
from nanovllm.text.structured_output import ConstraintFactory
from nanovllm.text.tool_calls import (
    HERMES,
    LLAMA3_JSON,
    ToolCallFormat,
    ToolCallParser,
    parse_tool_calls,
    tool_call_format,
    tool_call_grammar,
)

TRICKY = '{"a": 1, "s": "}{\\"</tool_call>\\\\"}'
Found = tuple[str, list[tuple[str, str]]]
CASES: list[tuple[ToolCallFormat, str, Found]] = [
    (HERMES, "  plain < text <tool", ("  plain < text <tool", [])),
    (
        HERMES,
        f'Well:\n<tool_call>\n{{"name": "add", "arguments": {TRICKY}}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"b": 2}, "name": "x"}</tool_call> Done.',
        ("Well:Done.", [("add", TRICKY), ("x", '{"b": 2}')]),
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    (
        HERMES,
        '<tool_call>no</tool_call> or <tool_call>{"name": "f", "arguments": {}}',
        ("<tool_call>no</tool_call> or", [("f", "{}")]),
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1', ("", [("f", '{"a": [1')])),
    (HERMES, '<tool_call>{"na', ('<tool_call>{"na', [])),
    (
        LLAMA3_JSON,
        '<|python_tag|>{"name": "f", "parameters": {"q": {"b": "}"}}}; {"name": "g", "parameters": {}}',
        ("", [("f", '{"q": {"b": "}"}}'), ("g", "{}")]),
    ),
    (LLAMA3_JSON, '{"type": "function", "name": "f", "parameters": {"q": "é"}}', ("", [("f", '{"q": "é"}')])),
    (LLAMA3_JSON, '{"name": "Ann"}', ('{"name": "Ann"}', [])),
    (LLAMA3_JSON, '{"answer": 3}', ('{"answer": 3}', [])),
    (LLAMA3_JSON, 'See {"name": "f", "parameters": {}}', ('See {"name": "f", "parameters": {}}', [])),
]


def parse(form: ToolCallFormat, pieces: list[str]) -> tuple[Found, list[int]]:
    """Return what a parser makes of text in pieces, and in which pieces there was something of a call."""
    parser, content, calls, at = ToolCallParser(form), "", list[tuple[str, str]](), []
    for index, piece in enumerate(pieces):
        new, deltas = parser.append(piece, final=index == len(pieces) - 1)
        content += new
        for delta in deltas:
            if delta.name is not None:
                calls.append((delta.name, ""))
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
        at += [index] * bool(deltas)
    return (content, calls), at


@pytest.mark.parametrize(("form", "text", "found"), CASES)
def test_calls_are_found_however_text_comes(form: ToolCallFormat, text: str, found: Found) -> None:
    assert parse(form, [text])[0] == found == parse(form, [*text, ""])[0]
    for seed in range(50):
        at = sorted(random.Random(seed).sample(range(len(text)), 4))
        pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
        assert parse(form, pieces)[0] == found, pieces


def test_arguments_come_while_they_are_written() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "1234"}}</tool_call>'
    _, at = parse(HERMES, [*text])
    # The name, and each character of the arguments.
    assert at == [text.index('{"a"') + i for i in range(len('{"a": "1234"}'))]
    plain = [parse(HERMES, [*"a text", ""])[0][0], ToolCallParser(HERMES).append("a text")[0]]
    assert plain == ["a text", "a text"]
    only_first = ToolCallParser(LLAMA3_JSON, allows_several=False)
    _, deltas = only_first.append('{"name": "f", "parameters": {}};{"name": "g", "parameters": {}}', final=True)
    assert [delta.name for delta in deltas if delta.name] == ["f"]


def test_the_format_follows_from_the_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    assert tool_call_format("auto", tokenizer) is HERMES is tool_call_format("auto", None)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    assert tool_call_format("auto", tokenizer) is LLAMA3_JSON
    tokenizer.chat_template = "{{ '<tool_call>' }}"
    assert tool_call_format("auto", tokenizer) is HERMES and tool_call_format("llama3_json", None) is LLAMA3_JSON
    with pytest.raises(ValueError, match="auto, hermes or llama3_json, not 'x'"):
        tool_call_format("x", tokenizer)


FUNCTIONS: list[dict[str, Any]] = [
    {"name": "now"},
    {
        "name": 'a"b',
        "parameters": {
            "$defs": {"size": {"type": "integer", "minimum": 1, "maximum": 9}},
            "properties": {"size": {"$ref": "#/$defs/size"}, "unit": {"enum": ["m", "s"]}},
            "required": ["size", "unit"],
        },
    },
]


@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON])
def test_grammars_force_calls(form: ToolCallFormat) -> None:
    pytest.importorskip("llguidance")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    factory = ConstraintFactory(tokenizer, len(tokenizer), frozenset({2}))

    def fits(text: str, several: bool, answer: Any = None) -> bool:
        grammar = tool_call_grammar(FUNCTIONS, form, several=several, answer=answer)
        matcher = factory.compile(StructuredOutputsParams(grammar=grammar)).compiled.deep_copy()
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())

    def call(name: str, arguments: str) -> str:
        written = f'{{"name": {json.dumps(name)}, "{form.arguments}": {arguments}}}'
        return f"{form.begin}\n{written}\n{form.end}" if form.begin else written

    good, none = call('a"b', '{"size": 3, "unit": "m"}'), call("now", "{}")
    for text, found in ((good, 1), (none, 1), (good + form.separator + none, 2)):
        assert fits(text, True) and fits(text, False) == (found == 1)
        assert len(parse_tool_calls(text, form)) == found
    # Parameters are objects, also where a schema does not say so, and have no others than those named.
    for arguments in ("3", "{}", '{"size": 0, "unit": "m"}', '{"size": 3, "unit": "m", "more": 1}'):
        assert not fits(call('a"b', arguments), True)
    assert not fits(call("other", "{}"), True) and not fits("", True)
    answer = {"enum": ["yes"]}
    assert fits('"yes"', True, answer) and fits(good, True, answer) and not fits('"yes"', True)


def test_calls_are_rendered_as_objects() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    )
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": 1})}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    chat_template = template + "{% endfor %}{% endfor %}"
    shown = tokenizer.apply_chat_template(plain_messages(messages), tokenize=False, chat_template=chat_template)
    assert shown == '{"a": 1}2'
    call["function"] = {"name": "f", "arguments": "{"}
    with pytest.raises(ValueError, match="arguments of a tool call are a JSON object"):
        plain_messages(messages)
