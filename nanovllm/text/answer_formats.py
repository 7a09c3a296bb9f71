"""Formats of answers: the tags of tool calls and of reasoning.

Tags identify a format, so one parser accepts all tagged formats regardless of the model's template: fine-tuned models
may deviate from their templates. Calls without tags (Llama's JSON, lists of Python calls) are parsed only if the
format has them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

HARMONY_MARK = "<|channel|>"
CHANNEL_TAGS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")


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


_JSON = '{"name": "NAME", "arguments": ARGUMENTS}'
_LLAMA = '{"name": "NAME", "parameters": ARGUMENTS}'
_TAGGED = f"<tool_call>\n{_JSON}\n</tool_call>"

HERMES = ToolCallFormat(("<tool_call>",), _TAGGED)
LLAMA3_JSON = ToolCallFormat(('{"name": function name, "parameters":',), _LLAMA, ";", is_bare=True)
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
    "deepseek_v3": ToolCallFormat(
        ("<｜tool▁sep｜>", "```json"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        list_begin="<｜tool▁calls▁begin｜>", list_end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": ToolCallFormat(
        ("<｜tool▁sep｜>",), "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>", "",
        list_begin="<｜tool▁calls▁begin｜>", list_end="<｜tool▁calls▁end｜>",
    ),
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
    "mistral_v11": ToolCallFormat(("[ARGS]",), "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "", short_ids=True),
    "mistral": ToolCallFormat(
        ("[TOOL_CALLS]",), _JSON, ", ", list_begin="[TOOL_CALLS][", list_end="]", short_ids=True
    ),
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
    """Return a format by name, else a ValueError; "auto" detects it in the template or the tokenizer's vocabulary."""
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

Start = Literal["inside", "before", "unknown", "answer"]
TAIL = 16
"""Number of last tokens that can hold a whole tag and the space after it."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The tags around a model's reasoning.

    Attributes:
        tags: pairs of begin and end tag.
        begins_inside: whether an answer begins within the reasoning even without a begin tag in prompt or answer.
        has_channels: whether an answer is a list of messages, as in gpt-oss's harmony.
    """

    tags: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    begins_inside: bool = False
    has_channels: bool = False

    def start(self, prompt: str, is_taught: bool) -> Start:
        """Return the part in which an answer to a prompt with this end begins.

        `is_taught`: whether the chat template contains the tags: then the begin tag may be missing.
        """
        end = prompt.rstrip()
        if any(end.endswith(begin.rstrip()) for begin, _ in self.tags):
            return "inside"
        if any(end.endswith(tag.rstrip()) for _, tag in self.tags):
            return "answer"
        return "inside" if self.begins_inside else "unknown" if is_taught else "before"


_THINK = ReasoningFormat()
_DEEPSEEK_R1 = ReasoningFormat(begins_inside=True)
_SEED = ReasoningFormat((("<seed:think>", "</seed:think>"),))
_MISTRAL = ReasoningFormat((("[THINK]", "[/THINK]"),))
_GRANITE = ReasoningFormat(
    tuple((f"{here} my thought process:", f"{here} my response:") for here in ("Here is", "Here's"))
)
_COHERE = ReasoningFormat((("<|START_THINKING|>", "<|END_THINKING|>"),))
_GEMMA = ReasoningFormat((("<|channel>thought\n", "<channel|>"),))
_HARMONY = ReasoningFormat((("<|start|>assistant", "<|channel|>final<|message|>"),), has_channels=True)
ANY = ReasoningFormat((*_THINK.tags, *_SEED.tags, *_MISTRAL.tags, *_GEMMA.tags, *_COHERE.tags))
REASONING_FORMATS = {
    "cohere": _COHERE, "deepseek_r1": _DEEPSEEK_R1, "deepseek_v3": _THINK, "ernie45": _THINK, "gemma4": _GEMMA,
    "glm45": _THINK, "granite": _GRANITE, "holo2": _THINK, "kimi_k2": _THINK, "minimax_m2": _DEEPSEEK_R1,
    "mistral": _MISTRAL, "nemotron_v3": _DEEPSEEK_R1, "olmo3": _THINK, "openai_gptoss": _HARMONY, "qwen3": _THINK,
    "seed_oss": _SEED, "step3": _DEEPSEEK_R1, "step3p5": _THINK,
}  # fmt: skip
"""Formats by name, vLLM's where it has one."""


def reasoning_format(name: str, tokenizer: Any, template: str | None = None) -> ReasoningFormat:
    """Return a format by name; "auto" detects it in the template, else accepts any tags. See `tool_call_format`."""
    if name != "auto":
        if name not in REASONING_FORMATS:
            raise ValueError(f"reasoning_parser must be auto or one of {', '.join(REASONING_FORMATS)}, not {name!r}")
        return REASONING_FORMATS[name]
    return _HARMONY if HARMONY_MARK in (template or template_text(tokenizer)) else ANY


def template_text(tokenizer: Any) -> str:
    """Return a tokenizer's chat templates as one text, to search for tags; empty if it has no template."""
    return str(getattr(tokenizer, "chat_template", None) or "")


def prompt_end(tokenizer: Any, prompt: Any) -> str:
    """Return the text of a prompt's last tokens, with special tokens."""
    return "" if tokenizer is None else str(tokenizer.decode(list(prompt[-TAIL:])))
