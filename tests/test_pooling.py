"""The mean of a prompt's hidden states, of which there may be more than 16-bit floats can add up."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from nanovllm.runner.messages import Chunk
from nanovllm.runner.step_outputs import prompt_outputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_of_many_hidden_states_is_float32(dtype: torch.dtype) -> None:
    # From 2048 on float16 has no odd numbers, and from 256 on bfloat16 has none.
    hidden = torch.ones(3001, 2, dtype=dtype)
    chunk = Chunk(0, 0, array("i", [0]) * 3001, False, True, pooling="mean")
    nothing: Any = None
    (total,) = prompt_outputs(nothing, nothing, [chunk], hidden)
    assert isinstance(total, torch.Tensor) and total.dtype == torch.float32
    assert total.tolist() == [3001.0, 3001.0]
