"""Requests as plain data, accepted by every engine, in this process or another; their seeds and limits.

State that lives while a request runs is made where it is needed: constraints by the engine (`MakeConstraint`), text by
the front end.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import numpy as np

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int, check_token_ids

GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
"""Spreads seeds: its multiples modulo 2**64 are far apart."""


@dataclass(slots=True, eq=False)
class Grammar:
    """A checked pattern that an output must match, in the form that is compiled."""

    text: str
    # Whether it lists texts, which compile faster than a pattern of that length.
    is_choice: bool
    # Memory that it takes compiled; 0 if not measured.
    num_bytes: int = 0
    # For this process only; not pickled.
    compiled: Any = field(default=None, repr=False)

    def __reduce__(self) -> tuple[type[Grammar], tuple[str, bool, int]]:
        return Grammar, (self.text, self.is_choice, self.num_bytes)


# Not frozen, which would triple the time to make one.
@dataclass(slots=True, eq=False)
class Request:
    """A request that an engine can serve; see `InputProcessor` and `RequestLimits`.

    Attributes:
        token_ids: the prompt.
        params: in range.
        prompt: its text, if given as text.
        priority: lower ones run first.
        cache_salt: blocks of the prefix cache are shared only among requests with equal salt (or without one).
        pooling: "last" or "mean" asks for the hidden states of the prompt.
        bad_token_ids, bad_sequences: tokens, and sequences of several tokens, that are never generated.
        grammar: pattern that the outputs match.
        is_streamed: whether its tokens are reported as they are generated.
        seed: of its noise unless `params` has one; from `RequestSeeds`.
    """

    token_ids: array[int]
    params: SamplingParams
    prompt: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    pooling: str | None = None
    bad_token_ids: tuple[int, ...] = ()
    bad_sequences: Sequence[list[int]] = ()
    grammar: Grammar | None = None
    is_streamed: bool = False
    seed: int = 0

    @property
    def reports_tokens(self) -> bool:
        """Whether the engine reports each token as generated: a client reads them, or looks for stop strings."""
        return self.is_streamed or self.params.stop is not None

    @property
    def is_constrained(self) -> bool:
        """Whether outputs need a constraint; see `MakeConstraint`."""
        return self.grammar is not None or bool(self.bad_sequences)

    def __reduce__(self) -> tuple[type[Request], tuple[Any, ...]]:
        # Without the names of fields, in a third of the time.
        return Request, tuple(getattr(self, field) for field in self.__slots__)


StreamedToken = tuple[int, int, int, int, bool, bytes]
"""A token of a request that `reports_tokens`: the request's id, the index of the output in it, the token's position
there, the token, whether it is EOS or a stop token, and its record of log-probabilities, see `nanovllm.outputs`, empty
unless asked for.
"""


@dataclass(slots=True)
class Abort:
    """Tells an engine to drop requests, or to finish them with the tokens that they have."""

    request_ids: list[int]
    keep_outputs: bool


def check_request_ids(request_ids: Iterable[int]) -> list[int]:
    """Return ids of requests as a list, or raise a ValueError."""
    if not isinstance(request_ids, Iterable):
        raise ValueError(f"request ids are given as a list, not {request_ids!r:.80}")
    return [check_int("request id", request_id, 0) for request_id in request_ids]


class TokenConstraint(Protocol):
    """Restricts the next token of an output."""

    def accept(self, token_id: int) -> None:
        """Advance by a token of the output, including its last; an error fails only this request."""

    def fill(self, constraints: list[tuple[Any, int]], words: np.ndarray) -> None:
        """Write the masks of constraints of this kind, each into its row of `words`, which starts undefined.

        words: [_, ceil(vocab_size / 32)] int32; a bit for each token.
        """


def fill_rows(constraints: Iterable[tuple[TokenConstraint, int]], words: np.ndarray) -> None:
    """Write the masks of constraints, each with its row; all of one kind are computed together, in threads."""
    kinds: dict[type, list[tuple[TokenConstraint, int]]] = {}
    for constraint, row in constraints:
        kinds.setdefault(type(constraint), []).append((constraint, row))
    for same in kinds.values():
        same[0][0].fill(same, words)


MakeConstraint = Callable[[Request], "TokenConstraint | None"]
"""Makes an output's constraint at its start, for a request that `is_constrained`; callable from any thread."""


def no_constraint(request: Request) -> None:
    """Refuse a request with a ValueError: the `MakeConstraint` of an engine without support for constraints."""
    raise ValueError(f"this engine has no constraints, which {request.grammar or request.bad_sequences!r:.80} needs")


class RequestSeeds:
    """Numbers the outputs that users ask for; an output's noise follows from the engine's seed and its number.

    A request carries its seed, so that its tokens depend neither on when it runs nor on which engine. Any thread may
    reserve numbers, from `first` on. Without the engine's seed, one is drawn.
    """

    def __init__(self, seed: int | None, first: int = 0) -> None:
        self._seed = secrets.randbits(64) if seed is None else seed
        self._num_taken = first
        self._lock = Lock()

    def reserve(self, num_outputs: int) -> int:
        """Return the first of `num_outputs` consecutive numbers, reserved for this call."""
        with self._lock:
            first, self._num_taken = self._num_taken, self._num_taken + num_outputs
        return first

    def of(self, number: int) -> int:
        """Return the seed of a request whose first output has this number; see `LLMEngine.enqueue`."""
        return (self._seed + (number + 1) * GOLDEN_RATIO_64) % 2**64


class PromptTooLongError(ValueError):
    """A prompt is longer than the model allows."""


@dataclass(frozen=True)
class RequestLimits:
    """The limits that a request must keep to.

    Attributes:
        vocab_size: bound on token ids of prompts.
        max_model_len: most tokens of one request, prompt and output together.
        num_kv_slots: tokens that the KV cache holds at least; more where sliding windows release their blocks.
        max_stored_tokens: most tokens of one request whose keys and values are stored, not always all at once.
        max_logprobs: most log-probabilities at a position.
        num_layers: of the model, whose hidden states may be asked for; None if they may not.
    """

    vocab_size: int
    max_model_len: int
    num_kv_slots: int
    max_stored_tokens: int
    max_logprobs: int
    num_layers: int | None = None

    def check_params(self, params: Any) -> SamplingParams:
        """Return a copy of sampling parameters that the engine can serve, or raise a ValueError."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {params!r}")
        checked = params.checked()
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            highest = max(getattr(checked, name) or (), default=0)
            if highest >= self.vocab_size:
                raise ValueError(f"{name}: token id {highest} is outside the vocabulary, 0 ... {self.vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            given = getattr(checked, name)
            # -1 stands for the whole vocabulary.
            setattr(checked, name, count := self.vocab_size if given == -1 else given)
            if (count or 0) > self.max_logprobs:
                whole = f", all {count} tokens," if given == -1 else ""
                raise ValueError(f"{name}={given}{whole} is over max_logprobs={self.max_logprobs}")
        for layer in checked.hidden_states or ():
            if self.num_layers is None or layer > self.num_layers:
                known = "only native models have them" if self.num_layers is None else f"it has 0 ... {self.num_layers}"
                raise ValueError(f"hidden_states: the model has no layer {layer}: {known}")
        return checked

    def check_prompt(self, prompt: Any, params: SamplingParams) -> array[int]:
        """Return the ids of a list of tokens; a ValueError names what is out of bounds. `params` are checked."""
        try:
            token_ids = check_token_ids(prompt, self.vocab_size)
        except TypeError as error:
            kind = type(prompt).__name__
            raise ValueError(f"a prompt is a string or a list of token ids, not {kind}: {prompt!r:.80}") from error
        self.check_size(len(token_ids), params)
        return token_ids

    def check_size(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Raise a `ValueError` if a prompt of `num_prompt_tokens` tokens cannot be served."""
        if num_prompt_tokens > self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens, over max_model_len={self.max_model_len}"
            )
        if params.prompt_logprobs_start > num_prompt_tokens:
            raise ValueError(
                f"prompt_logprobs_start={params.prompt_logprobs_start} is over the prompt's {num_prompt_tokens} tokens"
            )
        # The last token is returned but never computed, so its keys and values are not stored.
        num_stored = max(num_prompt_tokens, num_prompt_tokens + self.max_tokens(num_prompt_tokens, params) - 1)
        if num_stored > self.max_stored_tokens:
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens and max_tokens={params.max_tokens} need {num_stored} KV "
                f"slots, over the cache's {self.max_stored_tokens} for one request: raise num_kvcache_blocks or "
                "gpu_memory_utilization"
            )

    def max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return the most tokens that a request can generate, at least 1."""
        limit = self.max_model_len - num_prompt_tokens
        if params.max_tokens is not None:
            return max(1, min(params.max_tokens, limit))
        return max(1, min(limit, self.max_stored_tokens + 1 - num_prompt_tokens))
