"""Where the tokens of an output begin in its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanovllm.text.detokenizer import Detokenizer


class TextOffsets:
    """Counts the characters before each token of a text as they come, by decoding it as the text is.

    A token that goes on with a character begins where the character does.

    Args:
        tokenizer: a transformers tokenizer; None makes no text.
        start: characters before the first token.
        prompt: token ids before the first one.
        options: of the tokenizer's `decode`.
    """

    def __init__(self, tokenizer: Any, start: int = 0, prompt: Sequence[int] = (), **options: bool) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt, **options)
        self._end = start

    def take(self, token_ids: list[int]) -> list[int]:
        """Return where further tokens begin, as if no stop string cut the text."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            if self._detokenizer is not None:
                self._end += len(self._detokenizer.append([token_id]))
        return offsets
