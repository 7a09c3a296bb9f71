"""Constrains outputs to a grammar, by llguidance's masks of allowed next tokens (an extra).

llguidance computes a mask within a step; xgrammar compiles each schema ahead, and depends on a second tensor library.

llguidance resolves references and rules by unlimited native recursion: `MAX_RULES` is chosen to fit the stack of the
compiling thread.
"""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any

import numpy as np

from nanovllm.engine.request import Grammar, Request, TokenConstraint, fill_rows
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.text.answer_formats import TAIL, ToolCallFormat, prompt_end, reasoning_format
from nanovllm.text.grammar_trials import (
    GrammarError,
    GrammarTrials,
    TokenizerParts,
    call_with_large_stack,
    compile_grammar,
    with_advice,
)
from nanovllm.utils.display import install_hint

_MAX_GRAMMARS, _MAX_GRAMMAR_BYTES = 64, 64 * 2**20
"""Limits of cached grammars; bytes count where they are compiled on trial, see `GrammarCompiler.bound`."""
MAX_RULES = 20_000
"""Maximum lines and brackets of a Lark grammar. A rule takes about 3 KB of stack, and so does a bracket within it."""
_MAX_REGEX = 2**15
"""Maximum characters; compile time of a regular expression grows with the square of its length."""
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""String formats that llguidance supports."""
_UNKNOWN_FORMAT = f"a format in a JSON schema is ignored, since it is none of {', '.join(sorted(_FORMATS))}"
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_COMPACT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Fields of a schema that are not schemas themselves."""
_COMPOSING = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas"})
"""Fields that add properties to an object."""


def grammar_text(library: Any, params: StructuredOutputsParams) -> str:
    """Return a grammar in llguidance's form, not compiled yet; ValueError or TypeError if it is too large or wrong."""
    matcher = library.LLMatcher
    text: str
    if params.json is not None or params.json_object:
        defaults, overrides = _whitespace(params)
        text = matcher.grammar_from_json_schema(_json_schema(params), defaults, overrides)
    elif params.regex is not None:
        if isinstance(params.regex, str) and len(params.regex) > _MAX_REGEX:
            raise ValueError(f"the regular expression has more than {_MAX_REGEX} characters; choice takes many texts")
        text = matcher.grammar_from_regex(params.regex)
    elif params.choice is not None:
        # One terminal: alternatives of a rule are parser items, limited to a few thousand.
        text = matcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, params.choice)))
    else:
        if isinstance(params.grammar, str) and sum(map(params.grammar.count, "\n([")) > MAX_RULES:
            raise ValueError(f"the grammar has more than {MAX_RULES} lines and brackets")
        if isinstance(params.grammar, str) and _GBNF.search(params.grammar):
            raise ValueError("a grammar is in Lark's syntax (start: ...), not in GBNF or EBNF (root ::= ...)")
        text = matcher.grammar_from_lark(params.grammar)
    return text


def lark_json(schema: Any) -> str:
    """Return a part of a Lark grammar that matches a JSON schema, whose objects get no additional properties."""
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, not {schema!r:.80}")
    guidance = schema.get("x-guidance")
    options = _COMPACT | (guidance if isinstance(guidance, dict) else {})
    closed = _closed(_without_unknown_formats(schema))
    return f"%json {json.dumps({**closed, 'x-guidance': options})}"


def _json_schema(params: StructuredOutputsParams) -> str:
    if params.json_object:
        return '{"type": "object"}'
    text = params.json if isinstance(params.json, str) else json.dumps(params.json)
    if not params.disable_additional_properties and '"format"' not in text:
        return text
    try:
        schema = _without_unknown_formats(json.loads(text))
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError("the schema is nested too deeply, or has an integer of too many digits") from error
    return json.dumps(_closed(schema) if params.disable_additional_properties else schema)


def _without_unknown_formats(schema: Any) -> Any:
    """Return a schema without unsupported string formats, and warn about them."""
    if isinstance(schema, list):
        return [_without_unknown_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name == "format" and isinstance(value, str) and value not in _FORMATS:
            warnings.warn(_UNKNOWN_FORMAT, stacklevel=2)
            del found[name]
        elif name in _SCHEMAS_BY_NAME and isinstance(value, dict):
            found[name] = {key: _without_unknown_formats(item) for key, item in value.items()}
        elif name not in _VALUES:
            found[name] = _without_unknown_formats(value)
    return found


def _closed(schema: Any) -> Any:
    """Close objects to properties not named, except composed ones and their parts, which would exclude others."""
    parts: set[str] = set()
    while True:
        count, closed = len(parts), _close(schema, False, parts)
        # A definition is closed only once all references to it are known.
        if len(parts) == count:
            return closed


def _close(schema: Any, is_part: bool, parts: set[str]) -> Any:
    """Return a closed schema, or any other value; adds references to schemas that are `parts` of others."""
    if isinstance(schema, list):
        return [_close(item, is_part, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    composing, named = _COMPOSING & set(schema), schema.get("properties")
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    is_open = is_part or several or len(composing) > 1 or bool(composing and named)
    if is_open and isinstance(schema.get("$ref"), str):
        parts.add(schema["$ref"])
    closed = dict(schema)
    for name, value in schema.items():
        if name in _SCHEMAS_BY_NAME and isinstance(value, dict):
            closed[name] = {key: _close(item, f"#/{name}/{key}" in parts, parts) for key, item in value.items()}
        elif name not in _VALUES:
            closed[name] = _close(value, is_open and name in _COMPOSING, parts)
    required = schema.get("required")
    names = required if isinstance(required, list) else []
    is_named = isinstance(named, dict) and all(isinstance(name, str) and name in named for name in names)
    if is_named and not is_open and not {"additionalProperties", "patternProperties"} & set(schema):
        closed["additionalProperties"] = False
    return closed


def _whitespace(params: StructuredOutputsParams) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return llguidance's whitespace options: the defaults that a schema may override, and the fixed ones."""
    if params.whitespace_pattern is not None:
        return None, {"whitespace_flexible": True, "whitespace_pattern": params.whitespace_pattern}
    if params.disable_any_whitespace is not None:
        return None, {"whitespace_flexible": not params.disable_any_whitespace}
    return _COMPACT, None


def tool_call_grammar(
    functions: Iterable[Mapping[str, Any]], form: ToolCallFormat,
    *, several: bool, answer: Any = None, tokens: Mapping[str, int] | None = None,
) -> str:  # fmt: skip
    """Return a Lark grammar of calls whose arguments match the functions' parameters.

    Args:
        functions: functions with a `name` and optionally `parameters`, a JSON schema.
        form: the format of calls.
        several: whether to allow several calls.
        answer: JSON schema of an answer that is allowed instead of calls; None: a call is required.
        tokens: tags that are single tokens, which a literal in a grammar does not match.
    """
    tags = tokens or {}
    calls, rules = [], []
    for index, function in enumerate(functions):
        calls.append(f"call{index}")
        # Escaped as in a JSON string; unquoted names contain no characters that JSON escapes.
        name = json.dumps(json.dumps(function["name"])[1:-1])
        own = {"NAME": name, "ARGUMENTS": f"arguments{index}", "NUMBER": "/[0-9]+/"}
        parts = [part for part in re.split("(NAME|ARGUMENTS|NUMBER)", form.call) if part]
        rules.append(f"call{index}: {' '.join(own.get(part) or _literal(part, tags) for part in parts)}")
        rules.append(f"arguments{index}: {lark_json(_object_schema(function.get('parameters')))}")
    more = f" ({_literal(form.separator, tags)} call)*" if several else ""
    listed = [_literal(form.list_begin, tags), f"call{more}", _literal(form.list_end, tags)]
    if answer is not None:
        rules.append(f"answer: {_literal(form.answer_begin, tags)} {lark_json(answer)}")
    start = f"start: {' '.join(part for part in listed if part)}" + (" | answer" if answer is not None else "")
    return "\n".join([start, f"call: {' | '.join(calls)}", *rules])


def _literal(text: str, tokens: Mapping[str, int]) -> str:
    """Return a literal of a Lark grammar that matches a text."""
    pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    parts = [part for part in (re.split(f"({pattern})", text) if tokens else [text]) if part]
    return " ".join(f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts)


def _object_schema(parameters: Any) -> dict[str, Any]:
    """Return the schema of a function's arguments, with type object even if the schema does not say so."""
    if not parameters or parameters == {"type": "object"}:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or "$ref" in parameters:
        return parameters
    # Some clients write null for missing fields.
    return {**{name: value for name, value in parameters.items() if value is not None}, "type": "object"}


class GrammarConstraint:
    """A `TokenConstraint` of the engine: one output's state in its grammar (`matcher`), with the threads for masks."""

    def __init__(self, executor: Any, matcher: Any, num_tokens: int) -> None:
        self._executor = executor
        self._num_tokens = num_tokens
        self._matcher = matcher
        # Tokens are consumed together with the next mask, for all outputs at once.
        self._pending: list[int] = []

    def accept(self, token_id: int) -> None:
        """Accept a token of the output; raises GrammarError if llguidance failed, so that its mask was meaningless."""
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


class AfterThinkingConstraint:
    """A `TokenConstraint` that leaves reasoning free, and then applies another constraint.

    The prompt may end within the reasoning, or after it. `end`: end tag of reasoning that begins with the output; None:
    the prompt or the model opens it.
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


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and makes constraints of outputs from them.

    A grammar is compiled where it is checked, outside the engine's thread. An engine in the same process finds it in
    the cache; an engine in another process compiles it when the request is queued, without delaying a step. See
    `ConstraintFactory` for arguments.
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

        `compiles_here`: whether the engine is in this process; other engines compile by themselves.
        """
        if hasattr(os, "fork") and getattr(self._hf_tokenizer, "is_fast", False):
            self._trials, self._compiles_here = GrammarTrials(self._parts), compiles_here

    def constraint(self, request: Request) -> TokenConstraint:
        """Return the initial constraint of one output of a request with a grammar."""
        grammar, structured = request.grammar, request.params.structured_outputs
        assert grammar is not None
        if grammar.compiled is None:
            grammar = request.grammar = self._compiled(grammar)
        constraint = GrammarConstraint(self.executor, grammar.compiled.deep_copy(), self._num_tokens)
        if structured is None or not structured.after_thinking:
            return constraint
        end = structured.after_thinking if isinstance(structured.after_thinking, str) else None
        return AfterThinkingConstraint(self._hf_tokenizer, constraint, request.token_ids, end)

    @cached_property
    def library(self) -> Any:
        """The module llguidance."""
        try:
            import llguidance  # noqa: PLC0415
        except ImportError as error:
            raise ValueError(f"structured_outputs needs llguidance: {install_hint('structured')}") from error
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
        return max(self._vocab_size, len(self._hf_tokenizer))

    @cached_property
    def executor(self) -> Any:
        """Threads that compute masks."""
        return self.library.LLExecutor()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile a grammar, or find it; GrammarError if it cannot be used, ValueError if a package is missing."""
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
        grammars = self._grammars.values()
        return sum([len(grammar.text) + (grammar.num_bytes if self._compiles_here else 0) for grammar in grammars])
