"""Constrains outputs to a grammar, by llguidance's masks of allowed next tokens (an extra).

llguidance computes a mask within a step without compiling the grammar first, supports JSON schemas, regular
expressions and Lark grammars, and needs no torch. The alternative, xgrammar, compiles each schema ahead, lacks Lark
grammars and regular expressions of its own, and depends on a second tensor library.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any

import numpy as np

from nanovllm.engine.request import Grammar, Request, TokenConstraint, fill_rows
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.text.answer_formats import TAIL, prompt_end, reasoning_format
from nanovllm.text.grammar_compiler import (
    GrammarError,
    GrammarTrials,
    TokenizerParts,
    call_with_large_stack,
    compile_grammar,
)
from nanovllm.text.grammar_text import grammar_text, with_advice
from nanovllm.utils.extras import install_hint

_MAX_GRAMMARS, _MAX_GRAMMAR_BYTES = 64, 64 * 2**20
"""Limits of cached grammars; bytes count where they are compiled on trial, see `ConstraintFactory.bound`."""
_INSTALL = f"structured_outputs needs llguidance: {install_hint('structured')}"


class GrammarConstraint:
    """A `TokenConstraint` of the engine: one output's state in its grammar.

    Args:
        executor: llguidance's threads for masks.
        matcher: llguidance's state of this output.
        num_tokens: number of tokens in a mask.
    """

    def __init__(self, executor: Any, matcher: Any, num_tokens: int) -> None:
        self._executor = executor
        self._num_tokens = num_tokens
        self._matcher = matcher
        # Tokens are consumed together with the next mask, for all outputs at once.
        self._pending: list[int] = []

    def accept(self, token_id: int) -> None:
        """Accept a token of the output.

        Raises:
            GrammarError: llguidance failed on the grammar, so that its mask for this token was meaningless.
        """
        if self._matcher.is_error():
            raise GrammarError(with_advice(self._matcher.get_error()))
        self._pending.append(token_id)

    def fill(self, constraints: list[tuple[GrammarConstraint, int]], words: np.ndarray) -> None:
        """Write the masks of several constraints; see `TokenConstraint`."""
        from llguidance.numpy import consume_token_par, fill_next_token_bitmask_par  # noqa: PLC0415

        lagging = [constraint for constraint, _ in constraints if constraint._pending]
        while lagging:
            tokens = [(constraint._matcher, constraint._pending.pop(0)) for constraint in lagging]
            running = [(matcher, token_id) for matcher, token_id in tokens if not matcher.is_stopped()]
            # llguidance refuses an empty list.
            if running:
                consume_token_par(self._executor, running)
            lagging = [constraint for constraint in lagging if constraint._pending]
        pairs = [(constraint._matcher, row) for constraint, row in constraints]
        # A tokenizer may have more tokens than the model, so that its masks are longer.
        num_words, num_own = words.shape[1], -(-constraints[0][0]._num_tokens // 32)
        masks = words if num_own == num_words else np.empty((len(words), num_own), dtype=np.int32)
        fill_next_token_bitmask_par(self._executor, pairs, masks)
        if masks is not words:
            rows = [row for _, row in constraints]
            words[rows] = masks[rows, :num_words]


class ConstraintFactory:
    """Makes constraints of outputs for one tokenizer (a `MakeConstraint`); picklable.

    A grammar is compiled where it is checked, outside the engine's thread. An engine in the same process finds it in
    the cache; an engine in another process compiles it when the request is queued, without delaying a step.

    Args:
        tokenizer: a fast transformers tokenizer, if grammars are used.
        vocab_size: upper bound of the model's token ids.
        eos_token_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        # Least recently used first; several threads make constraints.
        self._grammars: dict[str, Grammar] = {}
        self._lock = threading.Lock()
        self._trials: GrammarTrials | None = None
        self._compiles_here = True

    def bound(self, *, compiles_here: bool) -> None:
        """Compile each new grammar on trial first, see `GrammarTrials`; no effect on Windows, which cannot fork.

        Args:
            compiles_here: whether the engine is in this process; other engines compile by themselves.
        """
        if hasattr(os, "fork") and getattr(self._hf_tokenizer, "is_fast", False):
            self._trials, self._compiles_here = GrammarTrials(self._parts), compiles_here

    def __reduce__(self) -> tuple[type[ConstraintFactory], tuple[Any, ...]]:
        return ConstraintFactory, (self._hf_tokenizer, self._vocab_size, self._eos_token_ids)

    def __call__(self, request: Request) -> TokenConstraint | None:
        """Return the initial constraint of one output of a request; see `MakeConstraint`."""
        constraint: TokenConstraint | None = None
        if (grammar := request.grammar) is not None:
            if grammar.compiled is None:
                grammar = request.grammar = self._compiled(grammar)
            constraint = GrammarConstraint(self.executor, grammar.compiled.deep_copy(), self._num_tokens)
            structured = request.params.structured_outputs
            if structured is not None and structured.after_thinking:
                end = structured.after_thinking if isinstance(structured.after_thinking, str) else None
                constraint = AfterThinkingConstraint(self._hf_tokenizer, constraint, request.token_ids, end)
        return BadWordsConstraint(request.bad_sequences, constraint) if request.bad_sequences else constraint

    @cached_property
    def library(self) -> Any:
        """The module llguidance."""
        try:
            import llguidance  # noqa: PLC0415
        except ImportError as error:
            raise ValueError(_INSTALL) from error
        return llguidance

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer in llguidance's form."""
        return self._parts.tokenizer(self.library)

    @cached_property
    def _parts(self) -> TokenizerParts:
        if not getattr(self._hf_tokenizer, "is_fast", False):
            raise ValueError("structured_outputs needs a model with a fast tokenizer")
        backend = copy(self._hf_tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        eos: Any = sorted(self._eos_token_ids) or self._hf_tokenizer.eos_token_id
        return TokenizerParts(backend.to_str(), self._num_tokens, eos)

    @cached_property
    def _num_tokens(self) -> int:
        """The larger of the model's and the tokenizer's number of tokens."""
        return max(self._vocab_size, len(self._hf_tokenizer))

    @cached_property
    def executor(self) -> Any:
        """Threads that compute masks."""
        return self.library.LLExecutor()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile a grammar for requests; results are cached.

        Raises:
            GrammarError: the grammar cannot be used.
            ValueError: the library is not installed, or there is no fast tokenizer.
        """
        # First, since they raise if something is not installed.
        library, _ = self.library, self._parts
        try:
            text = grammar_text(library, params)
        except (TypeError, ValueError, RuntimeError) as error:
            raise GrammarError(with_advice(str(error))) from error
        return self._compiled(Grammar(text, params.choice is not None))

    def _compiled(self, grammar: Grammar) -> Grammar:
        """Return the cache entry of a grammar, compiled if the engine is in this process."""
        with self._lock:
            known = self._grammars.pop(grammar.text, None)
        if known is None:
            known = Grammar(grammar.text, grammar.is_choice, grammar.num_bytes)
            if self._trials is not None:
                # The trial process starts while this one makes its own tokenizer.
                self._trials.start()
                _ = self.tokenizer if self._compiles_here else None
                known.num_bytes = self._trials.num_bytes(known.text, known.is_choice)
            if self._compiles_here:
                compile_here = partial(compile_grammar, self.library, self.tokenizer, known.text, known.is_choice)
                known.compiled = call_with_large_stack(compile_here)
        with self._lock:
            self._grammars[known.text] = known
            while len(self._grammars) > _MAX_GRAMMARS or self._num_bytes > _MAX_GRAMMAR_BYTES:
                del self._grammars[next(iter(self._grammars))]
        return known

    @property
    def _num_bytes(self) -> int:
        """Memory of the cached grammars, in bytes."""
        grammars = self._grammars.values()
        return sum([len(grammar.text) + (grammar.num_bytes if self._compiles_here else 0) for grammar in grammars])


class AfterThinkingConstraint:
    """A `TokenConstraint` that leaves reasoning free, and then applies another constraint.

    Args:
        tokenizer: a transformers tokenizer.
        inner: the constraint on the answer.
        prompt_token_ids: the prompt, which may end within the reasoning, or after it.
        end: end tag of reasoning that begins with the output; None: the prompt or the model opens it.
    """

    def __init__(
        self, tokenizer: Any, inner: TokenConstraint, prompt_token_ids: Sequence[int], end: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._inner = inner
        self._tail: list[int] = []
        before = prompt_end(tokenizer, prompt_token_ids).rstrip()
        tags = reasoning_format("auto", tokenizer).tags if end is None else ((before, end),)
        # The end tag of the reasoning; None once the answer has begun.
        has_ended = any(before.endswith(end.rstrip()) for _, end in tags)
        begun = [end for begin, end in tags if before.endswith(begin.rstrip())]
        self._end = None if has_ended or not begun else begun[0]
        # Tokens with which the model may begin reasoning now.
        self._begins = {} if has_ended or begun else _single_tokens(tokenizer, tags)

    def accept(self, token_id: int) -> None:
        """Accept a token of the output; raises as the answer's constraint does."""
        if self._end is not None:
            self._tail = [*self._tail[1 - TAIL :], token_id]
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
    """Return the begin tags that are single tokens, with their end tags."""
    encoded = [(tokenizer.encode(begin, add_special_tokens=False), end) for begin, end in tags]
    return {int(token_ids[0]): end for token_ids, end in encoded if len(token_ids) == 1}


class BadWordsConstraint:
    """A `TokenConstraint` that forbids sequences of several tokens, optionally on top of another constraint.

    Args:
        sequences: token ids of each.
        inner: another constraint on the output.
    """

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


def encode_bad_words(tokenizer: Any, bad_words: Sequence[str]) -> list[list[int]]:
    """Return the token sequences of a text at the start of the output and after a space.

    Raises:
        ValueError: a text has no tokens.
    """
    sequences: list[list[int]] = []
    for word in bad_words:
        try:
            alone = tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        except TypeError as error:
            raise ValueError(f"bad_words has {word!r:.40}, which cannot be tokenized: {error}") from error
        if not alone:
            raise ValueError(f"bad_words has {word!r}, which is space alone and has no tokens of its own")
        sequences.append(alone)
        # The word after a space is already forbidden.
        if alone not in (spaced, spaced[1:]):
            sequences.append(spaced)
    return sequences
