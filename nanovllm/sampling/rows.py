"""Describes the rows of a step that need more than a temperature."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels.logits import CutoffParams, LogitsEdits


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
