"""All-reduce among GPUs that map each other's memory, by this library's kernels."""

from __future__ import annotations

from contextlib import suppress
from itertools import permutations

import torch
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn import functional

from nanovllm.distributed.communicator import DistributedCommunicator
from nanovllm.distributed.peer_memory import PeerMemory
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
_FIRST_SAMPLING_CALL = 2**15 + 1
"""Index of the first call behind a forward pass, whose last call has an even index below it."""
_SUM_COLUMNS = 4096
_ONE_SHOT_BYTES = 2**19
"""Up to this many bytes sent per rank, the all-reduce is one-shot; above, it is two-shot."""
_CHOICE_KEY = "symmetric"


class SymmetricCommunicator(DistributedCommunicator):
    """Tensor collectives by kernels over a symmetric buffer; host collectives over gloo.

    Only these kernels wait for other ranks on the device, and all of them check the host's abort word.

    Args:
        rank, size, device, store: see the base class; every GPU must map every other's memory.
        max_candidates: maximum rows of one `all_reduce_argmax`.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Store, max_candidates: int) -> None:
        super().__init__(rank, size, device, store, uses_nccl=False)
        self._buffer = buffer = SymmetricBuffer(
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
        self.device_bytes = buffer.num_bytes
        self._memory = PeerMemory(buffer.num_bytes, rank, size, device, store)
        buffer.addresses.copy_(torch.tensor(self._memory.addresses, dtype=torch.int64))
        self._call = 0

    def begin_step(self) -> None:
        """See the base class."""
        self._call = 0
        self._buffer.step.add_(1)

    def begin_sampling(self) -> None:
        """See the base class."""
        self._call = _FIRST_SAMPLING_CALL

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        # Two halves in an odd number of calls each, so that the number of calls per step stays odd.
        padding = -x.numel() % (2 * _SUM_COLUMNS)
        rows = functional.pad(x.flatten(), (0, padding)).view(-1, _SUM_COLUMNS)
        weight = torch.ones(_SUM_COLUMNS, dtype=x.dtype, device=x.device)
        sums = [self.all_reduce_rms_norm(half, weight, 1e-6, None)[1] for half in rows.chunk(2)]
        return torch.cat(sums).flatten()[: x.numel()].view_as(x)

    def all_reduce_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class."""
        num_bytes = x.numel() * x.element_size()
        one_shot = len(x) < self.size or num_bytes * (self.size - 1) <= _ONE_SHOT_BYTES
        # An odd number of parts keeps the number of calls per step odd.
        num_parts = 1
        while not fits(x[: -(-len(x) // num_parts)], self._buffer, one_shot):
            num_parts += 2
            assert num_parts <= len(x)
        out = torch.empty_like(x), torch.empty_like(x)
        residuals = [None] * num_parts if residual is None else residual.tensor_split(num_parts)
        parts = x.tensor_split(num_parts), residuals, *(tensor.tensor_split(num_parts) for tensor in out)
        for part, rest, normed, total in zip(*parts, strict=True):
            assert self._call < _CALLS_PER_STEP
            all_reduce_rms_norm(part, weight, eps, rest, self._buffer, self._call, one_shot, (normed, total))
            self._call += 1
        return out

    def all_reduce_argmax(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        return all_reduce_argmax(scores, token_ids, self._buffer)

    def interrupt(self) -> None:
        """See the base class."""
        self._buffer.abort.fill_(1)
        super().interrupt()

    def close(self) -> None:
        """See the base class."""
        self._memory.unmap()

    def release(self) -> None:
        """See the base class."""
        self._memory.free()

    def abort(self) -> None:
        """See the base class."""
        self.interrupt()
        # A device that is lost has lost its memory too, and refuses every call.
        with suppress(RuntimeError):
            self._memory.unmap()
            self._memory.free()


def connect(rank: int, size: int, device: torch.device, store: Store, max_candidates: int) -> DistributedCommunicator:
    """Join the other ranks with the communicator that rank 0 chooses for all.

    It is `SymmetricCommunicator` if all GPUs map each other's memory, else NCCL on CUDA and gloo on the CPU.
    max_candidates: maximum rows of one `all_reduce_argmax`.
    """
    if rank == 0:
        first = device.index
        symmetric = uses_triton(device) and all(
            torch.cuda.can_device_access_peer(a, b) for a, b in permutations(range(first, first + size), 2)
        )
        store.set(_CHOICE_KEY, str(symmetric))
    if store.get(_CHOICE_KEY) == b"True":
        return SymmetricCommunicator(rank, size, device, store, max_candidates)
    return DistributedCommunicator(rank, size, device, store)
