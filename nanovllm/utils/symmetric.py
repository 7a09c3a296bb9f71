"""Sums of activations over GPUs that map each other's memory: small ones by a kernel of ours, large ones by NCCL."""

from __future__ import annotations

from itertools import permutations

import torch
import torch.distributed as dist
from torch.distributed import Store, _symmetric_memory  # type: ignore[attr-defined]

from nanovllm.kernels.reduce_norm import Mailboxes, fits, reduce_norm
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.utils.communicator import DistributedCommunicator

_CAPACITY = 2**20
"""Words of one message, 4 bytes of activations each: 512 rows of 4096 in 16 bits."""
_CALLS_PER_STEP = 1023
"""Odd, as a step's calls are: two a layer and one. So a step's first call uses the other box than the last one did."""
_ONE_SHOT_BYTES = 2**18
"""Most bytes that a rank sends to all the others; of more it sends each its share."""
_CHOICE_KEY = "mailboxes"


class SymmetricCommunicator(DistributedCommunicator):
    """Over NCCL, but for sums with a norm behind them that fit into a mailbox.

    Args:
        rank, size, device, store: see the base class; all GPUs must reach each other.
    """

    # Torch numbers a process's exchanges of memory, and only fresh processes begin with the same number.
    used_in_this_process = False

    def __init__(self, rank: int, size: int, device: torch.device, store: Store) -> None:
        super().__init__(rank, size, device, store)
        SymmetricCommunicator.used_in_this_process = True
        shape = (2, size + 1, _CAPACITY)
        self._mailbox = _symmetric_memory.empty(shape, dtype=torch.int64, device=device)
        self._mailbox.zero_()
        self.device_bytes = self._mailbox.nbytes
        handle = _symmetric_memory.rendezvous(self._mailbox, dist.distributed_c10d._get_default_group())
        self._boxes = Mailboxes(
            rank=rank,
            num_ranks=size,
            capacity=_CAPACITY,
            addresses=torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device),
            step=torch.zeros(1, dtype=torch.int32, device=device),
            calls_per_step=_CALLS_PER_STEP,
            abort=torch.zeros(1, dtype=torch.int32, pin_memory=True),
        )
        self._call = 0
        torch.cuda.synchronize(device)
        # Nobody sends before every mailbox is empty.
        dist.barrier()

    def begin_step(self) -> None:
        """See the base class."""
        self._call = 0
        self._boxes.step.add_(1)

    def reduce_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class."""
        if not fits(x, self._boxes):
            return rms_norm(self.all_reduce(x), weight, eps, residual)
        two_shot = self.size > 2 and x.numel() * x.element_size() * (self.size - 1) > _ONE_SHOT_BYTES
        assert self._call < _CALLS_PER_STEP
        out = reduce_norm(x, weight, eps, residual, self._boxes, self._call, two_shot)
        self._call += 1
        return out

    def interrupt(self) -> None:
        """See the base class."""
        self._boxes.abort.fill_(1)
        super().interrupt()


def connect(rank: int, size: int, device: torch.device, store: Store) -> DistributedCommunicator:
    """Join the other ranks; all of them take what rank 0 chooses.

    It chooses mailboxes where all devices are GPUs that can map each other's memory, for the first such engine of its
    process; NCCL for later ones, and gloo on the CPU.
    """
    if rank == 0:
        first = device.index
        mailboxes = (
            device.type == "cuda"
            and not SymmetricCommunicator.used_in_this_process
            and all(torch.cuda.can_device_access_peer(a, b) for a, b in permutations(range(first, first + size), 2))
        )
        store.set(_CHOICE_KEY, str(mailboxes))
    if store.get(_CHOICE_KEY) == b"True":
        return SymmetricCommunicator(rank, size, device, store)
    return DistributedCommunicator(rank, size, device, store)
