"""Grammars that bind after a model's thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nanovllm.engine.request import TokenConstraint, fill_rows
from nanovllm.text.reasoning import prompt_end, reasoning_format

_TAIL = 16
"""Tokens that hold a whole tag."""


class AfterThinkingConstraint:
    """A `TokenConstraint` that lets a model think, and then is another one.

    Args:
        tokenizer: a transformers tokenizer.
        inner: masks the answer.
        prompt_token_ids: the prompt, which may end within thoughts, or after them.
        end: what ends thoughts that begin with the output; None: the prompt, or the model, begins them.
    """

    def __init__(
        self, tokenizer: Any, inner: TokenConstraint, prompt_token_ids: Sequence[int], end: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._inner = inner
        self._tail: list[int] = []
        before = prompt_end(tokenizer, prompt_token_ids).rstrip()
        tags = reasoning_format("auto", tokenizer).tags if end is None else ((before, end),)
        # What ends the thoughts; None where the answer has begun.
        has_ended = any(before.endswith(end.rstrip()) for _, end in tags)
        begun = [end for begin, end in tags if before.endswith(begin.rstrip())]
        self._end = None if has_ended or not begun else begun[0]
        # The tokens with which the model may begin to think now.
        self._begins = {} if has_ended or begun else _single_tokens(tokenizer, tags)

    def accept(self, token_id: int) -> None:
        """Take a token of the output; raises as the answer's constraint does."""
        if self._end is not None:
            self._tail = [*self._tail[1 - _TAIL :], token_id]
            if self._end in self._tokenizer.decode(self._tail):
                self._end = None
        elif token_id in self._begins:
            self._end = self._begins[token_id]
        else:
            self._inner.accept(token_id)
        self._begins = {}

    def fill(self, constraints: list[tuple[AfterThinkingConstraint, int]], words: np.ndarray) -> None:
        """Write the masks of several constraints; see `TokenConstraint`."""
        fill_rows([(item._inner, row) for item, row in constraints if item._end is None], words)
        for constraint, row in constraints:
            if constraint._end is not None:
                words[row] = -1
            for begin in constraint._begins:
                words[row].view(np.uint32)[begin // 32] |= np.uint32(1 << begin % 32)


def _single_tokens(tokenizer: Any, tags: Sequence[tuple[str, str]]) -> dict[int, str]:
    """Return the begin tags that are one token, with their end tags."""
    encoded = [(tokenizer.encode(begin, add_special_tokens=False), end) for begin, end in tags]
    return {int(token_ids[0]): end for token_ids, end in encoded if len(token_ids) == 1}
