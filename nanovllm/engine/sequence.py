"""One request's state: plain data that the scheduler and the block manager write."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np

from nanovllm.outputs import RequestMetrics
from nanovllm.runner.messages import TokenLogprobs
from nanovllm.sampling_params import SamplingParams

TokenRow = tuple[list[float], list[int], int]
"""Log-probabilities at one position, their token ids, and the rank of the position's token, which comes first."""


class TokenSink(Protocol):
    """Sees an output's tokens as they come."""

    def append(self, token_id: int, is_end: bool, logprobs: TokenRow | None) -> str | None:
        """Take a token; returns the stop string that it completes.

        Args:
            token_id: the token.
            is_end: whether it is EOS or a stop token.
            logprobs: its log-probabilities; None unless asked for.
        """


class TokenConstraint(Protocol):
    """Says which token may come next."""

    def accept(self, token_id: int) -> None:
        """Take a token of the output."""

    def fill(self, constraints: list[tuple[Any, int]], words: np.ndarray) -> None:
        """Write the masks of constraints of this kind.

        Args:
            constraints: each with its row of words.
            words: [_, ceil(vocab_size / 32)] int32; a bit for each token. The rows' content is undefined before.
        """


@dataclass(frozen=True)
class RequestFeatures:
    """What a request brings besides its prompt and its sampling parameters.

    Attributes:
        priority: lower ones run first.
        sink: sees the tokens as they come.
        constraint: masks the tokens.
        bad_token_ids: tokens that are never generated.
        pooling: "last" or "mean" asks for the hidden states of the prompt.
        prompt: its text, if it came as one.
    """

    priority: int = 0
    sink: TokenSink | None = None
    constraint: TokenConstraint | None = None
    bad_token_ids: tuple[int, ...] = ()
    pooling: str | None = None
    prompt: str | None = None

    @property
    def asks(self) -> bool:
        """Whether steps must know of it."""
        return self.constraint is not None or bool(self.bad_token_ids)


_NO_FEATURES = RequestFeatures()
GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
"""Multiples of it, modulo 2**64, are far apart."""


@dataclass
class RequestGroup:
    """The sequences of a request with several outputs.

    Attributes:
        seq_ids: of all; the first is the request's id.
        seqs: the same.
        finished: those that have finished, by id.
    """

    seq_ids: list[int]
    seqs: list[Sequence] = field(default_factory=list)
    finished: dict[int, Sequence] = field(default_factory=dict)

    def source_for(self, seq: Sequence) -> Sequence | None:
        """Return a sequence that has the whole prompt in blocks which a waiting one can share, if there is one."""
        if len(self.seqs) < 2 or seq.num_tokens > seq.num_prompt_tokens or seq.wants_prompt:
            return None
        others = (other for other in self.seqs if other.status is SequenceStatus.RUNNING and not other.is_prefill)
        return next(others, None)

    def add(self, seq: Sequence) -> bool:
        """Add a sequence that has finished; returns whether all have."""
        self.finished[seq.seq_id] = seq
        return len(self.finished) == len(self.seq_ids)


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


class Sequence:
    """One request.

    Three counts tell where it is, and the difference between them is what makes overlapped steps possible:
    `len(token_ids)` tokens whose values are known here, `num_tokens` that exist (the newest may so far exist on the
    device alone), and `num_computed_tokens` whose keys and values are stored or planned to be.
    """

    def __init__(
        self,
        seq_id: int,
        token_ids: Iterable[int],
        params: SamplingParams,
        seed: int,
        features: RequestFeatures | None = None,
    ) -> None:
        self.seq_id = seq_id
        # Its slices go as they are to hashes, to numpy and to other processes.
        self.token_ids = array("i", token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        self.seed = seed
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.features = features or _NO_FEATURES
        self.group = RequestGroup([seq_id])
        # The most tokens of its output; None has no limit but the model's length.
        self.max_tokens = params.max_tokens
        # Whether steps must know more of it than its temperature.
        self.asks = self.features.asks or not params.samples_plainly
        # For each token of the output: log-probabilities, token ids and rank.
        self.logprobs: list[TokenRow] = []
        # What chunks have computed of the prompt; complete once the prompt has been computed.
        self.prompt_outputs: list[TokenLogprobs | np.ndarray] = []
        self.num_admissions = 0
        self.metrics = RequestMetrics(time.monotonic())
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        # Tokens to compute before the first one can be sampled after (re-)admission.
        self.num_prefill_tokens = 0
        # Prompt tokens found in the cache at the first admission; None before it.
        self.num_cached_tokens: int | None = None
        self.slot = -1
        self.block_table: list[int] = []
        # Leading blocks of block_table that are in the prefix cache, or were found there to be duplicates.
        self.num_registered_blocks = 0
        # The identity, in the prefix cache, of the last of them.
        self.registered_identity = 0
        # Leading tokens that were another sequence's of its request, and are stored.
        self.num_shared_tokens = 0
        # The block manager's count of freed and registered blocks below which this sequence does not fit.
        self.fits_from = 0
        # Sequences run in the order of this key: by priority, then by arrival.
        self.sort_key = (self.features.priority, seq_id)

    @property
    def num_in_flight(self) -> int:
        """Tokens that were planned but whose values have not come back yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def wants_prompt(self) -> bool:
        """Whether chunks of the prompt are asked for more than a token, and have not all been computed."""
        asked = self.params.prompt_logprobs is not None or self.features.pooling is not None
        asked = asked and self.seq_id == self.group.seq_ids[0]
        return asked and len(self.token_ids) == self.num_prompt_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Leading tokens that the prefix cache may serve."""
        if not self.wants_prompt or self.features.pooling == "last":
            return len(self.token_ids)
        # The first token that is scored follows from the one before it.
        return 0 if self.features.pooling else max(0, self.params.prompt_logprobs_start - 1)

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
            f"computed={self.num_computed_tokens}, blocks={len(self.block_table)})"
        )


def make_sequences(
    seq_ids: list[int],
    token_ids: array[int],
    params: SamplingParams,
    features: list[RequestFeatures],
    seed: int,
    max_tokens: int,
) -> list[Sequence]:
    """Return the sequences of a request, one for each of its outputs; their seeds follow from the request's."""
    group, seqs = RequestGroup(seq_ids), []
    for i, (seq_id, item) in enumerate(zip(seq_ids, features, strict=True)):
        seq = Sequence(seq_id, token_ids, params, (seed + i * GOLDEN_RATIO_64) % 2**64, item)
        seq.group, seq.max_tokens = group, max_tokens
        seqs.append(seq)
    group.seqs = seqs
    return seqs
