"""RMS norm as a module."""

from __future__ import annotations

import torch
from torch import nn

from nanovllm.distributed.communicator import Communicator


class RMSNorm(nn.Module):
    """Weight [size] and epsilon of a norm over rows."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps


class AllReduceRMSNorm(RMSNorm):
    """Sums the ranks' parts of a branch, adds that to the residual stream, and normalises.

    Every all-reduce of a forward pass happens here, where it can be one kernel with what follows it.
    """

    def __init__(self, size: int, eps: float, communicator: Communicator) -> None:
        super().__init__(size, eps)
        self.communicator = communicator

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised `sum of x + residual`, and that sum; all [num_tokens, size].

        x is this rank's part, of one rank alone perhaps itself in parts, and may be overwritten; the residual is the
        same on all ranks.
        """
        return self.communicator.all_reduce_rms_norm(x, self.weight, self.eps, residual)
