"""The interface of a runner (`Runner`), a step's plan (`ScheduledBatch`), and its result (`StepOutput`).

Plan and result are plain data, numbers and arrays of them, and can be sent to another process. A running sequence has a
*slot*, its index in the device's arrays. A runner knows slots and blocks; the engine finds a token's sequence by
`ScheduledBatch.sampled_seq_ids`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from nanovllm.outputs import pack_records
from nanovllm.sampling_params import SamplingExtra


@dataclass(slots=True)
class NewRequest:
    """Puts a sequence into a slot: the full content of the slot."""

    slot: int
    # One list for each group of the KV cache.
    block_tables: list[list[int]]
    num_prompt_tokens: int
    temperature: float
    seed: int
    # None if temperature is its only option.
    extra: SamplingExtra | None = None
    # All tokens known so far, for runners that draft from them; empty for others.
    token_ids: array[int] = field(default_factory=lambda: array("i"))


@dataclass(frozen=True)
class PagedCache:
    """Layers that keep keys and values of all tokens, or see at most the last `window`, the query's own included."""

    window: int | None = None


@dataclass(frozen=True)
class StateCache:
    """Layers that keep a state of fixed size per sequence, which a step reads and overwrites."""

    # Blocks of the cache that a state takes, and blocks of a prompt from one kept state to the next.
    num_blocks: int
    interval: int


CacheKind = PagedCache | StateCache
"""Cache contents of the layers in one group: all that the engine knows of them."""


@dataclass(frozen=True)
class NewBlock:
    """Makes block `block_id` entry `index` of a running slot's block table in a group of the KV cache."""

    slot: int
    index: int
    block_id: int
    group: int = 0


@dataclass(frozen=True)
class BlockTransfer:
    """Gives block `destination` the content of block `source`; a "load" is from, a "save" to a slot in host memory."""

    kind: Literal["copy", "load", "save"]
    source: int
    destination: int


@dataclass(frozen=True)
class PromptScores:
    """Requests log-probabilities of `token_ids`, which follow the chunk's tokens from `first` on, and the likeliest."""

    first: int
    token_ids: array[int]
    num_logprobs: int


@dataclass(frozen=True)
class KeptState:
    """Keeps the state after the first `num_tokens` tokens of a chunk's sequence in other blocks, in table order."""

    num_tokens: int
    block_ids: list[int]


@dataclass(slots=True)
class Chunk:
    """A row whose tokens the host sends: tokens `start ... start + len(token_ids) - 1` of the sequence in `slot`.

    `store` is false for the one token that a full prefix hit recomputes inside a shared block: its keys and values are
    already stored, and shared blocks are immutable. `samples` is true if no known token follows. `scores`, `pooling`
    ("last" or "mean") and `hidden_states` (of layers) request more than a token, an output each. `kept_states` end
    before the chunk does. `successor` is the token after the chunk's last, -1 if none is known.
    """

    slot: int
    start: int
    token_ids: array[int]
    store: bool
    samples: bool
    scores: PromptScores | None = None
    pooling: str | None = None
    kept_states: list[KeptState] = field(default_factory=list)
    successor: int = -1
    hidden_states: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rows:
    """Rows whose tokens are on the device: the newest of each slot's sequence, and drafts of the next ones.

    Attributes:
        slots: [num_rows] int32.
        num_new: [num_rows] int32; the tokens that each row computes. It samples one after each of them; the step
            returns the leading ones that the drafts agree with, and the one after.
        num_computed: [num_rows] int32; the tokens that each row has computed before, at most, of a runner with drafts;
            None of others, where the runner counts them.
    """

    slots: np.ndarray
    num_new: np.ndarray
    num_computed: np.ndarray | None = None

    @classmethod
    def of_one_token(cls, slots: np.ndarray) -> Rows:
        """Return rows that compute one token each."""
        return cls(slots, np.ones(len(slots), dtype=np.int32))

    def __len__(self) -> int:
        return len(self.slots)


NO_ROWS = Rows.of_one_token(np.empty(0, dtype=np.int32))


@dataclass
class ScheduledBatch:
    """The plan of one step: rows whose tokens are on the device, then `chunks`, whose tokens come with the plan."""

    # Counts the steps of an engine.
    number: int = 0
    new_requests: list[NewRequest] = field(default_factory=list)
    new_blocks: list[NewBlock] = field(default_factory=list)
    # Copies are made before the step writes anything, and all their sources are read before a destination is written.
    # Loads come next, then saves. A later step sees the loads, and does not overwrite pending saves.
    transfers: list[BlockTransfer] = field(default_factory=list)
    # Whether this step sees its own loads, too.
    waits_for_loads: bool = False
    # The same object as in the previous step if no row was added or removed.
    rows: Rows = NO_ROWS
    chunks: list[Chunk] = field(default_factory=list)
    # The sequences that tokens are sampled for: one per row of `rows`, then one per chunk that samples.
    sampled_seq_ids: list[int] = field(default_factory=list)
    # Whether a row uses options beyond a temperature.
    has_extra: bool = False
    # Whether the step ends with drafts, for its rows in the next one; only after such a step may rows have some.
    drafts: bool = False
    # Indices into sampled_seq_ids of rows whose tokens the host masks once it knows the previous token.
    masked: list[int] = field(default_factory=list)
    # For each output of a chunk: its sequence, and that sequence's number of admissions. Results for an earlier
    # admission are dropped, since a preempted prompt is computed again from its start.
    scored_seq_ids: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def given_blocks(self) -> set[int]:
        """All blocks that this step gives to sequences and kept states, and that may be written to from now on."""
        given = {block for request in self.new_requests for table in request.block_tables for block in table}
        given.update(new.block_id for new in self.new_blocks)
        given.update(block for chunk in self.chunks for state in chunk.kept_states for block in state.block_ids)
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
        """Return one record per position; see `pack_records`."""
        return pack_records(self.values, self.token_ids, self.ranks)


@dataclass(frozen=True)
class StepOutput:
    """A step's results.

    Attributes:
        token_ids: [num_tokens] int64; the tokens of each row, in the order of `ScheduledBatch.sampled_seq_ids`.
        logprob_rows: indices of the tokens that `logprobs` describe.
        logprobs: None if no row asks for any.
        prompt_outputs: the outputs of chunks: log-probabilities for `scores`, [hidden_size] float32 for `pooling`,
            [num_layers, num_tokens, hidden_size] float32 for `hidden_states`.
        num_clipped_kv: keys and values, of the first rank's heads, that exceeded the range of a cache in e4m3, since
            the engine began.
        offsets: [num_rows + 1]; where each row's tokens begin and end. None if each has one, as is usual.
        num_drafts: [num_rows] int64; the drafts that the device has for each row's next tokens. None if the step makes
            none and leaves earlier drafts as they are.
    """

    token_ids: np.ndarray
    logprob_rows: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    prompt_outputs: list[TokenLogprobs | np.ndarray] = field(default_factory=list)
    num_clipped_kv: int = 0
    offsets: np.ndarray | None = None
    num_drafts: np.ndarray | None = None


class StepHandle(Protocol):
    """A step under way."""

    def result(self) -> StepOutput:
        """Wait for the step and return its tokens; raises if the step failed."""


class Runner(Protocol):
    """The engine's interface to a `ModelRunner` or a `ParallelRunner`.

    A step is two calls, so that the host can make masks while the forward pass runs.
    """

    # Steps that are still under way while the next one is planned: 0 or 1.
    pipeline_depth: int
    num_kvcache_blocks: int
    # Drafts of following tokens that the device has, at most, for every row beside its newest token.
    num_drafts: int
    draft_costs: DraftCosts
    # One for each group of the cache; states come last, after at least one group of another kind.
    cache_kinds: list[CacheKind]
    # None if blocks are not kept in host memory.
    host_memory: HostMemory | None

    def forward(self, batch: ScheduledBatch) -> Any:
        """Queue the forward pass of a step and return the step, for `sample`; raises if it cannot be queued."""

    def sample(self, step: Any, masks: np.ndarray | None = None) -> StepHandle:
        """Queue the sampling of the step whose forward pass was queued last.

        masks: [num_masked, ceil(vocab_size / 32)] int32; the tokens that the host allows for the rows
        `ScheduledBatch.masked`: bit `token % 32` of word `token // 32` is for `token`. None if no row is masked.
        """

    def synchronize(self) -> None:
        """Wait for all launched work; raises if the device is lost."""

    def exit(self) -> None:
        """Release the device."""


@dataclass(frozen=True)
class DraftCosts:
    """The time that steps take with drafts, by the number of their rows.

    Attributes:
        rows: numbers of rows, ascending. Steps of more rows have no drafts.
        ratios: times of steps that verify drafts and make others, divided by times of steps without either.
        are_free: whether making drafts takes next to no time; if it takes some, no step makes any in vain.
    """

    rows: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    are_free: bool = False

    def least_gain(self, num_rows: int) -> float:
        """Return the drafts of each row, on average, that must be right in a step to be worth its time."""
        return float(np.interp(num_rows, self.rows, self.ratios)) - 1


NO_DRAFTS = DraftCosts()


@dataclass(frozen=True)
class HostMemory:
    """A runner's slots for blocks in host memory."""

    num_slots: int
    # Return the number of slots, which come first, that can be saved to; and whether allocation is over, since all are
    # ready, or the host has no more memory.
    num_ready_slots: Callable[[], int]
    has_all_slots: Callable[[], bool]
    # Of one rank.
    block_bytes: int
