"""One rank of `test_all_reduce_rms_norm.py`, in a process that imports no more than it needs."""

from __future__ import annotations

import ctypes
import time
from typing import Any, NamedTuple
from unittest import mock

import torch

from nanovllm.kernels import policy
from nanovllm.kernels.rms_norm import Norm
from nanovllm.parallel import symmetric_communicator as symmetric
from nanovllm.parallel.distributed_communicator import find_store
from nanovllm.parallel.symmetric_communicator import StepLimits, SymmetricCommunicator
from tests import quick_interpreter

NUM_RANKS = 2
SIZE = 64
ROW_BYTES = 2**17
CALLS = 5
"""Of a step."""
LIMITS = StepLimits(CALLS, max_candidates=4)


class Move(NamedTuple):
    """A step: the rows of each call, and whether it is the last one before the buffers are cleared."""

    rows: tuple[int, ...]
    is_last: bool = False


class HostMemory:
    """`PeerMemory` in memory that processes on the CPU share."""

    def __init__(self, memory: torch.Tensor, rank: int) -> None:
        self.addresses = [part.data_ptr() for part in memory]
        self._own = memory[rank]
        self._rank = rank
        self._num_copies = 0

    def synchronize(self) -> None:
        """Kernels have run when their launches return."""

    def clear(self) -> None:
        # Rank 0 sends before rank 1 has done this, unless it waits.
        time.sleep(0.3 * self._rank)
        self._own.zero_()

    def copy(self, source: int, destination: int, num_bytes: int) -> None:
        # Unless they wait, rank 1 reads before rank 0 has written, and later rank 0 writes before rank 1 has read.
        time.sleep(0.2 if self._rank else 0.6 * (not self._num_copies))
        self._num_copies += 1
        ctypes.memmove(destination, source, num_bytes)


def broadcast_tensor() -> torch.Tensor:
    """The tensor that rank 0 sends after a run: more than the rows hold at once, and not a multiple of that."""
    return torch.arange(5 * ROW_BYTES // 4 + 3, dtype=torch.int32)


def part_of(rank: int, step: int, call: int, num_rows: int) -> torch.Tensor:
    """A rank's part of a sum; whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(CALLS * step + call)
    return torch.randint(-99, 99, (NUM_RANKS, num_rows, SIZE), generator=generator).float()[rank]


def run_rank(rank: int, port: int, memory: torch.Tensor, moves: list[Move], file: str) -> None:
    """Be a rank, and write down all that it gets."""
    quick_interpreter.install()
    replaced: dict[str, Any] = {
        "PeerMemory": lambda *_: HostMemory(memory, rank),
        "_WORD_BYTES": 2**12,
        "_ROW_BYTES": ROW_BYTES,
    }
    with mock.patch.multiple(symmetric, **replaced):
        store: Any = find_store(port, NUM_RANKS)
        communicator = SymmetricCommunicator(rank, NUM_RANKS, torch.device("cpu"), store, LIMITS)
    assert communicator._buffer.num_bytes <= memory.shape[1]
    weight, results = torch.ones(SIZE), []
    for step, move in enumerate(moves):
        if move.is_last:
            communicator._num_steps = communicator._buffer.max_steps - 1
            communicator._buffer.step.fill_(communicator._num_steps)
        communicator.prepare_step()
        communicator.begin_step()
        for call, num_rows in enumerate(move.rows):
            # Rank 0 comes first, and finds what was there before.
            time.sleep(0.01 * rank)
            x = part_of(rank, step, call, num_rows)
            results.append(communicator.all_reduce_rms_norm(x, Norm(weight, 1e-6), None)[1])
        time.sleep(0.01 * rank)
        scores, tokens = torch.tensor([[1.0, 3.0], [2.0, 3.0]])[rank], torch.tensor([step + 10 * rank, step + rank])
        results.append(communicator.all_reduce_argmax(scores, tokens))
    communicator.prepare_step()
    communicator.begin_step()
    for one_shot_bytes in (2**19, 0):
        # Two numbers a row, one-shot and two-shot.
        with mock.patch.object(policy, "_ONE_SHOT_BYTES", one_shot_bytes):
            results.append(communicator.all_reduce_rows(part_of(rank, 0, 0, 8)[:, :2].contiguous()))
    sent = broadcast_tensor()
    results.append(communicator.broadcast(sent if rank == 0 else torch.zeros_like(sent)))
    torch.save(results, file)
