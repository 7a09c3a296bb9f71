"""Time of the all-reduce with residual and norm behind it, by the mailboxes and by NCCL, on all GPUs of the machine.

Run with `python -m tests.reduce_norm_times [SIZE]`. Not a test: nothing is asserted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing import get_context

import torch

from nanovllm.kernels.reduce_norm import reduce_norm
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.utils.communicator import find_store, open_store
from nanovllm.utils.symmetric import SymmetricCommunicator, connect
from tests.compile_vs_kernels import graph_microseconds

HIDDEN, CALLS = 4096, 20
ROWS = (1, 8, 32, 64, 128, 256, 512)


def microseconds(step: Callable[[], None]) -> float:
    """Least time of one of the CALLS calls of a step."""
    for _ in range(3):
        step()
    return graph_microseconds(step) / CALLS


def run(rank: int, size: int, port: int) -> None:
    """Measure as one of the ranks; rank 0 prints."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = open_store(size) if rank == 0 else find_store(port, size)
    if rank == 0:
        context = get_context("spawn")
        others = [context.Process(target=run, args=(other, size, store.port)) for other in range(1, size)]
        for other in others:
            other.start()
    communicator = connect(rank, size, device, store)
    assert isinstance(communicator, SymmetricCommunicator)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    with torch.inference_mode():
        for rows in ROWS:
            x, residual = (torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(2))

            def mailboxes(two_shot: bool, x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
                communicator.begin_step()
                for call in range(CALLS):
                    reduce_norm(x, weight, 1e-6, residual, communicator._boxes, call, two_shot)

            def nccl(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
                for _ in range(CALLS):
                    rms_norm(communicator.all_reduce(x), weight, 1e-6, residual)

            one, two, theirs = (microseconds(f) for f in (lambda: mailboxes(False), lambda: mailboxes(True), nccl))
            if rank == 0:
                print(f"{size} GPUs {rows:4d} rows: one-shot {one:6.1f}, two-shot {two:6.1f}, NCCL {theirs:6.1f} us")
    communicator.close()


if __name__ == "__main__":
    run(0, int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count(), 0)
