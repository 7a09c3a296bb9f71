"""One request's state: plain data that the scheduler and the block manager write."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import Enum, auto

from nanovllm.sampling_params import SamplingParams


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

    def __init__(self, seq_id: int, token_ids: Iterable[int], params: SamplingParams, seed: int) -> None:
        self.seq_id = seq_id
        # Its slices go as they are to hashes, to numpy and to other processes.
        self.token_ids = array("i", token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.params = params
        self.seed = seed
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
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
        # The block manager's count of freed and registered blocks below which this sequence does not fit.
        self.fits_from = 0
        # Sequences run in the order of this key: their arrival.
        self.sort_key = seq_id

    @property
    def num_in_flight(self) -> int:
        """Tokens that were planned but whose values have not come back yet."""
        return self.num_tokens - len(self.token_ids)

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
