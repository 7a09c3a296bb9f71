"""Conversations as clients send them, and as transformers documents them."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]
# A template has written an object as Python does, a part as an object, or a JSON text as a JSON string.
_WRONG = ("{'", "'type': ", '"type": "text"', '\\"city')


class Conversation(NamedTuple):
    """A conversation in the forms in which it is written.

    Attributes:
        name: what is particular about it.
        sent: as a client sends it.
        standards: as transformers documents it; the first form first, then those that templates take instead.
        words: what the prompt must have.
        options: of `LLM.chat`.
    """

    name: str
    sent: Messages
    standards: list[Messages]
    words: tuple[str, ...] = ()
    options: Any = MappingProxyType({})

    def is_whole(self, text: str) -> bool:
        """Return whether a prompt has all words, and shows no object where these are to be."""
        return all(word in text for word in self.words) and not any(sign in text for sign in _WRONG)


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _call(arguments: Any, call_id: str = "abcdef123") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def _answers(*calls: tuple[dict[str, Any], str], **fields: Any) -> list[dict[str, Any]]:
    """Return the standard forms of an answer: arguments as objects or as text, and no content or an empty one."""
    return [
        {"role": "assistant", **content, "tool_calls": [_call(form(given), call_id) for given, call_id in calls]}
        for form in _FORMS
        for content in ([fields] if "content" in fields else [fields, {"content": "", **fields}])
    ]


_SYSTEM = {"role": "system", "content": "Be brief."}
_ASK = {"role": "user", "content": "Is it warm in Rome?"}
_THOUGHT = {"type": "thinking", "thinking": "Look it up."}
_MORE = {"role": "user", "content": "Tell me more."}
_YES = {"role": "assistant", "content": "It is warm."}
_RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "weather", "content": "21 degrees"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "its name"}},
                "required": ["city"],
            },
        },
    }
]
_FORMS: tuple[Callable[[Any], Any], ...] = (dict, json.dumps)
_ROME, _OSLO = ({"city": "Rome"}, "abcdef123"), ({"city": "Oslo"}, "abcdef124")
_SENT_CALL = {"role": "assistant", "content": None, "tool_calls": [_call('{"city": "Rome"}')]}


def _same(name: str, *messages: dict[str, Any], **options: Any) -> Conversation:
    """Return a conversation that clients send in its standard form."""
    return Conversation(name, list(messages), [list(messages)], options=options)


def _gap(name: str, *messages: dict[str, Any], sent: Messages, words: tuple[str, ...] = ()) -> Conversation:
    """Return a conversation with messages that have no content; templates take none, or an empty one."""
    return Conversation(name, sent, [list(messages), [{"content": "", **message} for message in messages]], words)


def _called(
    name: str, fields: dict[str, Any], *before: dict[str, Any], after: tuple[dict[str, Any], ...] = (), **options: Any
) -> Conversation:
    """Return a conversation with a call that clients send with these fields; one that is `...` is left out."""
    sent = {key: value for key, value in {**_SENT_CALL, **fields}.items() if value is not ...}
    told = {key: value for key, value in fields.items() if key in ("content", "reasoning_content") and value is not ...}
    standards = [[*before, _ASK, answer, _RESULT, *after] for answer in _answers(_ROME, **told)]
    return Conversation(name, [*before, _ASK, sent, _RESULT, *after], standards, ("Rome", "21 degrees"), options)


CONVERSATIONS: list[Conversation] = [
    _same("a question", _ASK),
    _same("a system message", _SYSTEM, _ASK),
    _same("turns", _SYSTEM, _ASK, _YES, _MORE),
    _same("tools", _SYSTEM, _ASK, tools=_TOOLS),
    _same("an empty question", {"role": "user", "content": ""}),
    _same("signs", {"role": "user", "content": "  \"'\\ <b>& 日本 👩‍👧\n\n{{ x }} \t"}),
    _same("a developer", {"role": "developer", "content": "Be brief."}, _ASK),
    _same("names", {**_ASK, "name": "Ann"}, {**_YES, "name": "Bob"}, {**_MORE, "name": "Ann"}),
    _same("unknown fields", {**_ASK, "mood": "good", "more": {"a": [1]}}, {**_YES, "logprobs": 1}, _MORE),
    _same("thoughts", _ASK, {**_YES, "reasoning_content": "Look it up."}, _MORE),
    _same("thoughts, vLLM's name", _ASK, {**_YES, "reasoning": "Look it up."}, _MORE),
    _same("an answer to continue", _ASK, _YES, continue_final_message=True),
    _same("no prompt for an answer", _SYSTEM, _ASK, add_generation_prompt=False),
    Conversation(
        "no calls",
        [_ASK, {**_YES, "tool_calls": []}, _MORE, {**_YES, "tool_calls": None, "refusal": None}, _MORE],
        [[_ASK, _YES, _MORE, _YES, _MORE]],
    ),
    _gap(
        "thoughts alone",
        _ASK, {"role": "assistant", "reasoning_content": "Look it up."}, _MORE,
        sent=[_ASK, {"role": "assistant", "content": None, "reasoning_content": "Look it up."}, _MORE],
    ),
    _gap("no answer", _ASK, {"role": "assistant"}, _MORE, sent=[_ASK, {"role": "assistant", "content": None}, _MORE]),
    Conversation(
        "a question in parts",
        [{"role": "user", "content": _parts("Is it warm", " in Rome?")}],
        [[{"role": "user", "content": _parts("Is it warm", " in Rome?")}], [_ASK]],
        ("Is it warm", "in Rome?"),
    ),
    Conversation(
        "parts of all roles",
        [
            {"role": "system", "content": _parts("Be brief.")},
            {"role": "user", "content": ["Is it warm", {"type": "input_text", "text": " in Rome?"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "It is"}, *_parts(" warm.")]},
            {"role": "user", "content": _parts("Tell me more.")},
        ],
        [
            [
                {"role": "system", "content": system},
                {"role": "user", "content": user},
                {"role": "assistant", "content": assistant},
                {"role": "user", "content": more},
            ]
            for system in (_parts("Be brief."), "Be brief.")
            for user, more in (
                (_parts("Is it warm", " in Rome?"), _parts("Tell me more.")), ("Is it warm in Rome?", "Tell me more.")
            )
            for assistant in (_parts("It is", " warm."), "It is warm.")
        ],
        ("Be brief.", "Is it warm", "in Rome?", "It is", "warm.", "Tell me more."),
    ),
    Conversation(
        "an answer in parts to continue",
        [_ASK, {"role": "assistant", "content": _parts("It is", " warm")}],
        [[_ASK, {"role": "assistant", "content": content}] for content in (_parts("It is", " warm"), "It is warm")],
        ("It is", " warm"),
        {"continue_final_message": True},
    ),
    Conversation(
        "thoughts in parts",
        [_ASK, {"role": "assistant", "content": [_THOUGHT, *_parts("It is warm.")]}, _MORE],
        [
            [_ASK, {"role": "assistant", "content": content}, _MORE]
            for content in ([_THOUGHT, *_parts("It is warm.")], _parts("It is warm."), "It is warm.")
        ],
        ("It is warm.",),
    ),
    Conversation(
        "a refusal",
        [_ASK, {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot say."}]}, _MORE],
        [
            [_ASK, {"role": "assistant", "content": content}, _MORE]
            for content in (_parts("I cannot say."), "I cannot say.")
        ],
        ("I cannot say.",),
    ),
    _called("a call", {}),
    _called("a call, tools", {}, _SYSTEM, after=(_YES, _MORE), tools=_TOOLS),
    _called("a call whose arguments are an object", {"content": ..., "tool_calls": [_call({"city": "Rome"})]}),
    _called("a call with an empty text", {"content": ""}),
    _called("a call after words", {"content": "I look it up."}),
    _called("a call after thoughts", {"reasoning_content": "Look it up."}),
    Conversation(
        "a call without arguments",
        [_ASK, {**_SENT_CALL, "tool_calls": [_call("")]}, _RESULT],
        [[_ASK, answer, _RESULT] for answer in _answers(({}, "abcdef123"))],
        ("21 degrees",),
    ),
    Conversation(
        "two calls",
        [
            _ASK,
            {**_SENT_CALL, "tool_calls": [_call('{"city": "Rome"}'), _call('{"city": "Oslo"}', "abcdef124")]},
            _RESULT,
            {**_RESULT, "tool_call_id": "abcdef124", "content": "3 degrees"},
        ],
        [
            [_ASK, answer, _RESULT, {**_RESULT, "tool_call_id": "abcdef124", "content": "3 degrees"}]
            for answer in _answers(_ROME, _OSLO)
        ],
        ("Rome", "Oslo", "21 degrees", "3 degrees"),
    ),
    Conversation(
        "a result in parts",
        [_ASK, _SENT_CALL, {**_RESULT, "content": _parts("21", " degrees")}],
        [
            [_ASK, answer, {**_RESULT, "content": content}]
            for content in (_parts("21", " degrees"), "21 degrees")
            for answer in _answers(_ROME)
        ],
        ("Rome", "21", "degrees"),
    ),
    Conversation(
        "no result",
        [_ASK, _SENT_CALL, {**_RESULT, "content": None}],
        [
            [_ASK, answer, {key: value for key, value in _RESULT.items() if key != "content"} | gap]
            for gap in ({}, {"content": ""})
            for answer in _answers(_ROME)
        ],
        ("Rome",),
    ),
    _gap(
        "the retired form of calls",
        _ASK, {"role": "assistant", "function_call": {"name": "weather", "arguments": "{}"}},
        {"role": "function", "name": "weather", "content": "21 degrees"},
        sent=[
            _ASK,
            {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
            {"role": "function", "name": "weather", "content": "21 degrees"},
        ],
    ),
]  # fmt: skip
