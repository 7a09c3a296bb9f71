"""Attention metadata: what attention needs to know of a step, set for one forward pass.

It is a context variable, so that layers take activations alone and the model does not depend on the runner.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nanovllm.kernels.attention.cascade_attention import CascadeGroups


@dataclass
class AttentionMetadata:
    """The rows of one forward pass: `num_decodes` sequences with one token each, then chunks of several tokens.

    Attributes:
        num_decodes: decode rows, padding included.
        slot_mapping: [num_tokens] int32; the KV slot of each token, `block * block_size + offset`; -1 stores nothing.
        block_tables: [num_seqs, max_blocks] int32; block ids of the decoding sequences, then of the chunks'.
        seq_lens: [num_seqs] int32; tokens that each attends to, its own in this step included.
        cu_seqlens_q: [num_chunks + 1] int32; where each chunk starts among the chunks' tokens.
        query_tiles: [2 * num_tiles] int32; the chunk of each tile of chunk tokens (-1: none), then its number in it.
        sample_tiles: [2 * num_chunks] int32; likewise, of the tiles with tokens that are sampled from.
        seq_lens_host: the same as seq_lens, for what has to be sized on the host; not known to a graph.
        query_lens_host: tokens of each chunk, likewise.
        single_split: whether the backend reads each decode row's keys in one split instead of several (split-KV).
        cascade: which decode rows share a prefix; None if the step does without.
        plan: what the attention backend made of all this, once for all layers.
    """

    num_decodes: int
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    query_tiles: torch.Tensor
    sample_tiles: torch.Tensor
    seq_lens_host: list[int] = field(default_factory=list)
    query_lens_host: list[int] = field(default_factory=list)
    single_split: bool = False
    cascade: CascadeGroups | None = None
    plan: Any = None

    def for_samples(self) -> AttentionMetadata:
        """The same where only rows that are sampled from are wanted.

        Others may come out as anything, NaN too. Some stand in for padding, of which the sampler makes some token.
        """
        return replace(self, query_tiles=self.sample_tiles)


_metadata: ContextVar[AttentionMetadata] = ContextVar("attention_metadata")


def get_attention_metadata() -> AttentionMetadata:
    """Return the metadata of the forward pass that is running."""
    return _metadata.get()


@contextmanager
def set_attention_metadata(metadata: AttentionMetadata) -> Iterator[None]:
    """Make `metadata` the current one inside the `with` block."""
    token = _metadata.set(metadata)
    try:
        yield
    finally:
        _metadata.reset(token)
