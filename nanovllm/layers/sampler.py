"""The sampler as a module: one token from each row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import Shard
from nanovllm.kernels.cutoffs import CutoffParams, cutoffs
from nanovllm.kernels.logits import EditedRows, LogitsEdits, edit_logits
from nanovllm.kernels.sampling import sample


@dataclass
class EditedLogits:
    """Rows whose requests ask for more than a temperature.

    Attributes:
        indices: [num_rows] int64; of the step's logits.
        rows: the whole vocabulary's logits.
        cutoffs: [num_rows] float32; the least logits that are kept. None if all are.
        temperatures, seeds, output_index: of these rows; see `Sampler`.
    """

    indices: torch.Tensor
    rows: EditedRows
    cutoffs: torch.Tensor | None
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
        if edited is not None and len(edited.indices) == len(logits):
            scores, token_ids = temperatures.new_empty(len(logits)), logits.new_empty(len(logits), dtype=torch.int64)
        else:
            scores, token_ids = sample(logits, temperatures, seeds, output_index, vocab.start, vocab.num_present)
        if edited is not None:
            sampling = edited.temperatures, edited.seeds, edited.output_index
            drawn = sample(edited.rows.x, *sampling, 0, vocab.total, edited.cutoffs)
            scores[edited.indices], token_ids[edited.indices] = drawn
        return self.communicator.all_reduce_argmax(scores, token_ids)

    def edit(
        self,
        logits: torch.Tensor,
        indices: torch.Tensor,
        sampling: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        edits: LogitsEdits,
        cutoff_params: CutoffParams | None,
    ) -> EditedLogits:
        """Return rows of logits with edits; the whole vocabulary on every rank.

        Args:
            logits: [_, vocabulary entries of this rank].
            indices: [num_rows] int64; which rows.
            sampling: temperatures, seeds and output_index of all rows of logits.
            edits, cutoff_params: of these rows.
        """
        temperatures, seeds, output_index = (tensor[indices] for tensor in sampling)
        rows = edit_logits(*self.gather(logits, indices), self.vocab.total, edits)
        least = None if cutoff_params is None else cutoffs(rows, cutoff_params)
        return EditedLogits(indices, rows, least, temperatures, seeds, output_index)

    def gather(self, logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the whole vocabulary, and which of their rows are the given ones."""
        if self.communicator.size == 1:
            return logits, rows
        return self.communicator.all_gather_columns(logits[rows]), torch.arange(len(rows), device=rows.device)
