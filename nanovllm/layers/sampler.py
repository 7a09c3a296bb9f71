"""The sampler as a module: one token from each row of logits."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.sampling import sample


class Sampler(nn.Module):
    """Temperature sampling with noise that depends on the request alone; see `kernels/sampling.py`."""

    def forward(
        self, logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, output_index: torch.Tensor
    ) -> torch.Tensor:
        """logits: [num_rows, vocab_size]; temperatures, output_index: [num_rows]; seeds: [num_rows, 2]."""
        return sample(logits, temperatures, seeds, output_index)
