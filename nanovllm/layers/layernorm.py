"""RMS norm as a module."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Normalises rows of `size`, and adds the residual stream in the same pass."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised `x + residual`, and `x + residual`; all [num_tokens, size]."""
        return rms_norm(x, self.weight, self.eps, residual)
