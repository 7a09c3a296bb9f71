"""Renders messages as prompts, with the tokenizer's chat template.

Clients write the same conversation in many ways. `one_conversation` normalises it to the form that transformers
documents: no null fields, contents that are texts or parts of type text, call arguments that are objects.
`render_text` adapts what this form leaves open to the template, see `TemplateForm`.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypedDict

Message = dict[str, Any]
_MEDIA = "image", "audio", "video", "file", "document"
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts that hold text, and the field that holds it."""
_MESSAGES = "messages must be a list of dicts, or a list of such lists, not {!r:.80}"
_CONTENT = "messages[{}].content is a string, or a list of parts of type text"


class ChatTemplateOptions(TypedDict, total=False):
    """Options for rendering a conversation with the chat template.

    Attributes:
        add_generation_prompt: end the prompt with the header of an answer; the default.
        continue_final_message: leave the last message open for the model to continue instead.
        chat_template: Jinja template to use instead of the tokenizer's.
        chat_template_kwargs: additional variables for the template.
        tools: function descriptions in OpenAI's form; calls of them are parsed from the answer.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    tools: list[dict[str, Any]] | None


def conversation_source(messages: Any) -> Any:
    """Return the argument of `LLM.chat` as unchecked conversations, a list or another iterable; else a ValueError."""
    if isinstance(messages, (list, tuple)) and messages:
        return [messages] if _is_message(messages[0]) else messages
    if isinstance(messages, (str, dict, list, tuple)) or not isinstance(messages, Iterable):
        raise ValueError(_MESSAGES.format(messages))
    return messages


def one_conversation(messages: Any) -> list[Message]:
    """Return a conversation in the form that `render_text` expects; several, or none, are a ValueError."""
    if isinstance(messages, (list, tuple)) and messages and all(map(_is_message, messages)):
        return [_normal_message(i, message) for i, message in enumerate(messages)]
    raise ValueError(f"messages must be a list of dicts, one conversation, not {messages!r:.80}")


def plain_messages(messages: Iterable[Any]) -> list[Message]:
    """Return messages whose contents are texts; parts are joined, and thinking parts dropped."""
    return [_with_text(_normal_message(i, message)) for i, message in enumerate(messages)]


def normal_content(content: Any, error: str) -> str | list[dict[str, Any]]:
    """Return a content that is text: a string, or parts of type text and thinking. Else a ValueError with `error`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(error)
    return [_normal_part(part, error) for part in content] or ""


def _normal_part(part: Any, error: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and any(name in kind for name in _MEDIA):
        raise ValueError(f"{error}, not {kind!r}: models run on text alone")
    # Templates of reasoning models accept thinking as a separate part.
    if kind == "thinking":
        return dict(part)
    text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise ValueError(error)
    return dict(part) if kind == "text" else {"type": "text", "text": text}


def _is_message(given: Any) -> bool:
    # Messages of the openai package are pydantic models.
    return isinstance(given, dict) or hasattr(given, "model_dump")


def _fields(given: Any) -> dict[str, Any]:
    """Return the fields that are not null: templates would write null as "None"."""
    fields: dict[str, Any] = given if isinstance(given, dict) else given.model_dump()
    return {name: value for name, value in fields.items() if value is not None}


def _normal_message(index: int, given: Any) -> Message:
    message = given if isinstance(given, dict) and None not in given.values() else _fields(given)
    content = message.get("content")
    if isinstance(content, list):
        message = {**message, "content": normal_content(content, _CONTENT.format(index))}
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)):
        return message
    if calls:
        return {**message, "tool_calls": [_normal_call(call) for call in calls]}
    # Templates test for the field, then index into the list, which must not be empty.
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _normal_call(given: Any) -> Any:
    if not _is_message(given):
        return given
    call = _fields(given)
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    # Templates write both, and fail if they are missing.
    return {"type": "function", **call, "function": {**function, "arguments": _parsed(function.get("arguments"))}}


def _parsed(arguments: Any) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        if parsed is not None and not isinstance(parsed, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of a tool call are a JSON object, not {arguments!r:.80}") from error
    return parsed or {}


def _with_text(message: Message) -> Message:
    if not isinstance(parts := message.get("content"), list):
        return message
    return {**message, "content": "".join(part["text"] for part in parts if part["type"] == "text")}


def _with_text_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def template_options(options: ChatTemplateOptions) -> dict[str, Any]:
    """Return the options of `render_chat` for the keywords of `LLM.chat`; an unknown keyword is a ValueError."""
    known = ChatTemplateOptions.__annotations__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"unknown argument {', '.join(unknown)}; a chat template takes {', '.join(known)}")
    continues = options.get("continue_final_message", False)
    return {
        "add_generation_prompt": options.get("add_generation_prompt", True) and not continues,
        "continue_final_message": continues,
        "chat_template": options.get("chat_template"),
        "tools": options.get("tools"),
        **(options.get("chat_template_kwargs") or {}),
    }


class TemplateForm(NamedTuple):
    """Describes which of two forms of a message a chat template supports.

    A template drops the unsupported form, or writes it as a Python object, without an error. So each template renders
    a few short conversations once, which show what it supports.

    Attributes:
        parts: roles whose contents may be lists of parts.
        only_parts: roles whose contents must be lists of parts.
        text_arguments: whether call arguments must be JSON texts, not objects.
        needs_contents: whether an answer that consists of calls needs an empty text as its content.
    """

    parts: frozenset[str] = frozenset()
    only_parts: frozenset[str] = frozenset()
    text_arguments: bool = False
    needs_contents: bool = False

    def fit(self, conversation: list[Message]) -> list[Message]:
        """Return a conversation in this form; parts remain where the template supports them."""
        return [self._fit(message) for message in conversation]

    def _fit(self, message: Message) -> Message:
        if self.needs_contents and "content" not in message:
            message = {**message, "content": ""}
        content = message.get("content")
        if isinstance(content, list):
            if _probed_role(message) not in self.parts:
                message = _with_text(message)
        elif self.only_parts and isinstance(content, str) and _probed_role(message) in self.only_parts:
            message = {**message, "content": [{"type": "text", "text": content}]}
        if self.text_arguments and "tool_calls" in message:
            message = {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        return message


_MOST_TEMPLATES = 64
_PROBED_ROLES = "user", "system", "developer", "assistant", "tool"
# Words that occur in no template. A part's other fields are rendered only if the template writes the part as a dict.
_FIRST, _SECOND, _FIELD = "firstprobe", "secondprobe", "fieldprobe"
_PROBE_PARTS = [{"type": "text", "text": text, "field": _FIELD} for text in (_FIRST, _SECOND)]
_NAME, _VALUE = "nameprobe", "valueprobe"
_PROBE_ARGUMENTS = {_NAME: _VALUE}
# Mistral's templates want nine characters.
_PROBE_ID = "callprobe"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def _probed_role(message: Message) -> str:
    role = message.get("role")
    return role if role in _PROBED_ROLES else "user"


def _template_form(tokenizer: Any, options: dict[str, Any]) -> TemplateForm:
    template, own = options.get("chat_template"), getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        template = tokenizer.get_chat_template(template, options.get("tools"))
    elif template is None:
        template = own
    return _probe(weakref.ref(tokenizer), template) if isinstance(template, str) else TemplateForm()


@lru_cache(_MOST_TEMPLATES)
def _probe(reference: weakref.ref[Any], template: str) -> TemplateForm:
    tokenizer: Any = reference()
    render = partial(tokenizer.apply_chat_template, tokenize=False, chat_template=template)
    text_arguments = _needs_text_arguments(render)
    arguments = json.dumps(_PROBE_ARGUMENTS) if text_arguments else _PROBE_ARGUMENTS
    parts: set[str] = set()
    only_parts: set[str] = set()
    for role in _PROBED_ROLES:
        question = [{"type": "text", "text": "Hi"}] if "user" in only_parts else "Hi"
        shown = _rendered(render, _probe_messages(role, _PROBE_PARTS, question, arguments))
        if _FIRST in shown and _SECOND in shown and _FIELD not in shown:
            parts.add(role)
            if _FIRST not in _rendered(render, _probe_messages(role, _FIRST, question, arguments)):
                only_parts.add(role)
    whole = _probe_messages("tool", _FIRST, "Hi", arguments)
    gap = [{name: value for name, value in message.items() if value != ""} for message in whole]
    needs_contents = not _rendered(render, gap) and bool(_rendered(render, whole))
    return TemplateForm(frozenset(parts), frozenset(only_parts), text_arguments, needs_contents)


def _needs_text_arguments(render: Callable[..., str]) -> bool:
    text = json.dumps(_PROBE_ARGUMENTS)
    from_object, from_text = (
        _rendered(render, _probe_messages("tool", "", "Hi", arguments)) for arguments in (_PROBE_ARGUMENTS, text)
    )
    is_right = _NAME in from_object and _VALUE in from_object and str(_PROBE_ARGUMENTS) not in from_object
    return not is_right and text in from_text


def _probe_messages(role: str, content: Any, question: Any, arguments: Any) -> list[Message]:
    message, user = {"role": role, "content": content}, {"role": "user", "content": question}
    if role == "user":
        return [message]
    if role == "assistant":
        return [user, message, user]
    if role != "tool":
        return [message, user]
    call = {"id": _PROBE_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [user, answer, {**message, "tool_call_id": _PROBE_ID, "name": "probe"}]


def _rendered(render: Callable[..., str], messages: list[Message]) -> str:
    """Return the text of messages; empty if the template fails both without tools and with one."""
    for tools in (None, [_PROBE_TOOL]):
        # Any exception of a template means that it does not support these messages.
        with suppress(Exception):
            return render(messages, tools=tools)
    return ""


def render_text(tokenizer: Any, conversation: list[Message], /, **options: Any) -> str:
    """Return the text of a conversation's prompt, as transformers' `apply_chat_template` renders it with these options.

    If a template fails on a missing content or on a part, it gets plain texts. ValueError, with the template's error,
    if there is no tokenizer or template, or the template fails.
    """
    if tokenizer is None:
        raise ValueError("chat needs a chat template, but the model has no tokenizer")
    try:
        return _applied(tokenizer, conversation, options)
    # A template can raise anything, usually TemplateError.
    except Exception as error:
        failure = error
    plain = [{"content": "", **_with_text(message)} for message in conversation]
    if plain != conversation:
        # If this fails too, the error about the original messages is more helpful.
        with suppress(Exception):
            return _applied(tokenizer, plain, options)
    said = "the messages are nested too deeply" if isinstance(failure, RecursionError) else str(failure)
    raise ValueError(f"the chat template cannot be applied: {' '.join(said.split())}") from failure


def _applied(tokenizer: Any, conversation: list[Message], options: dict[str, Any]) -> str:
    fitted = _template_form(tokenizer, options).fit(conversation)
    text: str = tokenizer.apply_chat_template(fitted, tokenize=False, **options)
    return text
