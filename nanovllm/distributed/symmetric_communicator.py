"""All-reduce among GPUs that map each other's memory, by this library's kernels."""

from __future__ import annotations

from itertools import permutations

import torch
import torch.distributed as dist
from torch.distributed import Store, _symmetric_memory  # type: ignore[attr-defined]

from nanovllm.distributed.communicator import DistributedCommunicator
from nanovllm.kernels._triton import uses_triton
from nanovllm.kernels.collective.all_reduce_argmax import all_reduce_argmax
from nanovllm.kernels.collective.all_reduce_rms_norm import all_reduce_rms_norm, fits
from nanovllm.kernels.collective.symmetric_buffer import SymmetricBuffer

_WORD_BYTES = 2**19
_ROW_BYTES = 2**25
_MAX_ROWS = 4096
_CALLS_PER_STEP = 2**16 - 1
"""Odd, like the number of calls of a step (two per layer and one, each in an odd number of parts): see
`SymmetricBuffer.calls_per_step`."""
_ONE_SHOT_BYTES = 2**19
"""Up to this many bytes sent per rank, the all-reduce is one-shot; above, it is two-shot."""
_CHOICE_KEY = "mailboxes"


class SymmetricCommunicator(DistributedCommunicator):
    """Tensor collectives by kernels over a symmetric buffer; host collectives over gloo.

    Only these kernels wait for other ranks on the device, and all of them check the host's abort word.

    Args:
        rank, size, device, store: see the base class; every GPU must map every other's memory.
        max_candidates: maximum rows of one `all_reduce_argmax`.
    """

    # torch numbers the rendezvous of a process, and ranks agree on the number only in their first one.
    used_in_this_process = False

    def __init__(self, rank: int, size: int, device: torch.device, store: Store, max_candidates: int) -> None:
        super().__init__(rank, size, device, store, backend="gloo")
        SymmetricCommunicator.used_in_this_process = True
        boxes = SymmetricBuffer(
            rank=rank,
            num_ranks=size,
            word_bytes=_WORD_BYTES,
            row_bytes=_ROW_BYTES,
            max_rows=_MAX_ROWS,
            max_candidates=max_candidates,
            addresses=torch.zeros(size, dtype=torch.int64, device=device),
            step=torch.zeros(1, dtype=torch.int32, device=device),
            calls_per_step=_CALLS_PER_STEP,
            abort=torch.zeros(1, dtype=torch.int32, pin_memory=True),
        )
        self._mailbox = _symmetric_memory.empty(boxes.num_bytes, dtype=torch.uint8, device=device)
        self._mailbox.zero_()
        self.device_bytes = self._mailbox.nbytes
        handle = _symmetric_memory.rendezvous(self._mailbox, dist.distributed_c10d._get_default_group())
        boxes.addresses.copy_(torch.tensor(handle.buffer_ptrs, dtype=torch.int64))
        self._boxes = boxes
        self._call = 0
        torch.cuda.synchronize(device)
        # No rank may write before every rank has zeroed its buffer.
        dist.barrier()

    def begin_step(self) -> None:
        """See the base class."""
        self._call = 0
        self._boxes.step.add_(1)

    def all_reduce_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class."""
        num_bytes = x.numel() * x.element_size()
        one_shot = len(x) < self.size or num_bytes * (self.size - 1) <= _ONE_SHOT_BYTES
        # An odd number of parts keeps the number of calls per step odd.
        pieces = 1
        while not fits(x[: -(-len(x) // pieces)], self._boxes, one_shot):
            pieces += 2
            assert pieces <= len(x)
        out = torch.empty_like(x), torch.empty_like(x)
        residuals = [None] * pieces if residual is None else residual.tensor_split(pieces)
        parts = x.tensor_split(pieces), residuals, *(tensor.tensor_split(pieces) for tensor in out)
        for part, rest, normed, total in zip(*parts, strict=True):
            assert self._call < _CALLS_PER_STEP
            all_reduce_rms_norm(part, weight, eps, rest, self._boxes, self._call, one_shot, (normed, total))
            self._call += 1
        return out

    def all_reduce_argmax(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return all_reduce_argmax(scores, token_ids, self._boxes)

    def interrupt(self) -> None:
        """See the base class."""
        self._boxes.abort.fill_(1)


def connect(rank: int, size: int, device: torch.device, store: Store, max_candidates: int) -> DistributedCommunicator:
    """Join the other ranks with the communicator that rank 0 chooses for all.

    It is `SymmetricCommunicator` if all GPUs map each other's memory and this is the first such engine of rank 0's
    process; else NCCL on CUDA and gloo on the CPU. max_candidates: maximum rows of one `all_reduce_argmax`.
    """
    if rank == 0:
        first = device.index
        mailboxes = (
            uses_triton(device)
            and not SymmetricCommunicator.used_in_this_process
            and all(torch.cuda.can_device_access_peer(a, b) for a, b in permutations(range(first, first + size), 2))
        )
        store.set(_CHOICE_KEY, str(mailboxes))
    if store.get(_CHOICE_KEY) == b"True":
        return SymmetricCommunicator(rank, size, device, store, max_candidates)
    return DistributedCommunicator(rank, size, device, store)
