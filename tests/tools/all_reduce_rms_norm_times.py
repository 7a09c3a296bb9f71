"""Time of the all-reduce with residual and norm after it, us a call: in one shot, in two, and by NCCL.

Run with `python -m tests.tools.all_reduce_rms_norm_times [SIZE]`. Not a test: nothing is asserted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from nanovllm.kernels.collective.all_reduce_rms_norm import all_reduce_rms_norm, fits
from nanovllm.kernels.rms_norm import Norm, rms_norm
from nanovllm.parallel.communicator import DistributedCommunicator, find_store, open_store
from nanovllm.parallel.symmetric_communicator import StepLimits, SymmetricCommunicator, connect
from tests.tools.decode_bandwidth import graph_microseconds

HIDDEN, CALLS = 4096, 21
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4000)


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
    limits = StepLimits(CALLS, ROWS[-1], HIDDEN, max_candidates=1024, num_gathers=0, max_gathered_rows=0, vocab_size=0)
    communicator = connect(rank, size, device, store, limits)
    assert isinstance(communicator, SymmetricCommunicator)
    buffer = communicator._buffer
    nccl = DistributedCommunicator(rank, size, device, PrefixStore("nccl", store))
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    with torch.inference_mode():
        for rows in ROWS:
            x, residual = (torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(2))

            def ours(one_shot: bool, x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
                communicator.begin_step()
                for call in range(CALLS):
                    out = torch.empty_like(x), torch.empty_like(x)
                    all_reduce_rms_norm(x, Norm(weight, 1e-6), residual, buffer, call, one_shot, out)

            def theirs(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
                for _ in range(CALLS):
                    nccl.all_reduce(x)
                    rms_norm(x, weight, 1e-6, residual)

            times = []
            for one_shot in (True, False):
                possible = fits(x, buffer, one_shot) and (one_shot or rows >= size)
                times.append(f"{microseconds(partial(ours, one_shot)):8.1f}" if possible else f"{'-':>8}")
            times.append(f"{microseconds(theirs):8.1f}")
            if rank == 0:
                print(f"{size} GPUs {rows:4d} rows", *times, flush=True)
    nccl.close()
    communicator.close()


if __name__ == "__main__":
    run(0, int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count(), 0)
