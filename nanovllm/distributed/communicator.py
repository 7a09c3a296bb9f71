"""Collectives among the ranks of one engine: all-reduce of activations and of sampled tokens."""

from __future__ import annotations

from datetime import timedelta
from threading import Lock, Thread

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from nanovllm.kernels.collective.all_reduce_argmax import pack_candidates, unpack_tokens
from nanovllm.kernels.rms_norm import rms_norm

_TIMEOUT = timedelta(minutes=5)
"""Limit for joining the process group. A rank that dies later is detected by watching its process."""
_ABORT_SECONDS = 5.0


class Communicator:
    """The collectives of one rank; this base class is for a single rank. All ranks make the same calls in one order.

    Attributes:
        rank: 0 ... size - 1.
        size: number of ranks.
        device_bytes: device memory that the communicator allocates, in bytes.
    """

    rank = 0
    size = 1
    device_bytes = 0

    def begin_step(self) -> None:
        """Reset the per-step state; called at the start of each forward pass."""

    def _all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' x; may work in place."""
        return x

    def all_reduce_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return RMSNorm(sum of the ranks' x + residual), and that sum; x may be overwritten."""
        return rms_norm(self._all_reduce(x), weight, eps, residual)

    def all_reduce_argmax(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return for each row the token id of the largest score on any rank, [num_rows] int64; ties: the lowest id.

        Args:
            scores: [num_rows] float32, none NaN.
            token_ids: [num_rows] int64, below 2**31.
        """
        return token_ids

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum of the ranks' values, on the host."""
        return value

    def interrupt(self) -> None:
        """Make all pending collectives end, with undefined results, because a rank has died.

        Returns at once, and is thread-safe.
        """

    def close(self) -> None:
        """Leave the process group; all ranks call it."""

    def abort(self) -> None:
        """Leave the process group after a rank has died; CUDA graphs with collectives must be destroyed before."""


class DistributedCommunicator(Communicator):
    """Collectives over torch.distributed's default process group: NCCL on CUDA, gloo on the CPU.

    Collectives on tensors do not synchronise with the host, so CUDA graphs can capture them.

    Args:
        rank, size: this process's rank, and the number of ranks.
        device: device of the tensors.
        store: the store through which the ranks join the group.
        backend: overrides the device's default, for subclasses with their own collectives on tensors.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Store, backend: str | None = None) -> None:
        self.rank = rank
        self.size = size
        self._uses_nccl = device.type == "cuda" and backend is None
        self._group_device = device if self._uses_nccl else torch.device("cpu")
        self._abort_lock = Lock()
        self._aborting: Thread | None = None
        dist.init_process_group(
            backend or ("nccl" if self._uses_nccl else "gloo"),
            store=store,
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
            device_id=device if self._uses_nccl else None,
        )

    def _all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    def all_reduce_argmax(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        keys = pack_candidates(scores, token_ids)
        dist.all_reduce(keys, dist.ReduceOp.MAX)
        return unpack_tokens(keys)

    def all_reduce_min(self, value: int) -> int:
        """See the base class."""
        tensor = torch.tensor(value, device=self._group_device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor)

    def close(self) -> None:
        """See the base class."""
        if self._aborting is not None:
            self.abort()
        else:
            dist.destroy_process_group()

    def interrupt(self) -> None:
        """See the base class."""
        # gloo needs nothing: its waits end when the dead rank's connections close.
        with self._abort_lock:
            if self._uses_nccl and self._aborting is None and dist.is_initialized():
                # In a thread, because NCCL's abort does not return before all graphs with its calls are destroyed.
                group = dist.distributed_c10d._get_default_group()
                self._aborting = Thread(target=group.abort, daemon=True)
                self._aborting.start()

    def abort(self) -> None:
        """See the base class."""
        self.interrupt()
        if self._aborting is not None:
            self._aborting.join(_ABORT_SECONDS)
            if not self._aborting.is_alive():
                dist.distributed_c10d._abort_process_group()
        elif dist.is_initialized():
            dist.destroy_process_group()


def open_store(size: int) -> TCPStore:
    """Start the store of `size` ranks in this process, which is rank 0's, on a port that the system chooses."""
    return TCPStore("127.0.0.1", 0, size, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)


def find_store(port: int, size: int) -> TCPStore:
    """Connect to the store that rank 0 started."""
    return TCPStore("127.0.0.1", port, size, is_master=False, timeout=_TIMEOUT)
