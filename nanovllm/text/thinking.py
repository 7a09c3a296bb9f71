"""Grammars that bind after a model's thoughts, which stand between <think> and </think>."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nanovllm.engine.request import TokenConstraint
from nanovllm.engine.token_masks import fill_rows

BEGIN, END = "<think>", "</think>"
_TAIL = 16
"""Tokens at the end of a text that hold a whole tag, and what may stand after it."""


class AfterThinkingConstraint:
    """A `TokenConstraint` that lets a model think, and then is another one.

    Args:
        tokenizer: a transformers tokenizer.
        inner: masks the answer.
        prompt_token_ids: the prompt, which may end within thoughts, or after them.
    """

    def __init__(self, tokenizer: Any, inner: TokenConstraint, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._inner = inner
        self._tail: list[int] = []
        before = str(tokenizer.decode(list(prompt_token_ids[-_TAIL:]))).rstrip()
        self._is_inside = before.endswith(BEGIN)
        # The token with which the model may begin to think now.
        self._begin = None if self._is_inside or before.endswith(END) else _single_token(tokenizer, BEGIN)

    def accept(self, token_id: int) -> None:
        """Take a token of the output; raises as the answer's constraint does."""
        if self._is_inside:
            self._tail = [*self._tail[1 - _TAIL :], token_id]
            self._is_inside = END not in self._tokenizer.decode(self._tail)
        elif token_id == self._begin:
            self._is_inside = True
        else:
            self._inner.accept(token_id)
        self._begin = None

    def fill(self, constraints: list[tuple[AfterThinkingConstraint, int]], words: np.ndarray) -> None:
        """Write the masks of several constraints; see `TokenConstraint`."""
        fill_rows([(item._inner, row) for item, row in constraints if not item._is_inside], words)
        for constraint, row in constraints:
            if constraint._is_inside:
                words[row] = -1
            elif constraint._begin is not None:
                words[row].view(np.uint32)[constraint._begin // 32] |= np.uint32(1 << constraint._begin % 32)


def _single_token(tokenizer: Any, text: str) -> int | None:
    """Return the token that is a text; None if there is none."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return int(token_ids[0]) if len(token_ids) == 1 else None
