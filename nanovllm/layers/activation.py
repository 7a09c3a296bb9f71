"""The MLP's activation as a module."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.silu_mul import silu_mul


class SiluAndMul(nn.Module):
    """[num_tokens, 2 * size] -> [num_tokens, size]: SiLU of the first half times the second."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return silu_mul(gate_up)
