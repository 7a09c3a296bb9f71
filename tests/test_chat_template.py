"""Messages as clients send them, in the forms that chat templates take."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from transformers import AutoTokenizer

from nanovllm.assets import BUNDLED_MODEL
from nanovllm.text.chat_template import (
    conversation_source,
    one_conversation,
    plain_messages,
    render_text,
    template_options,
)

TEXTS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
# As Mistral's and DeepSeek's, which look for what is there, and fail without it.
STRICT = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.name + m.content }}{% else %}"
    "{{ '[' + m.role + '] ' + m.content }}{% endif %}{% endfor %}"
)
# As GLM's and Gemma's, which show a result that is there.
LENIENT = "{% for m in messages %}[{{ m.role }}]{% if m.content is defined %} {{ m.content }}{% endif %}{% endfor %}"
# As LLaVA's.
PARTS = (
    "{% for m in messages %}[{{ m.role }}] {% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }};{% endfor %}{% endfor %}"
)
# As Gemma's: parts of users and assistants.
BOTH = (
    "{% for m in messages %}{% if m.content is string %}[{{ m.role }}] {{ m.content }}{% elif m.role == 'user' %}"
    "[{{ m.role }}] {% for part in m.content %}{% if part.type != 'text' %}{{ raise_exception('text alone') }}"
    "{% endif %}{{ part.text }};{% endfor %}{% else %}[{{ m.role }}] {{ m.content | tojson }}{% endif %}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ ARGUMENTS }}{% else %}{{ m.content }}"
    "{% endfor %}{% endfor %}"
)
OBJECTS = CALLS.replace("ARGUMENTS", "call.function.arguments | tojson")
ITEMS = CALLS.replace("{{ ARGUMENTS }}", "{% for key in call.function.arguments.items() %}{{ key }}{% endfor %}")
JOINED = CALLS.replace("ARGUMENTS", "'args: ' + call.function.arguments")
SHOWN = CALLS.replace("ARGUMENTS", "call.function.arguments")
NEITHER = CALLS.replace("ARGUMENTS", "'a text' if call.function.arguments is string else 'an object'")
EITHER = NEITHER.replace("'a text'", "call.function.arguments")
# Results in one form each, beside arguments in one.
RESULT_PARTS = JOINED.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }};{% endfor %}")
RESULT_TEXT = OBJECTS.replace("{{ m.content }}", "{{ m.content if m.content is string }}")
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}


@lru_cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


def render(template: str, *messages: Any, **options: Any) -> str:
    options = template_options({"chat_template": template, "chat_template_kwargs": options})
    return render_text(tokenizer(), one_conversation(list(messages)), **options)


def text_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize("calls", [[], None, ()])
def test_an_empty_list_of_calls_is_none(calls: Any) -> None:
    assert render(STRICT, {**ANSWER, "tool_calls": calls, "name": None}) == "[assistant] Yes"
    assert "name" not in plain_messages([{**ANSWER, "name": None}])[0]


def test_a_null_content_is_left_out() -> None:
    gap = {"role": "tool", "content": None}
    assert render(LENIENT, USER, gap) == "[user] Hi[tool]" == render(LENIENT, USER, {"role": "tool"})
    assert render(TEXTS, gap) == "[tool] "
    # Templates that cannot do without one have an empty text.
    assert render(STRICT, USER, call("{}"), gap) == "[user] Hif[tool] "
    assert render(PARTS, gap, USER) == "[tool] [user] Hi;"


@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}])
def test_arguments_come_in_the_form_that_shows_them(arguments: Any) -> None:
    assert render(OBJECTS, call(arguments), ANSWER) == '{"a": "é"}Yes' == render(SHOWN, call(arguments), ANSWER)
    assert render(JOINED, call(arguments), ANSWER) == 'args: {"a": "é"}Yes'
    assert render(ITEMS, call(arguments), ANSWER) == "('a', 'é')Yes"
    # transformers' own form, where both show or none does.
    assert render(NEITHER, call(arguments)) == "an object"
    both = EITHER.replace("'an object'", "'an object: ' + (call.function.arguments | tojson)")
    assert render(both, call(arguments)) == 'an object: {"a": "é"}'
    assert render(EITHER, call(arguments)) == '{"a": "é"}'
    with_tools = "{% if not tools %}{{ raise_exception('tools') }}{% endif %}" + JOINED
    assert render(with_tools, call(arguments), tools=TOOLS) == 'args: {"a": "é"}'


def test_no_arguments_are_an_empty_object() -> None:
    nothing: list[Any] = ["", None, "{}", {}, "null"]
    assert [render(OBJECTS, call(arguments)) for arguments in nothing] == ["{}"] * 5
    bad: list[Any] = ["{", "3", [1], '["a"]', 5]
    for arguments in bad:
        with pytest.raises(ValueError, match=r"arguments of a tool call are a JSON object, not .*[{3\[5]"):
            render(OBJECTS, call(arguments))


def test_contents_come_in_the_form_that_shows_them() -> None:
    parts = {"role": "user", "content": text_parts("Why", " so")}
    for user, shown in ((parts, "Why; so;"), ({"role": "user", "content": "Why so"}, "Why so;")):
        assert render(PARTS, user, ANSWER) == f"[user] {shown}[assistant] Yes;"
    assert render(TEXTS, parts) == "[user] Why so" == render(STRICT, parts)
    # What both show stays as it came, for each role: this template writes an answer's parts as JSON.
    assert render(BOTH, parts, {**parts, "role": "assistant"}, USER) == "[user] Why; so;[assistant] Why so[user] Hi"
    assert render(PARTS, {"role": "judge", "content": "Why so"}) == "[judge] Why so;"
    refusing = "{% for m in messages if m.content is string %}{{ raise_exception('no texts') }}{% endfor %}" + PARTS
    system = {"role": "system", "content": "Be brief."}
    assert render(refusing, system, USER, ANSWER) == "[system] Be brief.;[user] Hi;[assistant] Yes;"


def test_results_come_in_the_form_that_shows_them() -> None:
    for content in ("21 degrees", text_parts("21", " degrees")):
        result = {"role": "tool", "content": content}
        assert render(RESULT_TEXT, call({"a": 1}), result) == '{"a": 1}21 degrees'
        found = render(RESULT_PARTS, call({"a": 1}), result)
        assert found.replace(";", "") == 'args: {"a": 1}21 degrees' and found.endswith(";")


def test_parts_that_are_text() -> None:
    given = ["a", {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}]
    refusal = {"type": "refusal", "refusal": "d"}
    marked = {"type": "text", "text": "e", "cache_control": {}}
    assert render(TEXTS, {"role": "user", "content": [*given, refusal, marked]}) == "[user] abcde"
    assert render(PARTS, {"role": "user", "content": [*given, refusal, marked]}) == "[user] a;b;c;d;e;"
    assert one_conversation([{"role": "user", "content": [marked]}])[0]["content"] == [marked]
    assert one_conversation([{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]
    for bad in ({"type": "text"}, {"type": ["text"]}, {"text": "a"}, 5, {"type": "refusal", "text": "a"}):
        with pytest.raises(ValueError, match="content is a string, or a list of parts of type text"):
            render(TEXTS, {"role": "user", "content": [bad]})
    with pytest.raises(ValueError, match=r"^messages\[1\]\.content .*, not 'input_image': models run on text alone"):
        render(TEXTS, USER, {"role": "user", "content": [{"type": "input_image"}]})


def test_thoughts_are_parts_for_templates_that_take_them() -> None:
    thoughts = {"role": "user", "content": [{"type": "thinking", "thinking": "hm"}, *text_parts("Yes")]}
    taken = PARTS.replace(" | selectattr('type', 'equalto', 'text')", "")
    assert render(taken.replace("part.text", "part.thinking or part.text"), thoughts) == "[user] hm;Yes;"
    # This template refuses them.
    assert render(TEXTS, thoughts) == "[user] Yes" == render(BOTH, thoughts)


def test_what_is_not_known_is_the_templates_business() -> None:
    template = "{% for m in messages %}{{ m.mood }}{{ m.name }}{{ m.tool_call_id }}{{ m.content.a }}{% endfor %}"
    message = {"role": "tool", "content": {"a": 1}, "mood": "good", "name": "n", "tool_call_id": "7"}
    assert render(template, message) == "goodn71"
    assert one_conversation([message]) == [message] == plain_messages([message])


def test_messages_are_not_changed() -> None:
    given = [{**USER, "content": ["a"], "name": None}, call('{"a": 1}'), {**ANSWER, "tool_calls": []}]
    before = repr(given)
    found = one_conversation(given)
    render(JOINED, *given)
    render(PARTS, *given)
    assert repr(given) == before and one_conversation(found) == found


def test_the_openai_packages_messages() -> None:
    fields = {"role": "assistant", "content": None, "tool_calls": call('{"a": 1}')["tool_calls"]}
    message = pytest.importorskip("openai.types.chat").ChatCompletionMessage.model_validate(fields)
    right = '{"a": 1}Hi'
    assert render(OBJECTS, message, USER) == right
    assert render(OBJECTS, {"role": "assistant", "tool_calls": message.tool_calls}, USER) == right
    assert conversation_source([message]) == [[message]]
    assert conversation_source([[message], [USER]]) == [[message], [USER]]
    for wrong in ([[message]], [message, "Hi"]):
        with pytest.raises(ValueError, match="must be a list of dicts, one conversation"):
            one_conversation(wrong)


def test_a_refusal_has_the_templates_words() -> None:
    template = "{{ raise_exception('no\n  luck') }}"
    with pytest.raises(ValueError, match=r"^the chat template cannot be applied: no luck$"):
        render(template, USER)
    # Of the messages as they came, not as texts alone.
    template = "{% if messages[0].content is not defined %}{{ raise_exception('first') }}{% endif %}{{ 1 + '' }}"
    with pytest.raises(ValueError, match=r"cannot be applied: first$"):
        render(template, {"role": "user", "content": None})


def test_a_template_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    apply = type(tokenizer()).apply_chat_template

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return apply(*args, **options)

    monkeypatch.setattr(type(tokenizer()), "apply_chat_template", counted)
    for _ in range(3):
        render("once: " + TEXTS, USER)
    assert 3 < len(calls) < 40
    calls.clear()
    render("once: " + TEXTS, USER)
    assert len(calls) == 1
    # So is one that fails on what is missing, which it does not get to see again.
    for _ in range(2):
        calls.clear()
        assert render(STRICT, USER, call("{}"), ANSWER) == "[user] Hif[assistant] Yes"
    assert len(calls) == 1


def test_named_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer(), "chat_template", {"default": TEXTS, "tool_use": PARTS})
    assert render_text(tokenizer(), [USER]) == "[user] Hi"
    assert render_text(tokenizer(), [USER], tools=TOOLS) == "[user] Hi;"
    assert render_text(tokenizer(), [USER], chat_template="tool_use") == "[user] Hi;"


def test_the_other_apis_give_the_same_messages() -> None:
    pytest.importorskip("uvicorn")
    from nanovllm.serve.anthropic import CountTokensBody, messages_chat  # noqa: PLC0415
    from nanovllm.serve.responses import ResponseBody, response_chat  # noqa: PLC0415

    anthropic = CountTokensBody.model_validate(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": None}]},
            ],
        }
    )
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}
    output = {"type": "function_call_output", "call_id": "1", "output": ""}
    responses = ResponseBody.model_validate({"input": [USER, item, output]})
    right = [USER, call({"a": 1}), {"role": "tool", "tool_call_id": "1", "content": ""}]
    for chat in (messages_chat(anthropic), response_chat(responses)):
        found = [message.model_dump(exclude_unset=True) for message in chat.messages]
        assert one_conversation(found) == one_conversation(right)


def test_a_call_has_arguments_and_a_type() -> None:
    for function in ({"name": "f"}, {"name": "f", "arguments": None}):
        (found,) = one_conversation([{"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}])
        assert found["tool_calls"] == [{"type": "function", "id": "1", "function": {"name": "f", "arguments": {}}}]
