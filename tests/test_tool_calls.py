"""Calls of tools: taken out of text as it comes, forced by grammars, and rendered for chat templates."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from nanovllm.assets import BUNDLED_MODEL
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.text.answer_formats import (
    CALL_TAGS,
    HERMES,
    LLAMA3_JSON,
    SYNTAXES,
    TOOL_CALL_FORMATS,
    ToolCallFormat,
    tool_call_format,
)
from nanovllm.text.answer_parsers import ToolCallDelta
from nanovllm.text.answers import AnswerFormat, AnswerOptions, AnswerSplitter, tool_calls, whole_calls
from nanovllm.text.grammars import GrammarCompiler, tool_call_grammar

TRICKY = '{"a": 1, "s": "}{\\"</tool_call>\\\\"}'
JSON = '{"a": 1, "b": "x } \\"y", "c": [1, {"d": null}]}'
BOTH = [("add", JSON), ("now", "{}")]
# `b` is a text, whatever it looks like.
TEXT = {"anyOf": [{"oneOf": [{"type": "string"}]}, {"type": "null"}]}
SCHEMA = {"properties": {"a": {"type": "integer"}, "b": TEXT, "c": {}}}
FUNCTIONS: list[dict[str, Any]] = [{"name": "add", "parameters": SCHEMA}, {"name": "now"}]
Found = tuple[str, list[tuple[str, str]]]
CASES: list[tuple[str, str, Found]] = [
    ("hermes", "  plain < text <tool", ("  plain < text <tool", [])),
    (
        "hermes",
        f'Well:\n<tool_call>\n{{"name": "add", "arguments": {TRICKY}}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"b": 2}, "name": "x"}</tool_call> Done.',
        ("Well:Done.", [("add", TRICKY), ("x", '{"b": 2}')]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    (
        "hermes",
        '<tool_call>no</tool_call> or <tool_call>{"name": "f", "arguments": {}}',
        ("<tool_call>no</tool_call> or", [("f", "{}")]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', ("", [("f", '{"a": [1')])),
    ("hermes", '<tool_call>{"na', ('<tool_call>{"na', [])),
    ("hermes", '<tool_call>{"id": "c", "name": "f", "arguments": {"a": 1}}</tool_call>', ("", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"tool": 0, "name": "f", "arguments": {}}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": "}"}</tool_call>.', (".", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "hm"}</tool_call>', ("", [("f", '"hm"')])),
    ("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', ("", [("f", "{}"), ("g", "{}")])),
    # Of other formats: a model need not write what its template teaches.
    ("hermes", f'functools[{{"name": "add", "arguments": {JSON}}}]', ("", BOTH[:1])),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"q": {"b": "}"}}}; {"name": "g", "parameters": {}}',
        ("", [("f", '{"q": {"b": "}"}}'), ("g", "{}")]),
    ),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"q": "é"}}', ("", [("f", '{"q": "é"}')])),
    ("llama3_json", '{"name": "Ann"}', ('{"name": "Ann"}', [])),
    ("llama3_json", '{"answer": 3}', ('{"answer": 3}', [])),
    ("llama3_json", '{"answer": {"name": "f", "parameters": {}}}', ('{"answer": {"name": "f", "parameters": {}}}', [])),
    (
        "llama3_json",
        '{"answer": 1, "name": "f", "parameters": {}}',
        ('{"answer": 1, "name": "f", "parameters": {}}', []),
    ),
    (
        "llama3_json",
        f'I call.\n{{"name": "add", "parameters": {JSON}}}\n{{"name": "now", "parameters": {{}}}}',
        ("I call.", BOTH),
    ),
    ("llama3_json", 'Use {x}, {"y": 1} or [1]', ('Use {x}, {"y": 1} or [1]', [])),
    ("pythonic", '[add(a=1, b="x } \\"y", c=[1, {"d": None}]), now()]', ("", BOTH)),
    (
        "pythonic",
        "Sure:\n<|python_start|>[a.b(x=True, y=null)]<|python_end|>",
        ("Sure:", [("a.b", '{"x": true, "y": null}')]),
    ),
    # A call begins a new line.
    ("pythonic", "Ok <|python_start|>[now()]<|python_end|>", ("Ok", [("now", "{}")])),
    ("pythonic", "Ok <|tool_call_start|>[now()]<|tool_call_end|> [now()]", ("Ok", [("now", "{}")] * 2)),
    ("pythonic", "[1, 2] and [len(x)]\n[f(1)]", ("[1, 2] and [len(x)]\n[f(1)]", [])),
    ("mistral", f"Ok[TOOL_CALLS]add[ARGS]{JSON}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}", ("Ok", BOTH)),
    ("mistral", "[TOOL_CALLS] is a tag", ("[TOOL_CALLS] is a tag", [])),
    (
        "qwen3_coder",
        'Ok.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx } "y\n</parameter>\n'
        '<parameter=c>\n[1, {"d": null}]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n'
        "</function>\n</tool_call>",
        ("Ok.", BOTH),
    ),
    (
        "qwen3_coder",
        "<function=add>\n<parameter=b>1</parameter>\n</function>\n</tool_call>",
        ("", [("add", '{"b": "1"}')]),
    ),
    ("qwen3_coder", "<tool_call><function=add><parameter=b>1</parameter><parameter=a>", ("", [("add", '{"b": "1"')])),
    (
        "qwen3_coder",
        "<function=f><parameter=a>\n  if x:\n\n</parameter></function>",
        ("", [("f", '{"a": "  if x:\\n"}')]),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f>\n<parameter=a>\nParis\n<parameter=b>\n3\n</function></tool_call>",
        ("", [("f", '{"a": "Paris", "b": 3}')]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</toll', ("</toll", [("f", "{}")])),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|><|tool_call_end|>", ("", [("f", "{}")])),
    ("openai", "<|channel|>commentary to=functions.f<|message|><|call|>", ("", [("f", "{}")])),
    ("qwen3_coder", '<function=f>{"a": 1}</function>.', (".", [("f", '{"a": 1}')])),
    ("qwen3_coder", "<function=f> is no call", ("<function=f> is no call", [])),
    ("glm45", '<tool_call>now{"a": 1}</tool_call>', ('<tool_call>now{"a": 1}</tool_call>', [])),
    (
        "seed_oss",
        "<seed:tool_call><function=f><parameter=a>True</parameter><parameter=c>{'d': None}</parameter>"
        "</function></seed:tool_call>",
        ("", [("f", '{"a": true, "c": {"d": null}}')]),
    ),
    (
        "glm45",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        '<arg_value>x } "y</arg_value>'
        '<arg_key>c</arg_key><arg_value>[1, {"d": null}]</arg_value>\n</tool_call>\n<tool_call>now</tool_call>',
        ("", BOTH),
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b" string="true">x } "y</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="c" string="false">'
        '[1, {"d": null}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        ("", BOTH),
    ),
    ("phi4_mini_json", "functools.reduce", ("functools.reduce", [])),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="b">x } "y</parameter>\n'
        '<parameter name="c">[1, {"d": null}]</parameter>\n</invoke>\n<invoke name="now">\n'
        "</invoke>\n</minimax:tool_call>",
        ("", BOTH),
    ),
    (
        "gemma4",
        '<|tool_call>call:add{a:1,b:<|"|>x } "y<|"|>,c:[1,{d:None}]}<tool_call|><|tool_call>call:now{}<tool_call|>',
        ("", BOTH),
    ),
    ("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|>Checking.", ("Checking.", [("now", "{}")])),
    (
        "openai",
        "<|channel|>analysis<|message|>Hm <tool_call>.<|end|><|start|>assistant<|channel|>commentary<|message|>I call."
        f"<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{JSON}<|call|>",
        ("I call.", BOTH[:1]),
    ),
    ("openai", " to=functions.now<|channel|>commentary json<|message|>{}", ("", [("now", "{}")])),
    ("openai", "<|channel|>final<|message|>Hello <|world<|return|>", ("Hello <|world", [])),
    ("openai", "plain", ("plain", [])),
    ("openai", "final words", ("final words", [])),
    ("openai", "<|channel|>analysis", ("", [])),
]


def splitter_of(name: str, parallel: bool = True) -> AnswerSplitter:
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    return AnswerSplitter(AnswerOptions(AnswerFormat(None, name), tools, parallel=parallel), "answer")


def parse(name: str, pieces: list[str]) -> tuple[Found, list[int]]:
    """Return what a parser makes of text in pieces, and in which pieces there was something of a call."""
    splitter, content, calls, at = splitter_of(name), "", list[ToolCallDelta](), []
    for index, piece in enumerate(pieces):
        new = splitter.append(piece, index == len(pieces) - 1)
        content += new.content
        calls += new.calls
        at += [index] * bool(new.calls)
    return (content, whole_calls(calls)), at


@pytest.mark.parametrize(("name", "text", "found"), CASES)
def test_calls_are_found_however_text_comes(name: str, text: str, found: Found) -> None:
    assert parse(name, [text])[0] == found == parse(name, [*text, ""])[0]
    for at in range(len(text)):
        assert parse(name, [text[:at], text[at:]])[0] == found, at
        # What a limit has cut.
        assert parse(name, [text[:at]])[0] == parse(name, [*text[:at], ""])[0], at


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "glm45", "openai"])
def test_damaged_answers_are_read_the_same_however_they_come(form: str) -> None:
    for seed in range(150):
        rng = random.Random(seed)
        text = rng.choice(CASES)[1]
        for _ in range(3):
            at, other = rng.randrange(len(text) + 1), rng.choice(CASES)[1]
            text = (
                text[:at]
                + rng.choice(["", '"', "}", "\n", "[", other[: rng.randrange(60)]])
                + text[at + rng.randrange(3) :]
            )
        assert parse(form, [text])[0] == parse(form, [*text, ""])[0], text


def test_arguments_come_while_they_are_written() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "1234"}}</tool_call>'
    _, at = parse("hermes", [*text])
    # The name, and each character of the arguments.
    assert at == [text.index('{"a"') + i for i in range(len('{"a": "1234"}'))]
    text = "<tool_call><function=f><parameter=a>1</parameter><parameter=b>2</parameter></function>"
    assert len(parse("hermes", [*text])[1]) == 4
    plain = [parse("hermes", [*"a text", ""])[0][0], splitter_of("hermes").append("a text").content]
    assert plain == ["a text", "a text"]
    only_first = splitter_of("llama3_json", parallel=False)
    new = only_first.append('{"name": "f", "parameters": {}};{"name": "g", "parameters": {}}', final=True)
    assert [delta.name for delta in new.calls if delta.name] == ["f"]


def test_no_tag_begins_another() -> None:
    begins = [tag for item in SYNTAXES for tag in (*item.sections, item.call)]
    assert not [(a, b) for a in begins for b in begins if a != b and b.startswith(a)]
    assert set(begins) < CALL_TAGS


def test_the_format_follows_from_the_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    assert tool_call_format("auto", tokenizer) is HERMES is tool_call_format("auto", None)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    assert tool_call_format("auto", tokenizer) is LLAMA3_JSON
    for name, form in TOOL_CALL_FORMATS.items():
        tokenizer.chat_template = "".join(form.marks)
        assert tool_call_format("auto", tokenizer) is form is tool_call_format(name, None)
    with pytest.raises(ValueError, match=r"auto or one of cohere, .*, not 'x'"):
        tool_call_format("x", tokenizer)


FORCED: list[dict[str, Any]] = [
    {"name": "now"},
    {
        "name": "a-b",
        "parameters": {
            "$defs": {"size": {"type": "integer", "minimum": 1, "maximum": 9}},
            "properties": {"size": {"$ref": "#/$defs/size"}, "unit": {"enum": ["m", "s"]}},
            "required": ["size", "unit"],
        },
    },
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    pytest.importorskip("llguidance")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    # A tag of Hermes' is a token of its own, as Qwen's tokenizers have it.
    tokenizer.add_tokens(["<tool_call>"])
    return GrammarCompiler(tokenizer, len(tokenizer), frozenset({2}))


def fits(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    """Whether a grammar takes a text as the tokenizer encodes it."""
    matcher = compiler.compile(StructuredOutputsParams(grammar=grammar)).compiled.deep_copy()
    token_ids = compiler._hf_tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def written(form: ToolCallFormat, *calls: tuple[str, str]) -> str:
    """Return calls as they are forced."""
    texts = [
        form.call.replace("NAME", json.dumps(name)[1:-1]).replace("ARGUMENTS", arguments).replace("NUMBER", "7")
        for name, arguments in calls
    ]
    return form.list_begin + form.separator.join(texts) + form.list_end


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_grammars_force_calls(compiler: GrammarCompiler, name: str) -> None:
    form = TOOL_CALL_FORMATS[name]
    good, none = ("a-b", '{"size": 3, "unit": "m"}'), ("now", "{}")
    tokens = {"<tool_call>": compiler._hf_tokenizer.convert_tokens_to_ids("<tool_call>")}
    grammars = {n: tool_call_grammar(FORCED, form, several=n > 1, tokens=tokens) for n in (1, 2)}
    for calls in ((good,), (none,), (none, none)):
        text = written(form, *calls)
        assert [fits(compiler, grammars[n], text) for n in (1, 2)] == [len(calls) == 1, True]
        for pieces in ([text], [*text, ""]):
            content, found = parse(name, pieces)[0]
            assert (content, [(each, arguments.strip()) for each, arguments in found]) == ("", [*calls])
    # Parameters are objects, also where a schema does not say so, and have no others than those named.
    for arguments in ("3", "{}", '{"size": 0, "unit": "m"}', '{"size": 3, "unit": "m", "more": 1}'):
        assert not fits(compiler, grammars[2], written(form, ("a-b", arguments)))
    assert not fits(compiler, grammars[2], written(form, ("other", "{}"))) and not fits(compiler, grammars[2], "")
    with_answer = tool_call_grammar(FORCED, form, several=True, answer={"enum": ["yes"]}, tokens=tokens)
    assert fits(compiler, with_answer, f'{form.answer_begin}"yes"') and fits(compiler, with_answer, written(form, good))
    assert not fits(compiler, grammars[2], f'{form.answer_begin}"yes"')


A, B = ({"type": "object", "properties": {k: {"enum": [1]}}, "required": [k]} for k in "ab")


DEFINED = {"A": A, "B": B, "C": {"$ref": "#/$defs/B"}}
NESTED = {"properties": {"p": {"allOf": [A, B]}, "q": A}, "$defs": DEFINED}


# Objects that are no parts of others are closed.
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"allOf": [A, B]}, ['{"a": 1, "b": 1}'], []),
        ({"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/C"}], "$defs": DEFINED}, ['{"a": 1, "b": 1}'], []),
        ({"type": "object", "anyOf": [A, B]}, ['{"a": 1}', '{"b": 1}'], []),
        ({"oneOf": [A, {**B, "additionalProperties": False}]}, ['{"a": 1}'], []),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, ['{"a": 1}'], []),
        ({"properties": {"p": {"allOf": [A, B]}}, "required": ["p"]}, ['{"p": {"a": 1, "b": 1}}'], []),
        ({**A, "allOf": [B]}, ['{"a": 1, "b": 1}'], []),
        ({"type": "object", "required": ["a"]}, ['{"a": "x"}'], []),
        (
            {"properties": {"p": {"allOf": [A]}}, "required": None},
            ['{"p": {"a": 1}}', "{}"],
            ['{"p": {"a": 1, "c": 1}}'],
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"x": 1}'], []),
        (
            NESTED,
            ['{"p": {"a": 1, "b": 1, "c": 1}, "q": {"a": 1}}'],
            ['{"q": {"a": 1, "c": 1}}', '{"q": {"a": 1}, "r": 1}'],
        ),
    ],
)
def test_schemas_of_forced_calls_may_have_parts(
    compiler: GrammarCompiler, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = tool_call_grammar([{"name": "f", "parameters": schema}], LLAMA3_JSON, several=False)
    assert all(fits(compiler, grammar, written(LLAMA3_JSON, ("f", arguments))) for arguments in good)
    assert not any(fits(compiler, grammar, written(LLAMA3_JSON, ("f", arguments))) for arguments in [*bad, "[]"])


def test_code_in_arguments_may_have_line_breaks() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"code": "a\nb"}}</tool_call>'
    (call,) = tool_calls(splitter_of("hermes").append(text, final=True).calls)
    assert call.arguments == {"code": "a\nb"}
    # A call has an object of arguments.
    wrong = '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'
    assert tool_calls(splitter_of("hermes").append(wrong + text, final=True).calls) == [call]
