"""Answers of chats taken apart: thoughts, text and calls, in streams and whole."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from tokenizers import AddedToken

from nanovllm import SamplingParams, StructuredOutputsParams
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.serve.openai_format import LEAST_LOGPROB, ShownTokens, chat_finish_reason, chat_logprobs
from nanovllm.text.answer_formats import HERMES, REASONING_FORMATS, Start, reasoning_format
from nanovllm.text.answers import AnswerFormat, AnswerOptions, AnswerSplitter, whole_calls
from tests.small_tokenizers import MARK, sentencepiece_tokenizer

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
THINK, HARMONY = "</think>", "<|channel|>"

# Format, where an answer begins, text; thoughts and answer.
REASONING: list[tuple[str, Start, str, tuple[str, str]]] = [
    ("auto", "unknown", "They greet me.\n</think>\n\nHello!", ("They greet me.", "Hello!")),
    ("auto", "unknown", "<seed:think>They greet me.</seed:think>Hello!", ("They greet me.", "Hello!")),
    ("auto", "unknown", "[THINK]They greet me.[/THINK]Hello!", ("They greet me.", "Hello!")),
    ("auto", "unknown", "Hello <b>", ("", "Hello <b>")),
    ("auto", "unknown", " <think>\na </seed:think> b\n</think>\n\n c </think>", ("a </seed:think> b", "c </think>")),
    ("auto", "before", "Hello </think>", ("", "Hello </think>")),
    ("auto", "inside", "a < b </thin", ("a < b </thin", "")),
    ("auto", "answer", "<think>a</think>", ("", "<think>a</think>")),
    ("seed_oss", "unknown", "<think>a</think>", ("", "<think>a</think>")),
    ("granite", "before", "Here is my thought process: a\nHere is my response: b", ("a", "b")),
    ("gemma4", "before", "<|channel>thought\na<channel|>b", ("a", "b")),
]


@pytest.mark.parametrize(("name", "start", "text", "found"), REASONING)
def test_thoughts_are_found_however_text_comes(name: str, start: Start, text: str, found: tuple[str, str]) -> None:
    form = make(reasoning_parser=name)
    for at in range(len(text) + 1):
        pieces = [text[:at], text[at:]]
        assert split(AnswerSplitter(AnswerOptions(form, separates=True), start), pieces) == (*found, [])
        # With their tags they are the text, to the letter.
        assert split(AnswerSplitter(AnswerOptions(form), start), pieces) == ("", text, [])


def test_thoughts_and_answers_come_as_they_are_written() -> None:
    def found(start: Start, *pieces: str) -> list[tuple[str, str]]:
        splitter = AnswerSplitter(AnswerOptions(make(), separates=True), start)
        return [(new.reasoning, new.content) for new in map(splitter.append, pieces)]

    assert found("inside", "a", "b </think>", "c") == [("a", ""), ("b", ""), ("", "c")]
    assert found("before", "a", " b") == [("", "a"), ("", " b")]
    # Only an end tag says whether there were thoughts.
    assert found("unknown", "a") == [("", "")]


@pytest.mark.parametrize(
    ("name", "prompt", "taught", "start"),
    [
        ("auto", "assistant\n<think>\n", True, "inside"),
        ("auto", "<think>\n\n</think>\n\n", True, "answer"),
        ("auto", "assistant\n", True, "unknown"),
        ("auto", "assistant\n", False, "before"),
        ("deepseek_r1", "assistant\n", False, "inside"),
        ("seed_oss", "<seed:think>", True, "inside"),
    ],
)
def test_a_prompt_says_where_its_answer_begins(name: str, prompt: str, taught: bool, start: Start) -> None:
    assert reasoning_format(name, None).start(prompt, taught) == start


def make(template: str = "", special: tuple[str, ...] = (), **names: str) -> AnswerFormat:
    tokenizer = sentencepiece_tokenizer(f"{MARK}a", special=special)
    tokenizer.chat_template = template
    return AnswerFormat(tokenizer, **names)


def split(splitter: AnswerSplitter, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    deltas = [splitter.append(piece, i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    calls = whole_calls(call for delta in deltas for call in delta.calls)
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


@pytest.mark.parametrize("separates", [False, True])
def test_calls_in_thoughts_are_none(separates: bool) -> None:
    options = AnswerOptions.of(make(), TOOLS, separates=separates)
    text = f"<think>\nMaybe {CALL}\n</think>\n\nYes. {CALL}"
    for pieces in ([text], [*text]):
        reasoning, content, calls = split(options.splitters([], SamplingParams())[0], pieces)
        assert calls == [("f", "{}")]
        if separates:
            assert (reasoning, content) == (f"Maybe {CALL}", "Yes.")
        else:
            assert (reasoning, content) == ("", f"<think>\nMaybe {CALL}\n</think>\n\nYes.")


def test_tags_that_are_special_tokens_are_kept_and_others_dropped() -> None:
    form = make("{{ '<tool_call>' }}", ("<tool_call>", "</tool_call>", "<|im_end|>"))
    params, options = SamplingParams(), AnswerOptions.of(form, TOOLS)
    assert not options.constrain(params).skip_special_tokens and options.form.calls is HERMES
    text = f"Hi<|im_end|> {CALL}<|im_end|>"
    for pieces in ([text], [*text]):
        assert split(options.splitters([], params)[0], pieces)[1:] == ("Hi", [("f", "{}")])
    # In a grammar a tag that is a token goes by its id.
    structured = AnswerOptions.of(form, TOOLS, "required").constrain(params).structured_outputs
    assert structured is not None and f"<[{form.tag_tokens['<tool_call>']}]>" in str(structured.grammar)
    # Who asks for special tokens gets all of them.
    shown = SamplingParams(skip_special_tokens=False)
    assert split(options.splitters([], shown)[0], [text])[1] == "Hi<|im_end|><|im_end|>"
    output = RequestOutput(0, None, [1], [CompletionOutput(0, text, [1], finish_reason="stop")], True)
    options.complete(output, params)
    assert [call.name for call in output.outputs[0].tool_calls] == ["f"] and output.outputs[0].text == f"Hi {CALL}"
    # Nothing changes for texts that are not taken apart, or whose tags are no special tokens.
    assert AnswerOptions.of(form).constrain(params).skip_special_tokens
    assert AnswerOptions.of(make(), TOOLS).constrain(params).skip_special_tokens


def test_a_special_token_need_not_have_a_name() -> None:
    tokenizer = sentencepiece_tokenizer(f"{MARK}a")
    tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    assert "[TOOL_CALLS]" not in tokenizer.all_special_tokens
    options = AnswerOptions.of(AnswerFormat(tokenizer, "mistral"), TOOLS)
    assert not options.constrain(SamplingParams()).skip_special_tokens


def test_answers_of_channels_are_always_taken_apart() -> None:
    options = AnswerOptions.of(make(HARMONY, ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")))
    assert options.separates and not options.constrain(SamplingParams()).skip_special_tokens
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello"
    for pieces in ([text], [*text]):
        assert split(options.splitters([], SamplingParams())[0], pieces) == ("Hm.", "Hello", [])
    # A message has one call, and its end ends the answer.
    structured = AnswerOptions.of(options.form, TOOLS, "required").constrain(SamplingParams()).structured_outputs
    assert structured is not None and "call)*" not in str(structured.grammar)


def test_calls_have_the_ids_that_templates_take() -> None:
    def ids(parser: str, text: str) -> list[str]:
        splitter = AnswerOptions.of(make(tool_call_parser=parser), TOOLS).splitters([], SamplingParams())[0]
        calls = [call for call in splitter.append(text, True).calls if call.name]
        assert all(call.id in (None, own) for call, own in zip(calls, splitter.call_ids, strict=True))
        return splitter.call_ids

    own, mistral = ids("hermes", CALL * 2), ids("mistral", CALL * 2)
    assert len(set(own)) == 2 and all(found.startswith("call_") for found in own)
    assert all(len(found) == 9 and found.isalnum() for found in mistral)
    # A model may give them itself.
    assert ids("hermes", "[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{}") == ["abc123456"]
    assert ids("kimi_k2", "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}") == ["functions.f:3"]


def test_an_answer_that_is_cut_says_so_and_json_has_no_infinity() -> None:
    splitter = AnswerOptions.of(make(), TOOLS).splitters([], SamplingParams())[0]
    splitter.append(CALL, True)
    cut = CompletionOutput(0, CALL, [1], None, [{1: Logprob(-math.inf, 1, "a")}], "length")
    assert chat_finish_reason(cut, splitter) == "length"
    assert f'"logprob": {LEAST_LOGPROB}' in json.dumps(chat_logprobs(cut, ShownTokens()), allow_nan=False)


def test_forced_calls_that_are_cut_leave_no_text() -> None:
    options = AnswerOptions.of(make(), TOOLS, "required")
    thoughts = "<think>Hm.</think>"
    for pieces, calls in (
        ([f"{thoughts}<tool_call>\n"], []),
        ([thoughts, CALL, '\n<tool_call>\n{"name":'], [("f", "{}")]),
    ):
        assert split(options.splitters([], SamplingParams())[0], pieces) == ("", thoughts, calls)


def test_answers_that_begin_within_thoughts_are_bound_after_them() -> None:
    form = make(reasoning_parser="deepseek_r1")
    json_params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"enum": [1]}))
    for options, params in (
        (AnswerOptions.of(form, separates=True), json_params),
        (AnswerOptions.of(form, TOOLS, "required", separates=True), SamplingParams()),
    ):
        structured = options.constrain(params).structured_outputs
        assert structured is not None and structured.after_thinking == THINK
        assert options.splitters([], params)[0].append(f"a{THINK}", False).reasoning == "a"


def test_a_template_that_knows_both_tags_has_answers_that_stream() -> None:
    for template, content in (("<think></think>", "x"), ("</think>", "")):
        options = AnswerOptions.of(make(f"{{{{ '{template}' }}}}"), separates=True)
        assert options.splitters([], SamplingParams())[0].append("x", False).content == content


def test_tools_may_be_what_templates_alone_take() -> None:
    options = AnswerOptions(make(), [{"name": "f"}, print])  # type: ignore[list-item]
    assert split(options.splitters([], SamplingParams())[0], [CALL])[2] == [("f", "{}")]


def test_what_a_request_asks_of_its_answer() -> None:
    form, params = make("{{ '<tool_call></think>' }}"), SamplingParams()
    assert AnswerOptions.of(form, TOOLS).constrain(params) == params
    forced = AnswerOptions.of(form, TOOLS, {"type": "function", "function": {"name": "f"}})
    structured = forced.constrain(params).structured_outputs
    # Thoughts may come first.
    assert structured is not None and structured.after_thinking and '"f"' in str(structured.grammar)
    # Then a call need not wait for the end of thoughts that have no beginning.
    assert forced.splitters([], params)[0].append(CALL, False).calls
    assert AnswerOptions.of(form, TOOLS).splitters([], params)[0].append("x", False).content == ""
    json_params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"enum": [1]}))
    for separates in (False, True):
        answer = AnswerOptions.of(form, separates=separates).constrain(json_params).structured_outputs
        assert answer is not None and answer.after_thinking is separates and answer.json == {"enum": [1]}
    assert AnswerOptions.of(form, TOOLS, "none").template_tools() is None
    for tools, choice, message in (
        (TOOLS, {"function": {"name": "g"}}, "none of the tools"),
        (None, "required", "there are no tools"),
        (TOOLS, "any", "auto, none, required or a function"),
        ([{"name": "f"}], None, "a tool is"),
    ):
        with pytest.raises(ValueError, match=message):
            AnswerOptions.of(form, tools, choice)


def test_formats_have_names_and_unknown_ones_are_told() -> None:
    for name, form in REASONING_FORMATS.items():
        assert make(reasoning_parser=name).reasoning is form
    with pytest.raises(ValueError, match=r"reasoning_parser must be auto or one of .*, not 'x'"):
        make(reasoning_parser="x")
    with pytest.warns(UserWarning, match="not known"):
        make("{{ tools }}")
