"""The state of one output of a request, which the scheduler and the block manager write.

While it decodes, its counts and newest tokens are in `DecodeRows`; reading `Sequence.token_ids` takes them from there.
"""

from __future__ import annotations

import time
import typing
from array import array
from enum import Enum, auto
from typing import Protocol

import numpy as np

from nanovllm.engine.block_table import BlockTable
from nanovllm.engine.request import Request, TokenConstraint
from nanovllm.logprobs import record_bytes
from nanovllm.outputs import RequestMetrics
from nanovllm.runner.messages import TokenLogprobs

GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
"""Spreads seeds: its multiples modulo 2**64 are far apart."""


class SequenceGroup(list["Sequence"]):
    """The sequences of a request's outputs, in order."""

    __slots__ = ()

    @property
    def request_id(self) -> int:
        """The id of the first sequence."""
        return self[0].seq_id

    @property
    def is_finished(self) -> bool:
        """Whether all outputs are complete."""
        return all(seq.status is SequenceStatus.FINISHED for seq in self)


class SequenceStatus(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    """Queued; holds no block and no slot. A preempted sequence is back here, maybe with a token still in flight."""
    RUNNING = auto()
    """Holds a slot and blocks; is in every step until it ends or is preempted."""
    ENDING = auto()
    """Its last token is in flight (a stop by count is known when planning); holds nothing any more."""
    FINISHED = auto()
    """Its text is complete, or it was aborted."""


class Rows(Protocol):
    """What a sequence knows of `DecodeRows`, which holds the counts and newest tokens of those that decode."""

    num_tokens: np.ndarray

    def flush(self, seq: Sequence) -> None:
        """Append to a sequence's `token_ids` the tokens that only these arrays have."""

    def note_token(self, seq: Sequence) -> None:
        """Count a token that was appended to a sequence."""


class Sequence:
    """One output of a request.

    Three counts tell where it is, and the difference between them is what makes overlapped steps possible:
    `len(token_ids)` tokens whose values are known here, `num_tokens` that exist (the newest may so far exist on the
    device alone), and `num_computed_tokens` whose keys and values are stored or planned to be. While it decodes, these
    are kept with those of all others in `rows`.
    """

    # fmt: off
    __slots__ = (
        "__weakref__",
        "_num_computed_tokens",
        "_num_tokens",
        "_token_ids",
        "block_tables",
        "constraint",
        "end_token_ids",
        "finish_reason",
        "fits_from",
        "has_extra",
        "index",
        "is_watched",
        "logprobs",
        "max_tokens",
        "metrics",
        "num_admissions",
        "num_cached_tokens",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_resets",
        "num_shared_tokens",
        "params",
        "prompt_outputs",
        "record_bytes",
        "request",
        "request_id",
        "rows",
        "seed",
        "seq_id",
        "siblings",
        "slot",
        "sort_key",
        "status",
        "stop_reason",
    )
    # fmt: on

    def __init__(
        self,
        seq_id: int,
        request: Request,
        seed: int,
        index: int = 0,
        constraint: TokenConstraint | None = None,
    ) -> None:
        params = request.params
        self.seq_id = seq_id
        # That of the first of its request.
        self.request_id = seq_id
        self.request = request
        # Its slices go as they are to hashes, to numpy and to other processes.
        self._token_ids = request.token_ids[:]
        self.num_prompt_tokens = len(self._token_ids)
        self.params = params
        self.seed = seed
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        # Which output of its request it is, and what masks its tokens.
        self.index = index
        self.constraint = constraint
        # All sequences of a request with several outputs, until this one has finished.
        self.siblings: typing.Sequence[Sequence] = ()
        # The most tokens of its output; None has no limit but the model's length.
        self.max_tokens = params.max_tokens
        # Whether its tokens are sampled by more than a temperature.
        self.has_extra = constraint is not None or params.has_extra
        # Tokens that end the output; the scheduler adds the model's.
        self.end_token_ids: frozenset[int] = frozenset()
        # Whether more than those may end it, or somebody sees its tokens as they come.
        self.is_watched = bool(constraint or params.stop_token_ids or request.reports_tokens)
        # A record for each token of the output, see `nanovllm.logprobs`, and the size of one.
        self.logprobs = bytearray()
        self.record_bytes = record_bytes(params.logprobs)
        # What chunks have computed of the prompt, if it is asked for; complete once the prompt has been computed.
        is_asked = params.prompt_logprobs is not None or request.pooling is not None
        self.prompt_outputs: list[TokenLogprobs | np.ndarray] | None = [] if is_asked else None
        self.num_admissions = 0
        self.metrics = RequestMetrics(time.monotonic())
        self.rows: Rows | None = None
        self._num_tokens = self.num_prompt_tokens
        self._num_computed_tokens = 0
        # Tokens to compute before the first one can be sampled after (re-)admission.
        self.num_prefill_tokens = 0
        # Prompt tokens found in the cache at the first admission; None before it.
        self.num_cached_tokens: int | None = None
        self.slot = -1
        # Of each group of layers; none while the sequence has no blocks.
        self.block_tables: list[BlockTable] = []
        # Leading blocks of each that are in the prefix cache, or were found there to be duplicates.
        self.num_registered_blocks = 0
        # How often the prefix cache had been reset when the first blocks were given.
        self.num_resets = 0
        # Leading tokens that were another sequence's of its request, and are stored.
        self.num_shared_tokens = 0
        # The block manager's count of freed and registered blocks below which this sequence does not fit.
        self.fits_from = 0
        # Sequences run in the order of this key: by priority, then by arrival.
        self.sort_key = (request.priority, seq_id)

    @property
    def priority(self) -> int:
        """The request's priority; lower ones run first."""
        return self.sort_key[0]

    @property
    def token_ids(self) -> array[int]:
        """The tokens whose values are known, prompt and output."""
        if self.rows is not None:
            self.rows.flush(self)
        return self._token_ids

    @property
    def num_tokens(self) -> int:
        """How many tokens exist."""
        return self._num_tokens if self.rows is None else int(self.rows.num_tokens[self.slot])

    @num_tokens.setter
    def num_tokens(self, count: int) -> None:
        assert self.rows is None
        self._num_tokens = count

    @property
    def num_computed_tokens(self) -> int:
        """The tokens whose keys and values are stored or planned to be."""
        # While it decodes, these are all tokens but the newest.
        return self._num_computed_tokens if self.rows is None else self.num_tokens - 1

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        assert self.rows is None
        self._num_computed_tokens = count

    def append(self, token_id: int) -> None:
        """Take the value of the next token."""
        self.token_ids.append(token_id)
        if self.rows is not None:
            self.rows.note_token(self)

    def append_known(self, token_ids: bytes) -> None:
        """Append tokens that `rows` has counted already; 32-bit integers as bytes."""
        self._token_ids.frombytes(token_ids)

    @property
    def num_blocks(self) -> int:
        """Leading blocks that it has been given in every group of layers."""
        return min([len(table) for table in self.block_tables], default=0)

    @property
    def num_in_flight(self) -> int:
        """Tokens that were planned but whose values have not come back yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def wants_prompt_outputs(self) -> bool:
        """Whether the prompt's log-probabilities or hidden states are asked for, and not all computed."""
        if self.prompt_outputs is None or self.index:
            return False
        return len(self.token_ids) == self.num_prompt_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Leading tokens that the prefix cache may serve."""
        if not self.wants_prompt_outputs or self.request.pooling == "last":
            return len(self.token_ids)
        # The first token that is scored follows from the one before it.
        return 0 if self.request.pooling else max(0, self.params.prompt_logprobs_start - 1)

    @property
    def fork_source(self) -> Sequence | None:
        """Another output of the request that has the whole prompt in blocks which this one, waiting, can share."""
        if not self.siblings or self.num_tokens > self.num_prompt_tokens or self.wants_prompt_outputs:
            return None
        others = (other for other in self.siblings if other.status is SequenceStatus.RUNNING and not other.is_prefill)
        return next(others, None)

    @property
    def is_prefill(self) -> bool:
        """Whether tokens known on the host are still to be computed before the next can be sampled."""
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def completion_token_ids(self) -> list[int]:
        """The generated tokens, the EOS that ended them included."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, known={len(self.token_ids)}, exist={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, blocks={self.num_blocks})"
        )


def make_sequences(
    request: Request, seq_ids: list[int], max_tokens: int, constraints: list[TokenConstraint | None]
) -> SequenceGroup:
    """Return a request's sequences, one for each of its outputs; their seeds follow from the request's."""
    seed = request.seed if request.params.seed is None else request.params.seed
    seqs = SequenceGroup()
    for i, (seq_id, constraint) in enumerate(zip(seq_ids, constraints, strict=True)):
        seq = Sequence(seq_id, request, (seed + i * GOLDEN_RATIO_64) % 2**64, i, constraint)
        seq.max_tokens, seq.request_id = max_tokens, seq_ids[0]
        seqs.append(seq)
    if len(seqs) > 1:
        for seq in seqs:
            seq.siblings = seqs
    return seqs
