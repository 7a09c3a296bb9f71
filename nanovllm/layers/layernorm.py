"""RMS norm, and the residual stream between a decoder's norms.

A norm is lazy: the linear layer that takes it may have one kernel for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from nanovllm.distributed.communicator import Communicator
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding
from nanovllm.quantization.loading import LoadableModule

DeferredBranch = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Computes the last product of a branch. Takes the residual, which it may overwrite; returns the stream's `branch` and
`residual` (see `ResidualStream`)."""


class ResidualStream:
    """The hidden states of a decoder, [num_tokens, hidden_size]: `residual + branch`, which the next norm adds up.

    Attributes:
        branch: the newest branch: this rank's part of it, or on one rank alone perhaps parts of a sum (see
            `Weight.multiply_into`). None once it is in the residual.
        residual: the sum of the branches before, the same on every rank. None for zero.
    """

    def __init__(self, branch: torch.Tensor) -> None:
        self.branch: torch.Tensor | None = branch
        self.residual: torch.Tensor | None = None

    def settle(self, total: torch.Tensor) -> None:
        """Set the residual to `residual + branch`, which a norm's kernel has added up."""
        self.branch, self.residual = None, total

    def __iadd__(self, branch: DeferredBranch) -> ResidualStream:
        """Compute a branch and add it, in one kernel where that pays."""
        assert self.branch is None and self.residual is not None
        self.branch, self.residual = branch(self.residual)
        return self


class RMSNorm(LoadableModule):
    """Parameters of an RMS norm: weight [size] and epsilon. The attention kernels apply it to heads."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps


class AllReduceRMSNorm(RMSNorm):
    """Adds up the residual stream, over the ranks too, and normalises it.

    Every all-reduce of a forward pass happens here, where it can be one kernel with what follows it.
    """

    def __init__(self, size: int, eps: float, communicator: Communicator) -> None:
        super().__init__(size, eps)
        self.communicator = communicator

    def forward(self, stream: ResidualStream) -> Normed:
        """Return the normalised stream, not computed yet."""
        return Normed(stream, self)


@dataclass(frozen=True)
class Normed:
    """A norm of the residual stream that is not computed yet; the layer that takes it computes it, exactly once."""

    stream: ResidualStream
    norm: AllReduceRMSNorm

    @property
    def branch(self) -> torch.Tensor:
        """The stream's newest branch, not added yet."""
        assert self.stream.branch is not None
        return self.stream.branch

    def compute(self) -> torch.Tensor:
        """Return the normalised rows, [num_tokens, hidden_size]."""
        norm, residual = self.norm, self.stream.residual
        out, total = norm.communicator.all_reduce_rms_norm(self.branch, norm.weight, norm.eps, residual)
        self.stream.settle(total)
        return out

    def compute_rounded(self, rounding: Rounding) -> Fp8Rows:
        """Return the same in e4m3."""
        norm, residual = self.norm, self.stream.residual
        reduce = norm.communicator.all_reduce_quantize_rows
        rows, total = reduce(self.branch, norm.weight, norm.eps, residual, rounding)
        self.stream.settle(total)
        return rows
