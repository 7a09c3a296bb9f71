"""RMS norm, and the residual stream between a decoder's norms.

A norm is lazy: the linear layer that takes it may have one kernel for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from nanovllm.distributed.communicator import Communicator
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding
from nanovllm.kernels.rms_norm import Norm
from nanovllm.quantization.weight import Weight
from nanovllm.weights.slices import LoadableModule


@dataclass(frozen=True)
class DeferredBranch:
    """The last op of a branch, not computed yet.

    Attributes:
        add_to: computes it. Takes the residual, which it may overwrite, or None to add nothing; returns the stream's
            `branch` and `residual` (see `ResidualStream`).
        rows: of the stream that the branch has, if not all. The stream loses the others.
    """

    add_to: Callable[[torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]
    rows: torch.Tensor | None = None


class ResidualStream:
    """The hidden states of a decoder, [num_tokens, hidden_size]: `residual + branch`, which the next norm adds up.

    Attributes:
        branch: the newest branch: this rank's part of it, or on one rank alone perhaps parts of a sum (see
            `Weight.multiply_into`); after an `AllReduceRMSNorm` all of it. None once it is in the residual.
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
        residual = self.residual if branch.rows is None else self.residual[branch.rows]
        self.branch, self.residual = branch.add_to(residual)
        return self

    def total(self) -> Rows:
        """Add up a stream whose newest branch is whole."""
        assert self.branch is not None
        total = self.branch if self.residual is None else self.residual + self.branch
        self.settle(total)
        return Rows(total)


class RMSNorm(LoadableModule):
    """Parameters of an RMS norm: weight [size] and epsilon. The attention kernels apply it to heads."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps


class AllReduceRMSNorm(RMSNorm):
    """Adds up the residual stream or a branch, over the ranks too, and normalises it.

    All-reduces of hidden states happen here, where they can be one kernel with what follows them.
    """

    def __init__(self, size: int, eps: float, communicator: Communicator) -> None:
        super().__init__(size, eps)
        self.communicator = communicator

    def forward(self, stream: ResidualStream) -> Normed:
        """Return the normalised stream, not computed yet."""
        return Normed(stream, self)

    def of(self, branch: DeferredBranch) -> DeferredBranch:
        """Return the normalised branch, not computed yet."""
        return DeferredBranch(partial(self._add_to, branch), branch.rows)

    def _add_to(
        self, branch: DeferredBranch, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        product, _ = branch.add_to(None)
        normed, _ = self.communicator.all_reduce_rms_norm(product, self.weight, self.eps, None)
        return normed, residual


class LinearInput(Protocol):
    """What a linear layer takes, perhaps not computed yet; the first that takes it computes it, exactly once."""

    @property
    def branch(self) -> torch.Tensor:
        """What the rows are made of, if not themselves, [..., num_rows, size]: it has their number and device."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its rows, once they are computed."""

    def compute(self) -> torch.Tensor:
        """Return its rows, [num_rows, size]."""

    def multiply(self, weight: Weight, gated: bool) -> torch.Tensor:
        """Return `weight.multiply` of its rows."""


@dataclass(frozen=True)
class Rows:
    """Rows that are computed, [num_rows, size]; see `LinearInput`."""

    branch: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """See `LinearInput`."""
        return self.branch.dtype

    def compute(self) -> torch.Tensor:
        """See `LinearInput`."""
        return self.branch

    def multiply(self, weight: Weight, gated: bool) -> torch.Tensor:
        """See `LinearInput`."""
        return weight.multiply(self.branch, gated)


@dataclass(frozen=True)
class Normed:
    """A norm of the residual stream that is not computed yet; see `LinearInput`."""

    stream: ResidualStream
    norm: AllReduceRMSNorm

    @property
    def branch(self) -> torch.Tensor:
        """The stream's newest branch, not added yet."""
        assert self.stream.branch is not None
        return self.stream.branch

    @property
    def dtype(self) -> torch.dtype:
        """See `LinearInput`."""
        return self.norm.weight.dtype

    def multiply(self, weight: Weight, gated: bool) -> torch.Tensor:
        """See `LinearInput`; on one rank in one kernel where there is one."""
        norm, stream = self.norm, self.stream
        if norm.communicator.size > 1:
            product = weight.rounded_product(self.branch.shape[-2], norm.weight.dtype)
            if product is None:
                return weight.multiply(self.compute(), gated)
            return product.multiply(self._compute_rounded(product.rounding), gated)
        out, total = weight.multiply_normed(self.branch, Norm(norm.weight, norm.eps), stream.residual, gated)
        stream.settle(total)
        return out

    def compute(self) -> torch.Tensor:
        """Return the normalised rows, [num_tokens, hidden_size]."""
        norm, residual = self.norm, self.stream.residual
        out, total = norm.communicator.all_reduce_rms_norm(self.branch, norm.weight, norm.eps, residual)
        self.stream.settle(total)
        return out

    def _compute_rounded(self, rounding: Rounding) -> Fp8Rows:
        """Return the normalised rows in e4m3."""
        norm, residual = self.norm, self.stream.residual
        reduce = norm.communicator.all_reduce_quantize_rows
        rows, total = reduce(self.branch, norm.weight, norm.eps, residual, rounding)
        self.stream.settle(total)
        return rows
