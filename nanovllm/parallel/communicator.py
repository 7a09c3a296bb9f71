"""The collectives of a single rank, which leave everything as it is: the interface of all communicators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanovllm.kernels import ops

if TYPE_CHECKING:
    from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding
    from nanovllm.kernels.policy import KernelPolicy
    from nanovllm.kernels.rms_norm import Norm


class Communicator:
    """The collectives of one rank; this base class is for a single rank. All ranks make the same calls in one order.

    Attributes:
        rank: 0 ... size - 1.
        size: number of ranks.
        device_bytes: device memory that the communicator allocates, in bytes.
        policy: chooses the kernels of collectives.
    """

    policy: KernelPolicy

    rank = 0
    size = 1
    device_bytes = 0

    def prepare_step(self) -> None:
        """Reserve call numbers for a step; called before each, outside CUDA graphs."""

    def begin_step(self) -> None:
        """Reset the per-step state; called at the start of each forward pass, which a CUDA graph may hold."""

    def begin_sampling(self) -> None:
        """Set the per-step state to its value after the forward pass, which a CUDA graph may have run."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' x; may work in place."""
        return x

    def all_reduce_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' x, [num_rows, size], within a forward pass; may work in place."""
        return self.all_reduce(x)

    def all_reduce_rms_norm(
        self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None, rounding: Rounding | None = None
    ) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
        """Return RMSNorm(sum of the ranks' x + residual), in e4m3 if rounded, and that sum; x may be overwritten."""
        if rounding is not None:
            return ops.quantize_rows(self.all_reduce(x), rounding, norm, residual)
        return ops.rms_norm(self.all_reduce(x), norm.weight, norm.eps, residual)

    def all_reduce_argmax(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return for each row the token id of the largest score on any rank, [num_rows] int64; ties: the lowest id.

        Args:
            scores: [num_rows] float32, without NaN.
            token_ids: [num_rows] int64, below 2**31.
        """
        return token_ids

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ranks' x, [num_rows, size] each, side by side: [num_rows, num_ranks * size]."""
        return x

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum of the ranks' values, on the host."""
        return value

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's x, contiguous; the other ranks' x has its shape and dtype, and is overwritten."""
        return x

    def interrupt(self) -> None:
        """End all pending collectives, with undefined results, because a rank has died; at once, from any thread."""

    def close(self) -> None:
        """Leave the process group; called by all ranks, after they have destroyed their CUDA graphs."""

    def release(self) -> None:
        """Free the communicator's device memory, once every other rank is closed or dead."""

    def abort(self) -> None:
        """Leave the process group after a rank has died; CUDA graphs with collectives must already be destroyed."""
