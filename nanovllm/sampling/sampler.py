"""Samples one token from each row of logits, and computes the log-probabilities that rows ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from nanovllm.config import LogprobsMode
from nanovllm.kernels import ops
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import Shard

if TYPE_CHECKING:
    from nanovllm.kernels.logits import CutoffParams, EditedRows, LogitsEdits

DeviceLogprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The fields of `nanovllm.runner.messages.TokenLogprobs` as tensors."""


@dataclass(frozen=True)
class SamplingInputs:
    """Sampling parameters that every row has.

    Attributes:
        temperatures: [num_rows] float32; 0 is greedy.
        seeds: [num_rows, 2] int32; low and high word.
        output_index: [num_rows] int32; tokens that each sequence has generated before.
    """

    temperatures: torch.Tensor
    seeds: torch.Tensor
    output_index: torch.Tensor

    def __getitem__(self, rows: torch.Tensor) -> SamplingInputs:
        return SamplingInputs(self.temperatures[rows], self.seeds[rows], self.output_index[rows])


@dataclass
class ExtraRows:
    """Parameters beyond the temperature of some rows of a step's logits.

    Attributes:
        edited: rows of the step's logits that are edited or truncated, or whose edited form is needed.
        edited_indices: [num_edited] int64; the same on the device. None if empty.
        edits: edits of these rows, before the temperature.
        cutoffs: cutoffs of these rows; None without top-k, top-p and min-p.
        counted: [num_counted] int64; indices into the edited rows whose tokens are counted. None if empty.
        logprob_rows: rows of the step's logits that need log-probabilities.
        logprob_indices: [num_logprob_rows] int64; the same on the device. None if empty.
        logprobs_in_edited: [num_logprob_rows] int64; their indices in the edited rows, if all of them are edited.
        num_logprobs: number of most likely tokens to return with each.
        only_own_logprobs: whether rows need only the log-probabilities of sampled tokens, and nothing else.
    """

    edited: list[int]
    edited_indices: torch.Tensor | None
    edits: LogitsEdits
    cutoffs: CutoffParams | None
    counted: torch.Tensor | None
    logprob_rows: list[int]
    logprob_indices: torch.Tensor | None
    logprobs_in_edited: torch.Tensor | None
    num_logprobs: int
    only_own_logprobs: bool


@dataclass(frozen=True)
class Sampled:
    """The result of sampling rows of logits: [num_rows] int64, the same on every rank.

    logprobs: of the rows that need them, in order; None if no row does.
    """

    token_ids: torch.Tensor
    logprobs: DeviceLogprobs | None = None

    def logprobs_of(self, rows: torch.Tensor | None) -> DeviceLogprobs | None:
        """Select log-probabilities by [n] int64 indices into the rows that have them."""
        if self.logprobs is None or rows is None:
            return None
        values, token_ids, ranks = self.logprobs
        return values[rows], token_ids[rows], ranks[rows]


@dataclass(frozen=True)
class _Edited:
    """Edited rows of logits over the whole vocabulary.

    Attributes:
        indices: [n] int64; their indices in the step's logits.
        rows: the edited logits.
        scored: logits used for log-probabilities, before truncation.
        cutoffs: [n] float32; logits below count as -inf. None keeps all.
        inputs: sampling parameters of these rows.
    """

    indices: torch.Tensor
    rows: EditedRows
    scored: EditedRows
    cutoffs: torch.Tensor | None
    inputs: SamplingInputs


class Sampler:
    """Samples with temperature and noise that depends only on seed and output index; see `kernels/sampling.py`.

    Args:
        vocab: this rank's token ids.
        communicator: reduces the best (score, token) over the ranks.
        logprobs_mode: whether log-probabilities are of raw logits, or of edited logits over the temperature, before
            ("scaled_logprobs") or after truncation.
    """

    def __init__(self, vocab: Shard, communicator: Communicator, logprobs_mode: LogprobsMode = "raw_logprobs") -> None:
        self.vocab, self.communicator, self.logprobs_mode = vocab, communicator, logprobs_mode

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs, extra: ExtraRows | None = None) -> Sampled:
        """Sample a token from each row of logits, [num_rows, vocabulary entries of this rank]."""
        if extra is None:
            return Sampled(self._draw(logits, inputs))
        edited = None if extra.edited_indices is None else self._edit(logits, inputs, extra.edited_indices, extra)
        token_ids = self._draw(logits, inputs, edited)
        return Sampled(token_ids, self._logprobs(logits, token_ids, edited, extra))

    def sample_with_logprobs(self, logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
        """Sample, on a single rank, and return the log-probability of each row's token; fits a CUDA graph."""
        token_ids = self._draw(logits, inputs)
        temperatures = None if self.logprobs_mode == "raw_logprobs" else inputs.temperatures
        return Sampled(token_ids, ops.own_logprobs(logits[:, : self.vocab.total].contiguous(), token_ids, temperatures))

    def score(self, logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> DeviceLogprobs:
        """Return log-probabilities of given tokens, [num_rows] int64, and of the `num_logprobs` most likely ones."""
        return ops.token_logprobs(self._whole_rows(logits), token_ids, num_logprobs)

    def _draw(self, logits: torch.Tensor, inputs: SamplingInputs, edited: _Edited | None = None) -> torch.Tensor:
        """Sample tokens, [num_rows] int64; edited rows replace the corresponding rows of the logits."""
        vocab = self.vocab
        if edited is not None and len(edited.indices) == len(logits):
            scores, token_ids = inputs.temperatures.new_empty(len(logits)), edited.indices.new_empty(len(logits))
        else:
            scores, token_ids = ops.sample(
                logits, inputs.temperatures, inputs.seeds, inputs.output_index, vocab.start, vocab.num_present
            )
        if edited is not None:
            own = edited.inputs
            scores[edited.indices], token_ids[edited.indices] = ops.sample(
                edited.rows.x, own.temperatures, own.seeds, own.output_index, 0, vocab.total, edited.cutoffs
            )
        return self.communicator.all_reduce_argmax(scores, token_ids)

    def _edit(self, logits: torch.Tensor, inputs: SamplingInputs, indices: torch.Tensor, extra: ExtraRows) -> _Edited:
        gathered, own = self._gathered(logits, indices)
        edits, size = extra.edits, self.vocab.total
        rows = scored = ops.edit_logits(gathered, own, size, edits)
        if self.logprobs_mode == "scaled_logprobs" and (edits.bitmask is not None or edits.forbidden is not None):
            # Trainers know neither grammars nor `min_tokens`.
            unmasked = replace(edits, bitmask=None, bitmask_rows=None, forbidden=None)
            scored = ops.edit_logits(gathered, own, size, unmasked)
        least = None if extra.cutoffs is None else ops.cutoffs(rows, extra.cutoffs)
        return _Edited(indices, rows, scored, least, inputs[indices])

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, edited: _Edited | None, extra: ExtraRows
    ) -> DeviceLogprobs | None:
        indices = extra.logprob_indices
        if indices is None:
            return None
        # In other modes every row that needs them is an edited row, see `SamplingState.rows_of`.
        if self.logprobs_mode == "raw_logprobs" or edited is None or extra.logprobs_in_edited is None:
            return ops.token_logprobs(self._whole_rows(logits, indices), token_ids[indices], extra.num_logprobs)
        kept = edited.scored
        if self.logprobs_mode == "processed_logprobs" and edited.cutoffs is not None:
            kept = kept.above(edited.cutoffs)
        temperatures = edited.inputs.temperatures[extra.logprobs_in_edited]
        return ops.token_logprobs(kept[extra.logprobs_in_edited], token_ids[indices], extra.num_logprobs, temperatures)

    def _whole_rows(self, logits: torch.Tensor, rows: torch.Tensor | None = None) -> EditedRows:
        """Return rows of logits over the whole vocabulary on every rank; rows: [n] int64, None for all."""
        if rows is None:
            rows = torch.arange(len(logits), device=logits.device)
        gathered, own = self._gathered(logits, rows)
        return ops.edit_logits(gathered, own, self.vocab.total, ops.LogitsEdits())

    def _gathered(self, logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits over the whole vocabulary, and the indices of the rows in them."""
        if self.communicator.size == 1:
            return logits, rows
        return self.communicator.all_gather_columns(logits[rows]), torch.arange(len(rows), device=rows.device)
