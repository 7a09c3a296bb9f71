"""Token embedding and LM head: one table, read by rows and multiplied; in tied models the same one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Embedding(nn.Module):
    """A table of one row a token; weight [vocab_size, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def weight_region(self, param: nn.Parameter, shard: str | None) -> torch.Tensor:
        """The part of a parameter that one tensor of the checkpoint fills: all of it."""
        assert shard is None
        return param.data

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] -> [num_tokens, hidden_size]."""
        return functional.embedding(token_ids, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Read the table the other way. hidden: [num_rows, hidden_size] -> [num_rows, vocab_size]."""
        return functional.linear(hidden, self.weight)
