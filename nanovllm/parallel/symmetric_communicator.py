"""All-reduce among GPUs that map each other's memory, by this library's own kernels."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations

import torch
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn import functional
from typing_extensions import override

from nanovllm.kernels._triton import uses_triton
from nanovllm.kernels.all_reduce import SymmetricBuffer, all_reduce_argmax, all_reduce_rms_norm, whole_pairs
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding
from nanovllm.kernels.policy import FASTEST, KernelPolicy
from nanovllm.kernels.rms_norm import Norm
from nanovllm.parallel.distributed_communicator import DistributedCommunicator
from nanovllm.parallel.peer_memory import PeerMemory

_WORD_BYTES = 2**19
_ROW_BYTES = 2**25
_MAX_ROWS = 4096
_SUM_COLUMNS = 4096
_FORWARD_CALLS = 2**16
"""Above the calls of any pass: 400,000 prompt tokens in 80 layers of 8192 elements. Sampling has the same number.

Call numbers run out after 16,000 steps, which costs a millisecond.
"""
_CHOICE_KEY = "symmetric"


@dataclass(frozen=True)
class StepLimits:
    """The data that ranks exchange in one step.

    Attributes:
        num_reductions: all-reduces of a forward pass, or an even number more or less.
        max_candidates: most rows of `all_reduce_argmax`.
    """

    num_reductions: int
    max_candidates: int

    @property
    def forward_calls(self) -> int:
        """Indices for the sending kernels of a pass, with drafts; odd if and only if a pass makes an odd number."""
        return _FORWARD_CALLS + self.num_reductions % 2

    @property
    def calls_per_step(self) -> int:
        """Indices for the sending kernels of a step, odd if and only if `forward_calls` is."""
        return 2 * _FORWARD_CALLS + self.num_reductions % 2


def num_parts(num_rows: int, row_bytes: int, num_ranks: int, one_shot: bool) -> int:
    """Return the number of calls for an all-reduce: the smallest odd number with which each call fits.

    A step's bound then has the parity of its number of calls, so that consecutive ones use different halves of the
    buffer. Drafts may take any number: their step ends with an argmax, after all ranks have read all sums.
    """
    max_rows = (
        _WORD_BYTES // whole_pairs(row_bytes) if one_shot else min(_MAX_ROWS, _ROW_BYTES // row_bytes - num_ranks)
    )
    assert max_rows > 0
    return -(-num_rows // max_rows) | 1


def make_buffer(rank: int, size: int, device: torch.device, limits: StepLimits) -> SymmetricBuffer:
    """Return a rank's view of the symmetric buffers; the caller fills in `addresses`."""
    return SymmetricBuffer(
        rank=rank,
        num_ranks=size,
        word_bytes=_WORD_BYTES,
        row_bytes=_ROW_BYTES,
        max_rows=_MAX_ROWS,
        max_candidates=limits.max_candidates,
        addresses=torch.zeros(size, dtype=torch.int64, device=device),
        step=torch.zeros(1, dtype=torch.int32, device=device),
        calls_per_step=limits.calls_per_step,
        abort=torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda"),
    )


class SymmetricCommunicator(DistributedCommunicator):
    """Tensor collectives by kernels over a symmetric buffer; host collectives over gloo.

    Only these kernels wait for other ranks on the device, and all of them check the host's abort word. Every GPU must
    map every other's memory; limits: of every step.
    """

    policy: KernelPolicy = FASTEST

    def __init__(self, rank: int, size: int, device: torch.device, store: Store, limits: StepLimits) -> None:
        super().__init__(rank, size, device, store, uses_nccl=False)
        self._forward_calls = limits.forward_calls
        self._buffer = buffer = make_buffer(rank, size, device, limits)
        self.device_bytes = buffer.num_bytes
        self._memory = PeerMemory(buffer.num_bytes, rank, size, device, store)
        buffer.addresses.copy_(torch.tensor(self._memory.addresses, dtype=torch.int64))
        # Index of the next call, the end of this pass's range of indices, and the index of the next argmax.
        self._call = self._end_call = self._choice = 0
        # The host's copy of `buffer.step`, which graphs increase.
        self._num_steps = 0

    @override
    def prepare_step(self) -> None:
        """Restart call numbers when they run out; all ranks do so together, since each counts the same steps."""
        if self._num_steps == self._buffer.max_steps:
            self._restart_call_numbers()
        self._num_steps += 1

    def _restart_call_numbers(self) -> None:
        # Every call receives everything sent to this rank before it ends.
        self._memory.synchronize()
        self._memory.clear()
        self._buffer.step.zero_()
        # No rank sends before the last rank has cleared its buffer.
        self.all_reduce_min(0)
        self._num_steps = 0

    @override
    def begin_step(self) -> None:
        self._call, self._end_call, self._choice = 0, self._forward_calls, 0
        self._buffer.step.add_(1)

    @override
    def begin_sampling(self) -> None:
        # An index with the parity of the forward pass's number of calls, unlike the last call's index.
        self._call, self._end_call, self._choice = self._forward_calls, self._buffer.calls_per_step, 0

    @override
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum tensors after a forward pass."""
        # Two halves in an odd number of calls each keep the parity of the number of calls per step.
        padding = -x.numel() % (2 * _SUM_COLUMNS)
        rows = functional.pad(x.flatten(), (0, padding)).view(-1, _SUM_COLUMNS)
        return torch.cat([self.all_reduce_rows(half) for half in rows.chunk(2)]).flatten()[: x.numel()].view_as(x)

    @override
    def all_reduce_rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_reduce_rms_norm(x, Norm(x.new_ones(x.shape[1]), 1.0), None)[1]

    @override
    def all_reduce_rms_norm(
        self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None, rounding: Rounding | None = None
    ) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
        """Take several calls if x is large."""
        normed: torch.Tensor | Fp8Rows = torch.empty_like(x)
        if rounding is not None:
            normed = rounding.empty_rows(len(x), x.shape[1], x.dtype, x.device)
        total = torch.empty_like(x)
        num_bytes = x.numel() * x.element_size()
        one_shot = self.policy.all_reduces_at_once(len(x), num_bytes, self.size)
        count = num_parts(len(x), num_bytes // len(x), self.size, one_shot)
        assert count <= len(x)
        start = 0
        for sums in total.tensor_split(count):
            assert self._call < self._end_call
            part = slice(start, start := start + len(sums))
            rest = None if residual is None else residual[part]
            out = normed.part(part) if isinstance(normed, Fp8Rows) else normed[part], sums
            all_reduce_rms_norm(x[part], norm, rest, self._buffer, self._call, one_shot, out)
            self._call += 1
        return normed, total

    @override
    def all_reduce_argmax(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        self._choice += 1
        return all_reduce_argmax(scores, token_ids, self._buffer, self._choice - 1)

    @override
    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Copy through rank 0's rows, which no step uses meanwhile; the host waits."""
        x = x.contiguous()
        rows = self._memory.addresses[0] + self._buffer.rows_offset
        most_bytes = self._buffer.signals_offset - self._buffer.rows_offset
        for start in range(0, x.nbytes, most_bytes):
            part, num_bytes = x.data_ptr() + start, min(most_bytes, x.nbytes - start)
            if self.rank == 0:
                self._memory.copy(part, rows, num_bytes)
            # The data is ready to be read.
            self.all_reduce_min(0)
            if self.rank:
                self._memory.copy(rows, part, num_bytes)
            # All ranks have read it.
            self.all_reduce_min(0)
        return x

    @override
    def interrupt(self) -> None:
        self._buffer.abort.fill_(1)
        super().interrupt()

    @override
    def close(self) -> None:
        self._memory.unmap()

    @override
    def release(self) -> None:
        self._memory.free()

    @override
    def abort(self) -> None:
        self.interrupt()
        # A lost device has lost its memory too, and fails every call.
        with suppress(RuntimeError):
            self._memory.unmap()
            self._memory.free()


def connect(
    rank: int, size: int, device: torch.device, store: Store, limits: StepLimits | None
) -> DistributedCommunicator:
    """Join the other ranks with the communicator that rank 0 chooses for all.

    It is `SymmetricCommunicator` if all GPUs map each other's memory, else NCCL on CUDA and gloo on the CPU.
    limits: of every step; None for unlimited steps, which use NCCL or gloo.
    """
    if limits is None:
        return DistributedCommunicator(rank, size, device, store)
    if rank == 0:
        first = device.index
        symmetric = uses_triton(device) and all(
            torch.cuda.can_device_access_peer(a, b) for a, b in permutations(range(first, first + size), 2)
        )
        store.set(_CHOICE_KEY, str(symmetric))
    if store.get(_CHOICE_KEY) == b"True":
        return SymmetricCommunicator(rank, size, device, store, limits)
    return DistributedCommunicator(rank, size, device, store)
