"""The messages between the engine and a runner: a step's plan (`ScheduledBatch`), a step under way (`StepHandle`) and a
step's result (`StepOutput`); and the interface of a runner (`Runner`).

`ScheduledBatch` and `StepOutput` are plain data, numbers and arrays of them, and can be sent to another process as they
are. A running sequence has a *slot*, its index in the device's arrays. A runner is told of slots and blocks, never of
sequences; the engine finds a token's sequence by `ScheduledBatch.sampled_seq_ids`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from nanovllm.outputs import pack_records
from nanovllm.sampling_params import SamplingExtra


# Not frozen: that triples the time to make one, and there is one for each request.
@dataclass(slots=True)
class NewRequest:
    """Puts a sequence into a slot: all that the slot must hold from now on."""

    slot: int
    # Of each group of the KV cache.
    block_tables: list[list[int]]
    num_prompt_tokens: int
    temperature: float
    seed: int
    # None if the temperature is all that it asks for.
    extra: SamplingExtra | None = None


@dataclass(frozen=True)
class FullCache:
    """Layers that keep the keys and values of all tokens."""


@dataclass(frozen=True)
class WindowCache:
    """Layers that see the last `window` tokens at most, the query's own included."""

    window: int


@dataclass(frozen=True)
class StateCache:
    """Layers that keep a state of fixed size a sequence, which a step reads, and overwrites.

    Attributes:
        num_blocks: blocks of the cache that a state takes.
        checkpoint: a state is kept at every block end whose number is a multiple of this, beside a prompt's last one.
    """

    num_blocks: int
    checkpoint: int


CacheKind = FullCache | WindowCache | StateCache
"""What the layers of a group of the cache keep: all that the engine knows of them."""


@dataclass(frozen=True)
class NewBlock:
    """Makes block `block_id` entry `index` of a running slot's block table in a group of the KV cache."""

    slot: int
    index: int
    block_id: int
    group: int = 0


@dataclass(frozen=True)
class BlockTransfer:
    """Gives block `destination` the content of block `source`.

    `kind` says where the two are; "copy": both on the device; "load": the source is a slot in the host's memory;
    "save": the destination is one.
    """

    kind: Literal["copy", "load", "save"]
    source: int
    destination: int


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities that are asked for of a chunk.

    Attributes:
        first: index within the chunk of the first token whose successor is scored.
        token_ids: the successors of that token and of those after it.
        num_logprobs: most likely tokens to return with each.
    """

    first: int
    token_ids: array[int]
    num_logprobs: int


@dataclass(slots=True)
class Chunk:
    """A row whose tokens the host sends: those at `start ... start + len(token_ids) - 1` of the sequence in `slot`.

    `store` is false for the one token that a full prefix hit recomputes inside a shared block: its keys and values are
    there already, and shared blocks are immutable. `samples` is true if no token follows that is known. `scores` and
    `pooling` ("last" or "mean") ask for more of its hidden states than a token.
    """

    slot: int
    start: int
    token_ids: array[int]
    store: bool
    samples: bool
    scores: PromptScores | None = None
    pooling: str | None = None


@dataclass(frozen=True)
class Rows:
    """Rows whose tokens the device has: the newest of each slot's sequence, and drafts of the next ones.

    Attributes:
        slots: [num_rows] int32.
        num_new: [num_rows] int32; the tokens that each row computes. It samples one token after each of them, and the
            step returns the leading ones that the drafts agree with, and the one after.
    """

    slots: np.ndarray
    num_new: np.ndarray

    @classmethod
    def of_one_token(cls, slots: np.ndarray) -> Rows:
        """Return rows that compute one token each."""
        return cls(slots, np.ones(len(slots), dtype=np.int32))

    def __len__(self) -> int:
        return len(self.slots)


NO_ROWS = Rows.of_one_token(np.empty(0, dtype=np.int32))


@dataclass
class ScheduledBatch:
    """The plan of one step. A row of it is a slot and the new tokens that it computes.

    The tokens of `rows` are on the device already, and so are their positions and block tables. `chunks` are the rows
    after them, whose tokens come with the plan.
    """

    # Counts the steps of an engine.
    number: int = 0

    new_requests: list[NewRequest] = field(default_factory=list)
    new_blocks: list[NewBlock] = field(default_factory=list)
    # Copies are made before the step writes anything, and all their sources are read before a destination is written.
    # Loads come next, then saves. A later step sees what was loaded, and does not overwrite what is still being saved.
    transfers: list[BlockTransfer] = field(default_factory=list)
    # Whether this step sees what it loads, too.
    waits_for_loads: bool = False
    # The same object as in the step before if no row has joined or left.
    rows: Rows = NO_ROWS
    chunks: list[Chunk] = field(default_factory=list)
    # The sequences that tokens are sampled for: a sequence a row of `rows`, then one a chunk that samples.
    sampled_seq_ids: list[int] = field(default_factory=list)
    # Whether a row asks for more than a temperature.
    has_extra: bool = False
    # Indices into sampled_seq_ids of rows whose tokens the host masks once it knows the token before.
    masked: list[int] = field(default_factory=list)
    # Of each chunk with `scores` or `pooling`: its sequence, and how often that had been admitted. What comes back for
    # an earlier admission is dropped, since a preempted prompt is computed again from its start.
    scored_seq_ids: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def given_blocks(self) -> set[int]:
        """All blocks that this step gives to sequences, and may therefore be written to from now on."""
        given = {block for request in self.new_requests for table in request.block_tables for block in table}
        given.update(new.block_id for new in self.new_blocks)
        return given


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at n positions: of the token there, then of the k most likely ones.

    Attributes:
        values: [n, 1 + k] float32.
        token_ids: [n, 1 + k] int64.
        ranks: [n] int64; of the token there, from 1.
    """

    values: np.ndarray
    token_ids: np.ndarray
    ranks: np.ndarray

    def records(self) -> np.ndarray:
        """Return them as one record for each position; see `nanovllm.outputs.pack_records`."""
        return pack_records(self.values, self.token_ids, self.ranks)


@dataclass(frozen=True)
class StepOutput:
    """A step's results.

    Attributes:
        token_ids: [num_tokens] int64; the tokens of each row, in the order of `ScheduledBatch.sampled_seq_ids`.
        logprob_rows: indices of the tokens that `logprobs` are of.
        logprobs: None if no row asks for any.
        prompt_outputs: of each chunk with `scores` or `pooling`: log-probabilities, or the sum of hidden states,
            [hidden_size] float32.
        num_clipped_kv: keys and values, of the first rank's heads, that were too large for a cache in e4m3, since the
            engine began.
        offsets: [num_rows + 1]; where each row's tokens begin and end. None if each has one, as is usual.
    """

    token_ids: np.ndarray
    logprob_rows: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    prompt_outputs: list[TokenLogprobs | np.ndarray] = field(default_factory=list)
    num_clipped_kv: int = 0
    offsets: np.ndarray | None = None


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> StepOutput:
        """Wait for the step and return its tokens; raises if the step failed."""


class Runner(Protocol):
    """What the engine needs of a `ModelRunner` or a `ParallelRunner`.

    A step is two calls, so that the host can make masks while the forward pass runs.
    """

    # Steps that are left under way while the next one is planned: 0 or 1.
    pipeline_depth: int
    num_kvcache_blocks: int
    # Drafts of following tokens that the device has for every row beside its newest token; a row of a step computes as
    # many of them as fit.
    num_drafts: int
    # Of each group of the cache; states come last, after one group of another kind at least.
    cache_kinds: list[CacheKind]
    # None if blocks are not kept in the host's memory.
    host_memory: HostMemory | None

    def forward(self, batch: ScheduledBatch) -> Any:
        """Queue the forward pass of a step and return the step, for `sample`; raises if it cannot be queued."""

    def sample(self, step: Any, masks: np.ndarray | None = None) -> StepHandle:
        """Queue the sampling of the step whose forward pass was queued last.

        Args:
            step: what `forward` returned.
            masks: [num_masked, ceil(vocab_size / 32)] int32; the tokens that the host allows for the rows
                `ScheduledBatch.masked`: bit `token % 32` of word `token // 32` is of a token. None if there are none.
        """

    def synchronize(self) -> None:
        """Wait for all that was launched; raises if the device is lost."""

    def exit(self) -> None:
        """Let go of the device."""


@dataclass(frozen=True)
class HostMemory:
    """A runner's slots for blocks in the host's memory, and the rates by which loading is weighed against computing.

    Attributes:
        num_slots: blocks of the device that fit.
        num_ready_slots: returns how many slots, the first ones, can be saved to.
        has_all_slots: returns whether no more will be: all are ready, or the host has no more memory.
        block_bytes: bytes of a block, on one rank.
        bytes_per_second: of copies between the host and one rank's device.
        tokens_per_second: of prompts that are computed.
        step_seconds: of a small step.
    """

    num_slots: int
    num_ready_slots: Callable[[], int]
    has_all_slots: Callable[[], bool]
    block_bytes: int
    bytes_per_second: float
    tokens_per_second: float
    step_seconds: float
