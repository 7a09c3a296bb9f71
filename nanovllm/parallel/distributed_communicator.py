"""Collectives of several ranks by torch's process groups, and the store through which they find each other."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp, Store, TCPStore  # type: ignore[attr-defined]
from typing_extensions import override

from nanovllm.parallel.communicator import Communicator

_TIMEOUT = timedelta(minutes=5)
"""Limit for joining the group and for host collectives. A rank that dies is detected by watching its process."""
_ABORT_SECONDS = 5.0
_POLL_TIME = timedelta(seconds=0.1)


class DistributedCommunicator(Communicator):
    """Collectives over the engine's own process group: NCCL on CUDA, gloo on the CPU.

    torch's default process group is neither used nor created. Collectives on tensors do not synchronise with the host,
    so CUDA graphs can capture them. uses_nccl: on CUDA; a subclass with its own collectives only needs gloo.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, store: Store, *, uses_nccl: bool | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._uses_nccl = device.type == "cuda" if uses_nccl is None else uses_nccl
        self._group_device = device if self._uses_nccl else torch.device("cpu")
        self._abort_lock = Lock()
        self._aborting: Thread | None = None
        self._interrupted = Event()
        self._group = _join_nccl(rank, size, device, store) if self._uses_nccl else _join_gloo(rank, size, store)

    def _reduce_in_place(self, tensor: torch.Tensor, op: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        options.asyncOp = False
        self._wait(self._group.allreduce([tensor], options))

    def _wait(self, work: dist.Work | None) -> None:
        """Wait for a collective; RuntimeError if it failed, or `interrupt` was called."""
        if self._uses_nccl:
            # NCCL's collectives run on the current stream, so there is nothing to wait for.
            if work is not None:
                work.wait()
            return
        assert work is not None
        while not work.is_completed():
            # Raised on timeout, and by a failed collective, whose error the last line raises.
            with suppress(RuntimeError):
                work.wait(_POLL_TIME)
            if self._interrupted.is_set() and not work.is_completed():
                # The group's destructor waits for its collectives, so it runs in a thread.
                Thread(target=_outlast, args=(work, self._group), daemon=True).start()
                raise RuntimeError("a collective was interrupted because a rank has died")
        work.wait()

    @override
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._reduce_in_place(x, ReduceOp.SUM)
        return x

    @override
    def all_reduce_argmax(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        from nanovllm.kernels.all_reduce import pack_candidates, unpack_tokens  # noqa: PLC0415

        keys = pack_candidates(scores, token_ids)
        self._reduce_in_place(keys, ReduceOp.MAX)
        return unpack_tokens(keys)

    @override
    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(len(x), self.size, x.shape[1])
        out[:, self.rank] = x
        return self.all_reduce(out).flatten(1)

    @override
    def all_reduce_min(self, value: int) -> int:
        tensor = torch.tensor(value, device=self._group_device)
        self._reduce_in_place(tensor, ReduceOp.MIN)
        return int(tensor)

    @override
    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Send through the host without NCCL."""
        x = x.contiguous()
        # Bytes, since gloo does not support every dtype.
        flat = x.view(-1).view(torch.uint8)
        sent = flat.to(self._group_device)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = False
        self._wait(self._group.broadcast([sent], options))
        if sent is not flat and self.rank:
            flat.copy_(sent)
        return x

    @override
    def close(self) -> None:
        if self._aborting is not None:
            self.abort()
        elif self._uses_nccl:
            self._group.shutdown()

    @override
    def interrupt(self) -> None:
        # gloo's own wait for a dead rank can last as long as `_TIMEOUT`: if a write to its closed connection fails,
        # nothing wakes the thread that waits for the write (torch 2.13, in one of a hundred deaths among three ranks).
        self._interrupted.set()
        with self._abort_lock:
            if self._uses_nccl and self._aborting is None:
                # In a thread, because NCCL's abort does not return before all graphs with its calls are destroyed.
                self._aborting = Thread(target=self._group.abort, daemon=True)
                self._aborting.start()

    @override
    def abort(self) -> None:
        self.interrupt()
        if self._aborting is not None:
            self._aborting.join(_ABORT_SECONDS)


def _outlast(work: dist.Work, group: Any) -> None:
    """Keep a group until its collective is finished."""
    with suppress(RuntimeError):
        work.wait()


def _join_nccl(rank: int, size: int, device: torch.device, store: Store) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    # Connect now, so that a failure is raised at the start of the engine, and outside any CUDA graph.
    group.eager_connect_single_device(device)
    return group


def _join_gloo(rank: int, size: int, store: Store) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _TIMEOUT
    # All ranks are on this host, whose name need not resolve.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)


def open_store(size: int) -> TCPStore:
    """Start the store of `size` ranks in this process (rank 0), on a port that the system chooses."""
    return TCPStore("127.0.0.1", 0, size, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)


def find_store(port: int, size: int) -> TCPStore:
    """Connect to the store that rank 0 started."""
    return TCPStore("127.0.0.1", port, size, is_master=False, timeout=_TIMEOUT)
