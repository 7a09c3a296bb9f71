"""The process of a rank other than 0.

It joins the other ranks, loads its shard, and runs every batch that the channel brings, until it is told to end. Over a
pipe of its own it tells rank 0 which stage of its start it has reached, and the exception that ends it. It never
outlives rank 0's process, and takes no notice of Ctrl-C.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from nanovllm.config import Config
from nanovllm.distributed.communicator import find_store
from nanovllm.distributed.symmetric_communicator import connect
from nanovllm.kernels.compilers import Compilers
from nanovllm.model_config import ModelConfig
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.utils.device import resolve_device
from nanovllm.workers.channel import Channel

STARTED, READY = "started", "ready"
"""Stages that a rank reports: it has its device and has met rank 0; it has model and cache."""
_MOST_CHARACTERS = 16000  # of a traceback: the pipe takes as much without anybody reading


@dataclass(frozen=True)
class WorkerPlan:
    """The first message to every rank; `port` is where they meet."""

    config: Config
    model_config: ModelConfig
    folder: str
    max_model_len: int
    port: int


class WorkerFailure(NamedTuple):
    """The exception that ended a rank, and when: the first is the cause of the others'."""

    seconds: float
    traceback: str


def run_worker(rank: int, size: int, parent: int, channel_descriptor: int, reports_descriptor: int) -> None:
    """Run a rank's process: join the group, load the shard, execute batches until told to end.

    Args:
        rank, size: this rank, and how many there are.
        parent: rank 0's process.
        channel_descriptor: of the channel's memory.
        reports_descriptor: of the pipe to rank 0.
    """
    reports = Connection(reports_descriptor, readable=False)
    # Before there are threads.
    compilers = Compilers()
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    try:
        _serve(rank, size, Channel(size - 1, descriptor=channel_descriptor), reports, compilers)
    except BaseException:
        # Where rank 0 is gone there is nobody to tell.
        with suppress(OSError):
            reports.send(WorkerFailure(time.monotonic(), traceback.format_exc()[-_MOST_CHARACTERS:]))
        # At once, whatever the device or another thread waits for: it also tells the ranks that wait for this one.
        os._exit(1)


def _serve(rank: int, size: int, channel: Channel, reports: Connection, compilers: Compilers) -> None:
    plan: WorkerPlan = channel.receive(rank - 1)
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    device = resolve_device(plan.config.device, rank, size)
    if device.type == "cuda":
        # Pinned memory, for one, would make a context on the first device.
        torch.cuda.set_device(device)
    store = find_store(plan.port, size)
    # From here on the others may wait for this rank, and not look at reports.
    reports.send(STARTED)
    communicator = connect(rank, size, device, store, 2 * plan.config.max_num_running)
    with compilers:
        runner = ModelRunner(
            plan.config,
            plan.model_config,
            plan.folder,
            max_model_len=plan.max_model_len,
            communicator=communicator,
            compilers=compilers,
        )
    reports.send(READY)
    decode_slots: list[int] = []
    # While it waits, it asks the device whether the last step has failed.
    while (message := channel.receive(rank - 1, runner.check)) is not None:
        again, batch = message
        if again:
            batch.decode_slots = decode_slots
        decode_slots = batch.decode_slots
        runner.run(batch)
    runner.exit()
    communicator.close()


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has, whatever the main thread is waiting for."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
