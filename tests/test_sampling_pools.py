"""Rows of token counts and of biases on the device go from request to request."""

from __future__ import annotations

from array import array

import numpy as np
import torch

from nanovllm import SamplingParams
from nanovllm.sampling.state import SamplingState
from nanovllm.sampling_params import SamplingExtra


def test_rows_are_given_back_when_their_slots_are_taken_again() -> None:
    state = SamplingState(64, torch.device("cpu"), "raw_logprobs")
    params = SamplingParams(presence_penalty=0.5, logit_bias={3: 1.0})
    for turn in range(10):
        extra = SamplingExtra(params, array("i", [turn, 5]), num_prompt_tokens=1)
        for slot in range(3):
            state.add(slot, extra)
        rows = state.rows_of([0, 1, 2], np.full(3, 2))
        assert rows is not None and rows.edits.counts_rows is not None and rows.edits.counts is not None
        assert len(set(rows.edits.counts_rows.tolist())) == 3
        # Nothing is left of the turn before.
        for row in rows.edits.counts_rows.tolist():
            assert rows.edits.counts[row].nonzero().flatten().tolist() == sorted({turn, 5})
    # The least that a pool has; three slots never need more.
    assert len(state._counts.tensor) == len(state._bias.tensor) == 8
    assert len(state._counts._free) == len(state._bias._free) == 5
