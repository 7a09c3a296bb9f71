"""Outputs that match a grammar, by llguidance (an extra): masks of the tokens that may come next.

llguidance computes a mask in the time of a step without compiling the grammar first, takes JSON schemas, regular
expressions and Lark grammars, and needs no torch. xgrammar, the alternative, compiles each schema ahead, has no Lark
grammars and no regular expressions of its own, and brings a second tensor library.
"""

from __future__ import annotations

import importlib
import json
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.utils.extras import install_hint

_MAX_GRAMMARS = 256
"""Compiled ones that are kept; one of a large schema takes about a megabyte."""
_INSTEAD = {
    '"uniqueItems"': "instead of uniqueItems, bound the array by maxItems and drop repeated items afterwards",
    '"not"': "instead of not, say what is allowed, by enum, anyOf or a pattern",
    '"if"': "instead of if, then and else, give anyOf a branch for each case, told apart by a const",
    "oneOf constraints": "instead of oneOf, write anyOf, whose branches a const tells apart",
    '"propertyNames"': "instead of propertyNames, write patternProperties",
    '"contains"': "instead of contains, write prefixItems",
    '"dependentRequired"': "instead of dependentRequired, give anyOf a branch with the property and one without it",
    "look-around": "instead of look-around, write the alternatives out",
}
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Fields of a schema that are no schemas."""
_INSTALL = f"structured_outputs needs llguidance: {install_hint('structured')}"


class GrammarConstraint:
    """A `TokenConstraint` of the engine: one output's state in its grammar.

    Args:
        compiler: what made it.
        matcher: llguidance's state, which nobody else has.
    """

    def __init__(self, compiler: GrammarCompiler, matcher: Any) -> None:
        self._compiler = compiler
        self._matcher = matcher
        # Tokens are consumed with the next mask, those of all outputs at once.
        self._pending: list[int] = []

    def copy(self) -> GrammarConstraint:
        """Return a constraint in the same state for another output."""
        return GrammarConstraint(self._compiler, self._matcher.deep_copy())

    def accept(self, token_id: int) -> None:
        """Take a token of the output."""
        self._pending.append(token_id)

    def fill(self, constraints: list[tuple[GrammarConstraint, int]], words: np.ndarray) -> None:
        """Write the masks of several constraints; see `TokenConstraint`."""
        from llguidance.numpy import consume_token_par, fill_next_token_bitmask_par  # noqa: PLC0415

        behind = [constraint for constraint, _ in constraints if constraint._pending]
        while behind:
            tokens = [(constraint._matcher, constraint._pending.pop(0)) for constraint in behind]
            running = [(matcher, token_id) for matcher, token_id in tokens if not matcher.is_stopped()]
            # It refuses an empty list.
            if running:
                consume_token_par(self._compiler.executor, running)
            behind = [constraint for constraint in behind if constraint._pending]
        pairs = [(constraint._matcher, row) for constraint, row in constraints]
        fill_next_token_bitmask_par(self._compiler.executor, pairs, words)


class GrammarCompiler:
    """Makes constraints for one tokenizer.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: token ids of the model are below it.
        eos_token_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        # A matcher at the start of each grammar, the least recently used one first; several threads make constraints.
        self._matchers: dict[str, Any] = {}
        self._lock = Lock()

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
        if self._hf_tokenizer is None or not getattr(self._hf_tokenizer, "is_fast", False):
            raise ValueError("structured_outputs needs a model with a fast tokenizer")
        # Before the tokenizer: it says how to install what is missing.
        library = self.library
        importlib.import_module("llguidance.hf")
        eos = sorted(self._eos_token_ids)
        return library.hf.from_tokenizer(self._hf_tokenizer, n_vocab=self._vocab_size, eos_token=eos or None)

    @cached_property
    def executor(self) -> Any:
        """Threads that compute masks."""
        return self.library.LLExecutor()

    def make(self, params: StructuredOutputsParams) -> GrammarConstraint:
        """Return a constraint at the start of its grammar; equal grammars are compiled once.

        Raises:
            ValueError: the grammar cannot be used, or the library is not installed.
        """
        library, tokenizer = self.library, self.tokenizer
        try:
            grammar = self._grammar(params)
            with self._lock:
                matcher = self._matchers.pop(grammar, None)
            if matcher is None:
                matcher = library.LLMatcher(tokenizer, grammar)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(_with_advice(str(error))) from error
        if matcher.is_error():
            raise ValueError(_with_advice(matcher.get_error()))
        with self._lock:
            self._matchers[grammar] = matcher
            while len(self._matchers) > _MAX_GRAMMARS:
                del self._matchers[next(iter(self._matchers))]
        return GrammarConstraint(self, matcher.deep_copy())

    def _grammar(self, params: StructuredOutputsParams) -> str:
        matcher = self.library.LLMatcher
        if params.json is not None or params.json_object:
            defaults, overrides = _whitespace(params)
            grammar: str = matcher.grammar_from_json_schema(_json_schema(params), defaults, overrides)
        elif params.regex is not None:
            grammar = matcher.grammar_from_regex(params.regex)
        elif params.choice is not None:
            grammar = matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice)))
        else:
            grammar = matcher.grammar_from_lark(params.grammar)
        return grammar


def _json_schema(params: StructuredOutputsParams) -> str:
    """Return the schema as text."""
    if params.json_object:
        return '{"type": "object"}'
    if not params.disable_additional_properties:
        return params.json if isinstance(params.json, str) else json.dumps(params.json)
    return json.dumps(_closed(json.loads(params.json) if isinstance(params.json, str) else params.json))


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than those that it names."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for name, value in schema.items():
        if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
            closed[name] = {key: _closed(item) for key, item in value.items()}
        elif name not in _VALUES:
            closed[name] = _closed(value)
    if isinstance(schema.get("properties"), dict) and not {"additionalProperties", "patternProperties"} & set(schema):
        closed["additionalProperties"] = False
    return closed


def _whitespace(params: StructuredOutputsParams) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return llguidance's options for white space: those that a schema may change, and those that hold for all."""
    if params.whitespace_pattern is not None:
        return None, {"whitespace_flexible": True, "whitespace_pattern": params.whitespace_pattern}
    if params.disable_any_whitespace is not None:
        return None, {"whitespace_flexible": not params.disable_any_whitespace}
    return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}, None


def _with_advice(message: str) -> str:
    """Return llguidance's message, with what can be written instead of what it refuses."""
    advice = [text for refused, text in _INSTEAD.items() if refused in message]
    return "; ".join([f"structured_outputs cannot be used: {message}", *advice])


class BadWordsConstraint:
    """A `TokenConstraint` that forbids sequences of several tokens, alone or on top of another constraint.

    Args:
        sequences: token ids of each.
        inner: what else masks the output.
    """

    def __init__(self, sequences: list[list[int]], inner: GrammarConstraint | None) -> None:
        self._sequences = sequences
        self._inner = inner
        self._token_ids: list[int] = []

    def accept(self, token_id: int) -> None:
        """Take a token of the output."""
        self._token_ids.append(token_id)
        if self._inner is not None:
            self._inner.accept(token_id)

    def fill(self, constraints: list[tuple[BadWordsConstraint, int]], words: np.ndarray) -> None:
        """Write the masks of several constraints; see `TokenConstraint`."""
        inner = [(constraint._inner, row) for constraint, row in constraints if constraint._inner is not None]
        if inner:
            inner[0][0].fill(inner, words)
        for constraint, row in constraints:
            if constraint._inner is None:
                words[row] = -1
            for sequence in constraint._sequences:
                before = sequence[:-1]
                if constraint._token_ids[len(constraint._token_ids) - len(before) :] == before:
                    words[row].view(np.uint32)[sequence[-1] // 32] &= np.uint32(~(1 << sequence[-1] % 32) & 0xFFFFFFFF)


def encode_bad_words(tokenizer: Any, bad_words: list[str]) -> list[list[int]]:
    """Return the token sequences that a text may have at the start of the output and behind a space.

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
        # Behind a space of its own the word is forbidden already.
        if alone not in (spaced, spaced[1:]):
            sequences.append(spaced)
    return sequences
