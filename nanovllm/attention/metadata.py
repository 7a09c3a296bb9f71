"""Metadata of one forward pass, passed in a context variable.

Layers therefore take only activations as arguments, and the model does not depend on the runner.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from nanovllm.kernels.mixers.states import StateRows, StateTiles


@dataclass
class StepMetadata:
    """The rows of one forward pass: `num_decodes` decode rows of `num_queries` tokens each, then prompt chunks.

    Attributes:
        num_decodes: decode rows, including padding.
        slot_mappings: for each group of the KV cache, [num_tokens] int32; the KV slot of each token,
            `block * block_size + offset`; -1 stores nothing.
        block_tables: for each group, [num_seqs, max_blocks] int32; block ids of the decode rows, then of the chunks'
            sequences.
        seq_lens: [num_seqs] int32; context length of each sequence, including its tokens in this step.
        cu_seqlens_q: [num_chunks + 1] int32; first token of each chunk, counted from the first chunk token.
        query_tiles: [2 * num_tiles] int32; the chunk of each query tile (-1: no work), then the tile's index within
            its chunk.
        sample_tiles: [2 * num_chunks] int32; the same for only the tiles that hold a sampled row.
        seq_lens_host: seq_lens on the host, for backends that size tensors there; empty in steps that may be captured.
        query_lens_host: tokens of each chunk, on the host; likewise.
        variant: what `AttentionBackend.plan_host` returned.
        row_positions: [num_decodes * num_queries] int32; positions of the decode rows' tokens; None if each has one.
        plan: set by `AttentionBackend.plan`.
        state_rows, state_tiles: states of the decode rows and of the chunks; None if no layer keeps any.
    """

    num_decodes: int
    slot_mappings: Sequence[torch.Tensor]
    block_tables: Sequence[torch.Tensor]
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    query_tiles: torch.Tensor
    sample_tiles: torch.Tensor
    seq_lens_host: list[int] = field(default_factory=list)
    query_lens_host: list[int] = field(default_factory=list)
    variant: Hashable = None
    row_positions: torch.Tensor | None = None
    plan: Any = None
    state_rows: StateRows | None = None
    state_tiles: StateTiles | None = None

    @property
    def num_queries(self) -> int:
        """Tokens of each decode row."""
        return 1 if self.row_positions is None else len(self.row_positions) // self.num_decodes

    @property
    def num_row_tokens(self) -> int:
        """Tokens of the decode rows."""
        return self.num_decodes * self.num_queries

    def for_samples(self) -> StepMetadata:
        """Return a copy whose query tiles are only those with a sampled row; other chunk rows become undefined.

        Undefined rows may hold NaN. Padding of the sampled rows can point at them; the sampler draws a valid token
        id from any logits.
        """
        return replace(self, query_tiles=self.sample_tiles)


_metadata: ContextVar[StepMetadata] = ContextVar("step_metadata")
get_step_metadata = _metadata.get
"""Returns the metadata of the forward pass that is running."""


@contextmanager
def set_step_metadata(metadata: StepMetadata) -> Iterator[None]:
    """Set the metadata of the forward pass inside the `with` block."""
    token = _metadata.set(metadata)
    try:
        yield
    finally:
        _metadata.reset(token)
