"""What attention needs to know of the step, set for exactly one forward pass.

Passing it through every layer's signature would tie the model to the engine; this way a layer is called with
activations alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nanovllm.kernels.prefix_attention import SharedPrefixes


@dataclass
class Context:
    """The rows of one forward pass: `num_decodes` sequences with one token each, then chunks of several tokens.

    Attributes:
        num_decodes: decode rows, padding included.
        kv_slots: [num_tokens] int32; where each token's keys and values go, `block * block_size + offset`; -1: nowhere.
        block_tables: [num_seqs, max_blocks] int32; block ids of the decoding sequences, then of the chunks'.
        context_lens: [num_seqs] int32; tokens that each attends to, its own in this step included.
        cu_seqlens_q: [num_chunks + 1] int32; where each chunk starts among the chunks' tokens.
        query_tiles: [2 * num_tiles] int32; the chunk of each tile of chunk tokens (-1: none), then its number in it.
        sample_tiles: [2 * num_chunks] int32; likewise, of the tiles with tokens that are sampled from.
        context_lens_host: the same as context_lens, for what has to be sized on the host; not known to a graph.
        query_lens_host: tokens of each chunk, likewise.
        whole_contexts: whether the backend, which said that it pays, takes each decode row's context in one piece.
        shared_prefixes: which decode rows share a prefix; None if the step does without.
        plan: what the attention backend made of all this, once for all layers.
    """

    num_decodes: int
    kv_slots: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    query_tiles: torch.Tensor
    sample_tiles: torch.Tensor
    context_lens_host: list[int] = field(default_factory=list)
    query_lens_host: list[int] = field(default_factory=list)
    whole_contexts: bool = False
    shared_prefixes: SharedPrefixes | None = None
    plan: Any = None

    def for_samples(self) -> Context:
        """The same where only rows that are sampled from are wanted.

        Others may come out as anything, NaN too. Some stand in for padding, of which the sampler makes some token.
        """
        return replace(self, query_tiles=self.sample_tiles)


_context: ContextVar[Context] = ContextVar("nanovllm_context")


def get_context() -> Context:
    """The context of the forward pass that is running."""
    return _context.get()


@contextmanager
def set_context(context: Context) -> Iterator[None]:
    """Make `context` the current one inside the `with` block."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)
