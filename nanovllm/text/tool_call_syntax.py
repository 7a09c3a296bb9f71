"""The syntaxes of tool calls: tags, and the text between them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ToolCallFormat:
    """A model's format of tool calls.

    Attributes:
        marks: texts that identify the format: a chat template of it contains all of them.
        call: template of a forced call, with placeholders NAME, ARGUMENTS (a JSON object) and optionally NUMBER. If the
            format does not use JSON, it is JSON between the format's tags, which the parser accepts too.
        separator: text between two calls.
        list_begin, list_end: texts before and after all calls.
        is_bare: whether calls may lack tags.
        has_bare_names: whether a name alone between `<tool_call>` tags is a call.
        has_channels: whether an answer is a list of messages, as in gpt-oss's harmony.
        answer_begin: text before a forced answer without calls.
        short_ids: whether templates require call ids of nine letters and digits.
    """

    marks: tuple[str, ...]
    call: str
    separator: str = "\n"
    list_begin: str = ""
    list_end: str = ""
    is_bare: bool = False
    has_bare_names: bool = False
    has_channels: bool = False
    answer_begin: str = ""
    short_ids: bool = False


@dataclass(frozen=True)
class Parameters:
    """A syntax with separate arguments, as in `<function=f><parameter=a>1</parameter></function>`.

    Attributes:
        name, name_end: tags around the function's name; may be empty.
        key, key_end: tags around a parameter's name.
        value, value_end: tags around its value; `value` may be empty.
        call_end: tag after the last parameter; empty: the surrounding syntax ends the call.
    """

    name: str
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    call_end: str


@dataclass(frozen=True)
class Syntax:
    """Tags, and the text between them.

    Attributes:
        sections: optional tags that begin a list of calls.
        call: the tag that begins a call.
        ends: tags that end calls and lists.
        body: syntax after the tag: "json", "pythonic", "mistral", "deepseek", "kimi", "gemma"; or parameter syntaxes,
            in the order in which they are tried. JSON is accepted with each.
    """

    sections: tuple[str, ...]
    call: str
    ends: tuple[str, ...]
    body: str | tuple[Parameters, ...] = "json"


_FUNCTION = Parameters("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>")
_ARG_KEYS = Parameters("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "")
_INVOKE = Parameters("", '">', '<parameter name="', '">', "", "</parameter>", "</invoke>")
_PARAM = Parameters("", '">', '<param name="', '">', "", "</param>", "</function>")
_DSML = Parameters("", '">', '<｜DSML｜parameter name="', '">', "", "</｜DSML｜parameter>", "</｜DSML｜invoke>")
SYNTAXES = (
    # Hermes, Qwen 2.5 and 3, Granite 4; Qwen3-Coder and Qwen3.5; GLM 4.5 to 4.7.
    Syntax((), "<tool_call>", ("</tool_call>",), (_FUNCTION, _ARG_KEYS)),
    # Models may omit the tag before it.
    Syntax((), "<function=", ("</tool_call>",), (replace(_FUNCTION, name=""),)),
    Syntax((), "<seed:tool_call>", ("</seed:tool_call>",), (_FUNCTION,)),
    Syntax((), "[TOOL_CALLS]", (), "mistral"),
    Syntax(
        ("<｜tool▁calls▁begin｜>",), "<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        "deepseek",
    ),
    Syntax(
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"), '<｜DSML｜invoke name="',
        ("</｜DSML｜invoke>", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"), (_DSML,),
    ),
    Syntax(
        ("<|tool_calls_section_begin|>",), "<|tool_call_begin|>", ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        "kimi",
    ),
    Syntax(("<minimax:tool_call>",), '<invoke name="', ("</invoke>", "</minimax:tool_call>"), (_INVOKE,)),
    Syntax((), '<function name="', (), (_PARAM,)),
    # Granite 3; Phi-4-mini; MiniMax-M1, Apriel; Nemotron Nano 2; Command R7B; GigaChat 3.1 and 3; LFM2; Gemma 4.
    Syntax((), "<|tool_call|>", ("<|/tool_call|>",)),
    Syntax((), "functools", ()),
    Syntax((), "<tool_calls>", ("</tool_calls>",)),
    Syntax((), "<TOOLCALL>", ("</TOOLCALL>",)),
    Syntax((), "<|START_ACTION|>", ("<|END_ACTION|>",)),
    Syntax((), "<|function_call|>", ()),
    Syntax((), "function call<|role_sep|>", ()),
    Syntax((), "<|tool_call_start|>", ("<|tool_call_end|>",), "pythonic"),
    Syntax((), "<|tool_call>", ("<tool_call|>",), "gemma"),
)  # fmt: skip
BARE_TAGS = ("<|python_tag|>", "<|python_start|>")
BARE_ENDS = ("<|python_end|>",)
_PARAMETERS = {form for syntax in SYNTAXES for form in syntax.body if isinstance(form, Parameters)}
CALL_TAGS = frozenset(
    [tag for syntax in SYNTAXES for tag in (*syntax.sections, syntax.call, *syntax.ends)]
    + [tag for form in _PARAMETERS for tag in (form.key, form.key_end, form.value, form.value_end)]
    + [*BARE_TAGS, *BARE_ENDS, "[ARGS]", "[CALL_ID]", '<|"|>', "<｜tool▁sep｜>", "<|tool_call_argument_begin|>"]
)
"""All tags of all formats."""
SYNTAX_BY_TAG = {tag: syntax for syntax in SYNTAXES for tag in (*syntax.sections, syntax.call)}
