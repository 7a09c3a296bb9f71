"""From an engine's token ids to the text that a user gets."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"
"""A decoded character that is not complete yet: some of its bytes are in tokens to come."""


class Detokenizer:
    """Decodes one request's tokens as they come; the texts of all calls joined are the text of all tokens.

    A token's text may depend on the token before it, so the tokens of the last call are decoded again together with the
    new ones, and what they gave before is cut off (as in Hugging Face's text-generation-inference and in vLLM).

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Tokens whose text has been returned, as far as the next ones may depend on them, and tokens that wait.
        self._context: list[int] = []
        self._waiting: list[int] = []

    def append(self, token_ids: list[int], final: bool = False) -> str:
        """Return the text that these tokens add; a character that is not complete waits, unless these are the last."""
        self._waiting += token_ids
        before = self._decode(self._context) if self._context else ""
        text = self._decode(self._context + self._waiting)
        if (text.endswith(_REPLACEMENT) or len(text) < len(before)) and not final:
            return ""
        # Tokens without text, such as skipped special ones, do not replace the context of the next one.
        self._context = self._waiting if len(text) > len(before) else self._context + self._waiting
        self._waiting = []
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


class OutputProcessor:
    """Decodes the tokens of finished requests.

    Args:
        tokenizer: a transformers tokenizer; None leaves texts empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of all of a request's tokens."""
        return "" if self.tokenizer is None else Detokenizer(self.tokenizer).append(token_ids, final=True)
