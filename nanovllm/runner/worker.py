"""The process of a rank other than 0.

It joins the group, loads its shard, and executes orders from the channel until shutdown. Over a pipe it replies to rank
0: once it has started, once it is ready, to each call, and with the exception that ends it. It ends with rank 0's
process, and ignores Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.configs.model import ModelConfig
from nanovllm.parallel.channel import Receiver
from nanovllm.parallel.distributed_communicator import find_store
from nanovllm.parallel.symmetric_communicator import StepLimits, connect
from nanovllm.runner.cuda_graph import max_draft_rows
from nanovllm.runner.messages import NO_ROWS, ScheduledBatch
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.utils.device import resolve_device
from nanovllm.utils.processes import end_with_parent

_MOST_CHARACTERS = 16000
"""Of a traceback; a pipe buffers this much without a reader."""


@dataclass(frozen=True)
class WorkerPlan:
    """The first message to every rank; `port` is the port of rank 0's store."""

    config: Config
    model_config: ModelConfig
    folder: str
    max_model_len: int
    port: int


class WorkerFailure(NamedTuple):
    """The exception that ended a rank, and its time on the monotonic clock: the earliest caused the others."""

    seconds: float
    traceback: str


@dataclass(frozen=True)
class StepOrder:
    """Run a batch, with the previous step's `rows` if `same_rows`. There is no reply: a failed step ends the rank."""

    batch: ScheduledBatch
    same_rows: bool


@dataclass(frozen=True)
class CallOrder:
    """Call a function with the rank's `ModelRunner` and other arguments, and reply with its result."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Reply:
    """The result of a call, or the traceback of the exception that it raised; empty when the rank starts."""

    result: Any = None
    traceback: str | None = None


def run_worker(rank: int, size: int, parent: int, channel_descriptor: int, reports_descriptor: int) -> None:
    """Run a rank's process; `parent` is rank 0's process id, the descriptors are of the channel's end and the pipe."""
    reports = Connection(reports_descriptor, readable=False)
    end_with_parent(parent)
    try:
        _serve(rank, size, Receiver(channel_descriptor), reports)
    except BaseException:
        # The pipe is broken if rank 0 has died.
        with suppress(OSError):
            reports.send(WorkerFailure(time.monotonic(), traceback.format_exc()[-_MOST_CHARACTERS:]))
        # Without clean-up, which could wait for the device or a thread; ranks that wait for this one notice its exit.
        os._exit(1)
    # Skips the interpreter's teardown, a third of a second during which rank 0 would wait.
    sys.stdout.flush()
    os._exit(0)


def _serve(rank: int, size: int, channel: Receiver, reports: Connection) -> None:
    plan: WorkerPlan = channel.receive()
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    device = resolve_device(plan.config.device, rank, size)
    if device.type == "cuda":
        # Otherwise pinned memory, for example, would create a context on the first device.
        torch.cuda.set_device(device)
    store = find_store(plan.port, size)
    # Before `connect`, because rank 0 does not read reports while it connects.
    reports.send(Reply())
    communicator = connect(rank, size, device, store, step_limits(plan.config, plan.model_config))
    runner = ModelRunner(
        plan.config, plan.model_config, plan.folder, max_model_len=plan.max_model_len, communicator=communicator
    )
    reports.send(Reply())
    rows = NO_ROWS
    # `runner.check` raises while the channel waits if the last step failed on the device.
    while (order := channel.receive(runner.check)) is not None:
        if isinstance(order, CallOrder):
            try:
                reply = Reply(order.function(runner, *order.args))
            except Exception:
                reply = Reply(traceback=traceback.format_exc()[-_MOST_CHARACTERS:])
            reports.send(reply)
            continue
        batch: ScheduledBatch = order.batch
        if order.same_rows:
            batch.rows = rows
        rows = batch.rows
        step = runner.forward(batch)
        masks = channel.receive(runner.check) if batch.masked else None
        if batch.masked and not isinstance(masks, np.ndarray):
            raise RuntimeError("rank 0 has not made the masks of a step")
        runner.sample(step, masks)
    runner.exit()
    communicator.close()


def step_limits(config: Config, model_config: ModelConfig) -> StepLimits | None:
    """Return what ranks exchange in a step; None for a model whose collectives are not counted."""
    if model_config.hf is not None:
        return None
    # After attention, after the MLP, and for norms that span the ranks' heads; plus the embedding. In pairs: for hidden
    # states that are asked for, and for a drafting head before its first draft.
    per_layer = 3 if model_config.architecture.qk_norm == "projections" else 2
    return StepLimits(
        num_reductions=per_layer * model_config.num_layers + 1,
        max_candidates=2 * config.max_num_running + max_draft_rows(config) * config.num_drafts,
    )
