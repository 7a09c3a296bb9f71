"""The sampler as a module: one token from each row of logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import Shard
from nanovllm.kernels.cutoffs import CutoffParams, cutoffs
from nanovllm.kernels.logits import LogitsEdits, edit_logits
from nanovllm.kernels.sampling import sample


@dataclass
class EditedLogits:
    """Rows whose requests ask for more than a temperature.

    Attributes:
        rows: [num_rows] int64; of the step's logits.
        logits: [num_rows, width] float32; see `kernels/logits.py`.
        temperatures, seeds, output_index: of these rows; see `Sampler`.
    """

    rows: torch.Tensor
    logits: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    output_index: torch.Tensor


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
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        output_index: torch.Tensor,
        edited: EditedLogits | None = None,
    ) -> torch.Tensor:
        """Return token ids, [num_rows] int64, the same on every rank.

        Args:
            logits: [num_rows, vocabulary entries of this rank].
            temperatures: [num_rows] float32.
            seeds: [num_rows, 2] int32.
            output_index: [num_rows] int32.
            edited: logits that replace some rows'.
        """
        vocab = self.vocab
        scores, token_ids = sample(logits, temperatures, seeds, output_index, vocab.start, vocab.num_present)
        if edited is not None:
            scores[edited.rows], token_ids[edited.rows] = sample(
                edited.logits, edited.temperatures, edited.seeds, edited.output_index, 0, vocab.total
            )
        return self.communicator.all_reduce_argmax(scores, token_ids)

    def edit(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        sampling: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        edits: LogitsEdits,
        cutoff_params: CutoffParams | None,
    ) -> EditedLogits:
        """Return rows of logits with edits, and without what the cutoffs remove; the whole vocabulary on every rank.

        Args:
            logits: [_, vocabulary entries of this rank].
            rows: [num_rows] int64.
            sampling: temperatures, seeds and output_index of all rows of logits.
            edits, cutoff_params: of these rows.
        """
        temperatures, seeds, output_index = (tensor[rows] for tensor in sampling)
        x = edit_logits(*self.gather(logits, rows), self.vocab.total, edits)
        if cutoff_params is not None:
            x.masked_fill_(x < cutoffs(x, cutoff_params).unsqueeze(1), -math.inf)
        return EditedLogits(rows, x, temperatures, seeds, output_index)

    def gather(self, logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the whole vocabulary, and which of their rows are the given ones."""
        if self.communicator.size == 1:
            return logits, rows
        return self.communicator.all_gather_columns(logits[rows]), torch.arange(len(rows), device=rows.device)
