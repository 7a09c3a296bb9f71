"""From messages to prompts, by the tokenizer's chat template."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any, TypedDict

from nanovllm.outputs import TokensPrompt

Message = dict[str, Any]
_MEDIA = "image", "audio", "video", "file", "document"


class ChatTemplateOptions(TypedDict, total=False):
    """How the chat template makes a prompt of a conversation.

    Attributes:
        add_generation_prompt: end the prompt with the beginning of an answer; the default.
        continue_final_message: leave the last message open instead, for the model to continue.
        chat_template: Jinja template to use instead of the tokenizer's.
        chat_template_kwargs: further variables of the template.
        tools: descriptions of functions for the template, in OpenAI's form; calls of them in an answer are parsed.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    tools: list[dict[str, Any]] | None


def conversations(messages: Any) -> tuple[list[list[Message]], bool]:
    """Return conversations with contents as text, and whether `messages` was a list of them.

    Raises:
        ValueError: no list of messages, nor of lists of messages; or a content that is not text.
    """
    if isinstance(messages, (list, tuple)) and messages:
        if all(isinstance(message, dict) for message in messages):
            return [plain_messages(messages)], False
        lists = [item for item in messages if isinstance(item, (list, tuple)) and item]
        if len(lists) == len(messages) and all(isinstance(message, dict) for item in lists for message in item):
            return [plain_messages(item) for item in lists], True
    raise ValueError(f"messages must be a list of dicts, or a list of such lists, not {messages!r:.80}")


def conversation_source(messages: Any) -> Any:
    """Return what `LLM.chat` is given as conversations, not checked yet: a list, or what gives them.

    Raises:
        ValueError: it is neither a conversation, nor does it give any.
    """
    if isinstance(messages, (list, tuple)) and messages:
        return [messages] if isinstance(messages[0], dict) else messages
    if isinstance(messages, (str, dict, list, tuple)) or not isinstance(messages, Iterable):
        raise ValueError(f"messages must be a list of dicts, or a list of such lists, not {messages!r:.80}")
    return messages


def one_conversation(messages: Any) -> list[Message]:
    """Return a conversation with contents as text.

    Raises:
        ValueError: it is no list of messages; or a content is not text.
    """
    (conversation, *others), _ = conversations(messages)
    if others or not isinstance(messages[0], dict):
        raise ValueError(f"messages must be a list of dicts, or a list of such lists, not {messages!r:.80}")
    return conversation


def plain_messages(messages: Any) -> list[Message]:
    """Return messages as chat templates take them.

    Contents are strings; OpenAI's parts of type text are joined. Arguments of tool calls are objects, which templates
    write as JSON themselves.

    Raises:
        ValueError: a part of a content is no text.
    """
    return [_plain_message(message) for message in messages]


def _plain_message(message: Message) -> Message:
    if isinstance(message, dict) and isinstance(message.get("tool_calls"), list):
        calls = [_plain_call(call) for call in message["tool_calls"]]
        # An answer that has calls alone has no content.
        message = {**message, "content": message.get("content") or "", "tool_calls": calls}
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    error = "a message's content is a string, or a list of parts of type text"
    return {**message, "content": join_parts(parts, error)}


def join_parts(parts: list[Any], error: str, types: Collection[str] = ("text",)) -> str:
    """Return the text of a content's parts; raises a ValueError with `error` where one is of none of the types."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and any(name in kind for name in _MEDIA):
            raise ValueError(f"{error}, not {kind!r}: models run on text alone")
        if kind not in types or not isinstance(part.get("text"), str):
            raise ValueError(error)
    return "".join(part["text"] for part in parts)


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of a tool call are a JSON object, not {arguments!r:.80}") from error
    return {**call, "function": {**function, "arguments": parsed}}


def template_options(options: ChatTemplateOptions) -> dict[str, Any]:
    """Return the options of `render_chat` for the keywords of `LLM.chat`.

    Raises:
        ValueError: an unknown keyword.
    """
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


def render_text(tokenizer: Any, conversation: list[Message], /, **options: Any) -> str:
    """Return the text of a conversation's prompt.

    Args:
        tokenizer: a transformers tokenizer.
        conversation: messages with `role` and `content`.
        options: of its `apply_chat_template`.

    Raises:
        ValueError: there is no tokenizer or no template, or the template fails.
    """
    if tokenizer is None:
        raise ValueError("chat needs a chat template, but the model has no tokenizer")
    try:
        text: str = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    # A template can raise whatever it likes, TemplateError above all.
    except Exception as error:
        raise ValueError(f"the chat template cannot be applied: {error}") from error
    return text


def render_chat(tokenizer: Any, conversation: list[Message], /, **options: Any) -> TokensPrompt:
    """Return the prompt of a conversation, its text and its token ids; the template brings the special tokens.

    Raises:
        ValueError: see `render_text`.
    """
    text = render_text(tokenizer, conversation, **options)
    try:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    except TypeError as error:
        raise ValueError(f"the messages cannot be tokenized: {error}") from error
    return {"prompt_token_ids": token_ids, "prompt": text}
