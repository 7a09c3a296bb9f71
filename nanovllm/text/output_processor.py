"""From an engine's token ids to the text that a user gets."""

from __future__ import annotations

from typing import Any

from nanovllm.outputs import RequestOutput, StepError, TokenOutput

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
    """Adds texts to finished requests.

    Args:
        tokenizer: a transformers tokenizer; None leaves texts empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def finish(self, request_id: int, output: TokenOutput) -> RequestOutput:
        """Return a finished request with its text.

        Raises:
            StepError: the tokenizer fails.
        """
        text = ""
        if self.tokenizer is not None:
            try:
                text = Detokenizer(self.tokenizer).append(output["token_ids"], final=True)
            # A panic of the tokenizers library derives from BaseException.
            except BaseException as error:
                message = f"the text of request {request_id} cannot be decoded: {error}"
                raise StepError(message, [request_id], error) from error
        return RequestOutput(**output, text=text)
