"""The rows of a step that ask for more than a temperature."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels.cutoffs import CutoffParams
from nanovllm.kernels.logits import LogitsEdits


@dataclass
class ExtraRows:
    """What some rows of a step's logits ask for beyond a temperature.

    Attributes:
        edited: rows of the step's logits that are edited or cut off, or whose edited form is asked for.
        edited_indices: [num_edited] int64; the same on the device. None if there are none.
        edits: of these rows, before the temperature.
        cutoffs: of these rows; None if none has top-k, top-p or min-p.
        counted: [num_counted] int64; which of these rows' tokens are counted. None if none is.
        logprob_rows: rows of the step's logits whose log-probabilities are asked for.
        logprob_indices: [num_logprob_rows] int64; the same on the device. None if there are none.
        logprobs_in_edited: [num_logprob_rows] int64; which of the edited rows they are, if all of them are edited.
        num_logprobs: most likely tokens to return with each.
        only_own_logprobs: whether the log-probabilities of sampled tokens are all that any row asks for.
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
