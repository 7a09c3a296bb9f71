"""What the ranks of one engine say to each other on their devices: sums of activations, and which token was drawn."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from nanovllm.kernels.rms_norm import rms_norm

_TIMEOUT = timedelta(minutes=5)
"""For ranks that stand still, or die while they meet; a later death is noticed by whoever watches their processes."""
_TOKEN_MASK = 2**31 - 1


class Communicator:
    """The collectives of one rank: this one is alone and has nothing to say. All ranks call the same in the same order.

    Attributes:
        rank: 0 ... size - 1.
        size: number of ranks.
        device_bytes: memory that it holds on the device.
    """

    rank = 0
    size = 1
    device_bytes = 0

    def begin_step(self) -> None:
        """A forward pass begins."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' x; may work in place."""
        return x

    def reduce_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised `sum of the ranks' x + residual`, and that sum; x may be overwritten."""
        return rms_norm(self.all_reduce(x), weight, eps, residual)

    def agree(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return for each row the token of the largest score of any rank, [num_rows] int64; ties take the lowest id.

        Args:
            scores: [num_rows] float32, none NaN.
            token_ids: [num_rows] int64, below 2**31.
        """
        return token_ids

    def least(self, value: int) -> int:
        """Return the least of the ranks' values, on the host."""
        return value

    def interrupt(self) -> None:
        """Some rank is gone, and what waits for it must not wait on: nothing comes of it but an end. Thread-safe."""

    def close(self) -> None:
        """Leave the others in good order."""

    def abort(self) -> None:
        """Leave without them: some rank is gone."""


class DistributedCommunicator(Communicator):
    """Over torch.distributed's default process group: NCCL on CUDA, gloo on the CPU.

    The collectives on tensors do not synchronise with the host, so a CUDA graph can hold them.

    Args:
        rank, size: this process's, in the group.
        device: of the tensors.
        store: where the ranks meet.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Store) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.is_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if self.is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
            device_id=device if self.is_cuda else None,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See the base class; works in place."""
        dist.all_reduce(x)
        return x

    def agree(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        keys = pack_candidates(scores, token_ids)
        dist.all_reduce(keys, dist.ReduceOp.MAX)
        return unpack_tokens(keys)

    def least(self, value: int) -> int:
        """See the base class."""
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor)

    def close(self) -> None:
        """See the base class."""
        dist.destroy_process_group()

    def interrupt(self) -> None:
        """See the base class."""
        # Over gloo, connections that closed end all waiting.
        if self.is_cuda and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def abort(self) -> None:
        """See the base class."""
        self.interrupt()
        if dist.is_initialized():
            dist.destroy_process_group()


def open_store(size: int) -> TCPStore:
    """The meeting place of `size` ranks, in rank 0's process, on a port that the system chooses."""
    return TCPStore("127.0.0.1", 0, size, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)


def find_store(port: int, size: int) -> TCPStore:
    """The meeting place that rank 0 opened."""
    return TCPStore("127.0.0.1", port, size, is_master=False, timeout=_TIMEOUT)


def pack_candidates(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Make one int64 of a score and its token, ordered by score, then by falling token id, so that a maximum decides.

    A float's bits, read as an integer, are in the order of the floats where the sign is clear, and in the opposite
    order where it is set.
    """
    # Zeros of either sign are equal as scores; this leaves one of them.
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _TOKEN_MASK, bits)
    return (ordered.long() << 32) | (_TOKEN_MASK - token_ids)


def unpack_tokens(keys: torch.Tensor) -> torch.Tensor:
    """The token ids that `pack_candidates` put into keys."""
    return _TOKEN_MASK - (keys & _TOKEN_MASK)
