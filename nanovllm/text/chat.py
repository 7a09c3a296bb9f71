"""From messages to prompts, by the tokenizer's chat template."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


def conversations(messages: Any) -> tuple[list[list[Message]], bool]:
    """Return conversations, and whether `messages` was a list of them.

    Raises:
        ValueError: no list of messages, nor of lists of messages.
    """
    if isinstance(messages, list) and messages:
        if all(isinstance(message, dict) for message in messages):
            return [messages], False
        if all(isinstance(item, list) and item and all(isinstance(m, dict) for m in item) for item in messages):
            return messages, True
    raise ValueError(f"messages must be a list of dicts, or a list of such lists, not {messages!r:.80}")


def render_chat(tokenizer: Any, conversation: list[Message], **options: Any) -> list[int]:
    """Return the token ids of a conversation; the template brings the special tokens.

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
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids
