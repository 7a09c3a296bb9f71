"""Embeddings: hidden states of prompts, pooled and normalised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from nanovllm.outputs import RequestOutput


def embeddings(outputs: Sequence[RequestOutput], hidden_size: int) -> torch.Tensor:
    """Return the normalised embeddings of prompts whose requests asked for pooling, [num_prompts, hidden_size] float32.

    Args:
        outputs: of each prompt's request.
        hidden_size: the model's, which says the shape where there are no prompts: some project their last states.
    """
    # Chunks return sums; a sum has the direction of the mean, and only that is kept.
    states = [np.sum(output.hidden_states, axis=0) for output in outputs]
    stacked = np.array(states, dtype=np.float32) if states else np.empty((0, hidden_size), dtype=np.float32)
    return functional.normalize(torch.from_numpy(stacked), dim=1)
