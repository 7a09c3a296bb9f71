"""Makes the constraints of outputs: bad words, and grammars, whose code is imported by the first one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.request import Request, TokenConstraint, fill_rows

if TYPE_CHECKING:
    from nanovllm.text.grammars import GrammarCompiler


class ConstraintFactory:
    """Makes constraints of outputs for one tokenizer (a `MakeConstraint`), fast if grammars are used; picklable."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._parts = (tokenizer, vocab_size, eos_token_ids)

    def __reduce__(self) -> tuple[type[ConstraintFactory], tuple[Any, ...]]:
        return ConstraintFactory, self._parts

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars."""
        from nanovllm.text.grammars import GrammarCompiler  # noqa: PLC0415

        tokenizer, vocab_size, eos_token_ids = self._parts
        return GrammarCompiler(tokenizer, vocab_size, eos_token_ids)

    def __call__(self, request: Request) -> TokenConstraint | None:
        """Return the initial constraint of one output of a request; see `MakeConstraint`."""
        constraint = None if request.grammar is None else self.grammars.constraint(request)
        return BadWordsConstraint(request.bad_sequences, constraint) if request.bad_sequences else constraint


class BadWordsConstraint:
    """A `TokenConstraint` that forbids sequences of several tokens, optionally on top of another one, `inner`."""

    def __init__(self, sequences: Sequence[list[int]], inner: TokenConstraint | None) -> None:
        self._sequences = sequences
        self._inner = inner
        self._token_ids: list[int] = []

    def accept(self, token_id: int) -> None:
        """Accept a token of the output."""
        self._token_ids.append(token_id)
        if self._inner is not None:
            self._inner.accept(token_id)

    def fill(self, constraints: list[tuple[BadWordsConstraint, int]], words: np.ndarray) -> None:
        """Write the masks of several constraints; see `TokenConstraint`."""
        fill_rows([(item._inner, row) for item, row in constraints if item._inner is not None], words)
        for constraint, row in constraints:
            if constraint._inner is None:
                words[row] = -1
            for sequence in constraint._sequences:
                before = sequence[:-1]
                if constraint._token_ids[len(constraint._token_ids) - len(before) :] == before:
                    words[row].view(np.uint32)[sequence[-1] // 32] &= np.uint32(~(1 << sequence[-1] % 32) & 0xFFFFFFFF)


def encode_bad_words(tokenize: Callable[[list[str]], list[list[int]]], bad_words: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each text at the start of an output and after a space; a ValueError if it has none."""
    sequences: list[list[int]] = []
    texts = [word.lstrip() for word in bad_words]
    encoded = zip(bad_words, tokenize(texts), tokenize([f" {text}" for text in texts]), strict=True)
    for word, alone, spaced in encoded:
        if not alone:
            raise ValueError(f"bad_words has {word!r}, which is space alone and has no tokens of its own")
        sequences.append(alone)
        # The word after a space is already forbidden.
        if alone not in (spaced, spaced[1:]):
            sequences.append(spaced)
    return sequences
