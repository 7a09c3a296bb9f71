"""The sampler as a module: one token from each row of logits."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import Shard
from nanovllm.kernels.sampling import sample


class Sampler(nn.Module):
    """Temperature sampling with noise that depends on seed and output index alone; see `kernels/sampling.py`.

    Args:
        vocab: this rank's token ids.
        communicator: all-reduces the best (score, token) of the ranks.
    """

    def __init__(self, vocab: Shard, communicator: Communicator) -> None:
        super().__init__()
        self.vocab = vocab
        self.communicator = communicator

    def forward(
        self, logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, output_index: torch.Tensor
    ) -> torch.Tensor:
        """Return token ids, [num_rows] int64, the same on every rank.

        logits: [num_rows, vocabulary entries of this rank]; temperatures: [num_rows] float32; output_index: [num_rows]
        int32; seeds: [num_rows, 2] int32.
        """
        vocab = self.vocab
        scores, token_ids = sample(logits, temperatures, seeds, output_index, vocab.start, vocab.num_present)
        return self.communicator.all_reduce_argmax(scores, token_ids)
