"""A request as plain data: what every engine takes, in this process or in another.

What lives while a request runs is made where it is needed: constraints by the engine (`MakeConstraint`), text by the
front end.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_int


@dataclass(slots=True, eq=False)
class Grammar:
    """What an output must match, checked.

    Attributes:
        text: in the form that is compiled.
        is_choice: whether it lists texts, which compile sooner than a pattern of that length.
        num_bytes: memory that it takes compiled; 0 if that was not measured.
        compiled: of this process; it does not go along to another one.
    """

    text: str
    is_choice: bool
    num_bytes: int = 0
    compiled: Any = field(default=None, repr=False)

    def __reduce__(self) -> tuple[type[Grammar], tuple[str, bool, int]]:
        return Grammar, (self.text, self.is_choice, self.num_bytes)


# Not frozen: that triples the time to make one.
@dataclass(slots=True, eq=False)
class Request:
    """A request that an engine can serve; see `InputProcessor` and `RequestLimits`.

    Attributes:
        token_ids: the prompt.
        params: in range.
        prompt: its text, if it came as one.
        priority: lower ones run first.
        cache_salt: blocks of the prefix cache are shared only with requests that have the same one, or none as well.
        pooling: "last" or "mean" asks for the hidden states of the prompt.
        bad_token_ids, bad_sequences: tokens, and sequences of several tokens, that are never generated.
        grammar: what the outputs match.
        is_streamed: whether its tokens are wanted as they come.
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
        """Whether the engine reports its tokens as they come: somebody reads them, or looks for stop strings."""
        return self.is_streamed or self.params.stop is not None

    @property
    def is_constrained(self) -> bool:
        """Whether outputs need a constraint; see `MakeConstraint`."""
        return self.grammar is not None or bool(self.bad_sequences)

    def __reduce__(self) -> tuple[type[Request], tuple[Any, ...]]:
        bad = self.bad_token_ids, self.bad_sequences
        own = self.priority, self.cache_salt, self.pooling, *bad, self.grammar, self.is_streamed, self.seed
        return Request, (self.token_ids, self.params, self.prompt, *own)


@dataclass(slots=True)
class Abort:
    """Says to whoever drives an engine: drop requests, or finish them with what they have."""

    request_ids: list[int]
    keep_outputs: bool


def check_request_ids(request_ids: Iterable[int]) -> list[int]:
    """Return ids of requests as a list.

    Raises:
        ValueError: what is given is no id.
    """
    if not isinstance(request_ids, Iterable):
        raise ValueError(f"request ids are given as a list, not {request_ids!r:.80}")
    return [check_int("request id", request_id, 0) for request_id in request_ids]


class TokenConstraint(Protocol):
    """Says which token may come next."""

    def accept(self, token_id: int) -> None:
        """Take a token of the output, that which ends it too; what it raises fails the request alone."""

    def fill(self, constraints: list[tuple[Any, int]], words: np.ndarray) -> None:
        """Write the masks of constraints of this kind.

        Args:
            constraints: each with its row of words.
            words: [_, ceil(vocab_size / 32)] int32; a bit for each token. The rows' content is undefined before.
        """


MakeConstraint = Callable[[Request], "TokenConstraint | None"]
"""Makes the constraint of one output, at its start, of a request that `is_constrained`; from any thread."""


def no_constraint(request: Request) -> None:
    """Refuse a request that needs constraints: the `MakeConstraint` of an engine that has none.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"this engine has no constraints, which {request.grammar or request.bad_sequences!r:.80} needs")
