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


def template_options(
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the options of `render_chat` for the keywords of `LLM.chat`.

    Args:
        add_generation_prompt: end the prompt with the beginning of an answer.
        continue_final_message: leave the last message open instead, for the model to continue.
        chat_template: Jinja template to use instead of the tokenizer's.
        chat_template_kwargs: further variables of the template.
        tools: descriptions of functions for the template.
    """
    return {
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
        "continue_final_message": continue_final_message,
        "chat_template": chat_template,
        "tools": tools,
        **(chat_template_kwargs or {}),
    }


def render_chat(tokenizer: Any, conversation: list[Message], /, **options: Any) -> list[int]:
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
    try:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    except TypeError as error:
        raise ValueError(f"the messages cannot be tokenized: {error}") from error
    return token_ids
