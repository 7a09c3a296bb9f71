"""The process of a front end: answers HTTP for engines in other processes, and ends with the server's first one."""

from __future__ import annotations

import faulthandler
import logging.config
import mmap
import os
import shutil
import socket
import sys
import threading
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from nanovllm.config import Config
from nanovllm.engine.request_seeds import RequestSeeds
from nanovllm.serve.logs import log_config
from nanovllm.serve.settings import ServeSettings
from nanovllm.utils.parent import end_with_parent

READY = "ready"
"""What a front end says once it answers."""
_CAUSE_SECONDS = 2.0
"""How long how an engine has ended may take to be known."""


@dataclass(frozen=True)
class FrontEndPlan:
    """The first message to a front end.

    Attributes:
        config, settings: the server's.
        folder: of the model.
        index, size: which front end it is, and how many there are.
        number: how many were started before it, those too that have ended.
        listener: descriptor of the socket to listen on.
        counts: descriptor of the memory of the `ServerCounts`.
        metrics_folder: of the counters of all front ends.
        created: when the server began, in seconds since 1970.
    """

    config: Config
    settings: ServeSettings
    folder: str
    index: int
    size: int
    number: int
    listener: int
    counts: int
    metrics_folder: str
    created: int


class EngineCauses:
    """How engines have ended, which the process that has started them says."""

    def __init__(self, control: Connection, engines: Iterable[int]) -> None:
        self._texts = dict.fromkeys(engines, "the engine's process has ended")
        self._known = {index: threading.Event() for index in self._texts}
        threading.Thread(target=self._read, args=(control,), name="nanovllm-control", daemon=True).start()

    def text(self, index: int) -> str:
        """Return how an engine has ended."""
        self._known[index].wait(_CAUSE_SECONDS)
        return self._texts[index]

    def _read(self, control: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                index, text = control.recv()
                if index in self._texts:
                    self._texts[index] = text
                    self._known[index].set()


def run_front_end(descriptor: int, parent: int) -> None:
    """Run a front end's process.

    Args:
        descriptor: of the socket to the process that has started it.
        parent: that process's id.
    """
    faulthandler.enable()
    control = Connection(descriptor)
    try:
        plan: FrontEndPlan = control.recv()
    except EOFError:
        return
    end_with_parent(parent, partial(shutil.rmtree, plan.metrics_folder, ignore_errors=True))
    # The engines say it.
    warnings.filterwarnings("ignore", "max_model_len=.* is capped")
    # Prometheus' client looks at it when it is imported.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = plan.metrics_folder
    logging.config.dictConfig(log_config(plan.settings.access_log, plan.settings.log_requests))
    sys.exit(_answer(plan, control))


def _answer(plan: FrontEndPlan, control: Connection) -> int:
    """Get ready while the engines load, then answer; returns the exit code."""
    # What imports torch and Prometheus' client.
    from nanovllm.client.loading import over_replicas, read_model_files  # noqa: PLC0415
    from nanovllm.client.replicated_engine import ReplicatedEngine  # noqa: PLC0415
    from nanovllm.llm import LLM  # noqa: PLC0415
    from nanovllm.serve.connection import raise_descriptor_limit  # noqa: PLC0415
    from nanovllm.serve.process import ServerPlace, run_server  # noqa: PLC0415
    from nanovllm.serve.server_counts import ServerCounts, memory_size  # noqa: PLC0415

    # What is wrong with the model the engines find as well.
    reading = ThreadPoolExecutor(1).submit(read_model_files, replace(plan.config, model=plan.folder))
    try:
        engines: list[int] = control.recv()
        connections = [Connection(recv_handle(control)) for _ in engines]
    except EOFError:
        # The engines could not be started, which the process that has started this one says.
        return 1
    causes = EngineCauses(control, engines)
    # Requests without a seed have other noise than those of any other front end.
    seeds = RequestSeeds(plan.config.seed, first=plan.number << 40)
    exit_texts = [partial(causes.text, index) for index in engines]
    engine = ReplicatedEngine(plan.config, connections, exit_texts, lambda: None)
    llm = LLM.over(plan.config, over_replicas(engine, reading.result(), seeds))
    memory = mmap.mmap(plan.counts, memory_size(plan.size))
    place = ServerPlace(
        socket.socket(fileno=plan.listener),
        ServerCounts(memory, plan.index),
        plan.metrics_folder,
        plan.created,
        on_ready=partial(control.send, READY),
    )
    return run_server(llm, plan.settings, raise_descriptor_limit(plan.settings.max_connections), place)
