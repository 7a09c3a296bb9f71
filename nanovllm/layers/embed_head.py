"""Token embedding and LM head: one table, read by rows and multiplied; in tied models the same one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from nanovllm.distributed.shard import Shard
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import project_normed
from nanovllm.layers.weight_part import WeightPart


class Embedding(nn.Module):
    """A table of one row a token; weight [tokens of this rank, hidden_size].

    Args:
        vocab: this rank's token ids; rows of padding hold nothing in particular.
        hidden_size: elements of a row.
    """

    def __init__(self, vocab: Shard, hidden_size: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.weight = nn.Parameter(torch.empty(vocab.size, hidden_size), requires_grad=False)

    def weight_part(self, param: nn.Parameter, shard: str | None) -> WeightPart:
        """What of a tensor of the checkpoint goes where: the rows of this rank's tokens."""
        assert shard is None
        whole = (self.vocab.total, param.shape[1])
        return WeightPart(whole, (self.vocab.present, slice(None)), param.data[: self.vocab.num_present])

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] -> [num_tokens, hidden_size].

        Of several ranks each returns its part, zeros for the others' tokens; the sum is the embedding.
        """
        if self.vocab.is_whole:
            return functional.embedding(token_ids, self.weight)
        rows = token_ids - self.vocab.start
        absent = (rows < 0) | (rows >= self.vocab.size)
        return functional.embedding(rows.masked_fill(absent, 0), self.weight).masked_fill(absent.unsqueeze(1), 0)

    def logits(self, x: torch.Tensor, residual: torch.Tensor | None, norm: AllReduceRMSNorm) -> torch.Tensor:
        """Read the table the other way, for the normalised `x + residual`, which are as `project_normed` takes them.

        Returns [num_rows, tokens of this rank].
        """
        return project_normed(x, residual, norm, self.weight)[0]
