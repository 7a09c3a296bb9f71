"""Token embedding and LM head, split over the ranks along the vocabulary."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from nanovllm.distributed.shard import Shard
from nanovllm.layers.linear import MergedColumnParallelLinear
from nanovllm.layers.weights import LoadableLayer, WeightSlice, WeightTarget


class VocabParallelEmbedding(LoadableLayer):
    """A table of one row a token; weight [vocabulary entries of this rank, hidden_size].

    Args:
        vocab: this rank's token ids; rows of padding hold nothing in particular.
        hidden_size: elements of a row.
    """

    def __init__(self, vocab: Shard, hidden_size: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.weight = nn.Parameter(torch.empty(vocab.size, hidden_size), requires_grad=False)

    def weight_slices(self, name: str, param: nn.Parameter) -> dict[WeightTarget, WeightSlice]:
        """Return the rows of this rank's tokens."""
        return {WeightTarget(name): WeightSlice.along(0, self.vocab, param.data)}

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] -> [num_tokens, hidden_size].

        Of several ranks each returns its part, zeros for the others' tokens; the sum is the embedding.
        """
        if self.vocab.is_whole:
            return functional.embedding(token_ids, self.weight)
        rows = token_ids - self.vocab.start
        absent = (rows < 0) | (rows >= self.vocab.size)
        return functional.embedding(rows.masked_fill(absent, 0), self.weight).masked_fill(absent.unsqueeze(1), 0)


class ParallelLMHead(MergedColumnParallelLinear):
    """The projection to the logits of this rank's vocabulary entries; weight [entries, hidden_size].

    Args:
        vocab, hidden_size: see `VocabParallelEmbedding`.
        tied_to: the embedding whose weight is the head's, too; None if it has one of its own.
    """

    def __init__(self, vocab: Shard, hidden_size: int, tied_to: VocabParallelEmbedding | None) -> None:
        super().__init__(hidden_size, {None: vocab})
        if tied_to is not None:
            # One dict, because `Module.to_empty` makes each module a parameter of its own.
            self._parameters = tied_to._parameters
