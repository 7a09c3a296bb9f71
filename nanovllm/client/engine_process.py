"""Starts an engine's process, and connects front ends to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from typing_extensions import override

from nanovllm.client.messages import CONNECT, SHUTDOWN
from nanovllm.config import Config
from nanovllm.utils.host import check_swap_space, num_gpus
from nanovllm.utils.interrupt import deferred_signals
from nanovllm.utils.processes import PythonProcess, describe_exit, start_python

_EXIT_SECONDS = 10.0
_GRACE_SECONDS = 2.0
"""Time until the exit of a process becomes visible after its connections have closed."""


class EngineProcess(PythonProcess):
    """The process of replica `index` of `size`. The constructor starts it; it then waits for a plan."""

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.name = "the engine's process" if size == 1 else f"replica {index} of {size}"
        self._control, other = Pipe()
        with other:
            arguments, title = (other.fileno(), os.getpid()), f"nanovllm engine {index}"
            process = start_python("nanovllm.client.engine_server", "run_engine", arguments, title, [other.fileno()])
        super().__init__(process)

    def plan(self, config: Config, num_replicas: int) -> None:
        """Make it load the model; `num_replicas` share the CPU. `wait_until_loaded` reports it if it has exited."""
        with suppress(OSError):
            self._control.send((config, num_replicas))

    def wait_until_loaded(self) -> None:
        """Wait until the model is loaded; a user's mistake is a ValueError, another failure a RuntimeError."""
        try:
            answer = self._control.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"{self.exit_text()} before it had started; its own output says why") from None
        if isinstance(answer, ValueError):
            raise answer
        if answer is not None:
            raise RuntimeError(f"{self.name} could not be started:\n{answer}")

    def connect(self) -> Connection:
        """Return a new front end's connection to the engine; it is closed at once if the engine has exited."""
        own, other = Pipe()
        with other, suppress(OSError):
            self._control.send(CONNECT)
            send_handle(self._control, other.fileno(), self.pid)
        return own

    def exit_text(self) -> str:
        """Return how it exited, once its connections are closed."""
        code = self.wait(_GRACE_SECONDS)
        return f"{self.name} " + ("does not answer any more" if code is None else describe_exit(code))

    def shut_down(self) -> None:
        """Ask it to free the device and exit."""
        with suppress(OSError):
            self._control.send(SHUTDOWN)

    @override
    def stop(self, wait: float = 0.0) -> None:
        super().stop(wait)
        self._control.close()


class EngineProcesses:
    """The processes of all replicas; ValueError if there are too few GPUs, or too little memory for `swap_space`."""

    def __init__(self, config: Config) -> None:
        size = config.data_parallel_size
        self._config = config
        self._devices = replica_devices(config)
        check_swap_space(config.swap_space, size)
        self.all: list[EngineProcess] = []
        # An interrupt between start and append would leave a process that nothing ends.
        with self.stopped_on_error(), deferred_signals():
            for index in range(size):
                self.all.append(EngineProcess(index, size))

    @contextmanager
    def stopped_on_error(self) -> Iterator[None]:
        """Kill all processes if the `with` block raises."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def load(self, folder: str) -> None:
        """Load the model from a folder in all of them, in parallel."""
        for process, device in zip(self.all, self._devices, strict=True):
            config = replace(self._config, model=folder, data_parallel_size=1, device=device)
            process.plan(config, len(self.all))
        for process in self.all:
            process.wait_until_loaded()

    def exit(self) -> None:
        """Free all devices and end the processes."""
        for process in self.all:
            process.shut_down()
        self.stop(_EXIT_SECONDS)

    def stop(self, wait: float = 0.0) -> None:
        """Kill processes that are still running after `wait` seconds."""
        with deferred_signals():
            for process in self.all:
                process.stop(wait)


def replica_devices(config: Config) -> list[str]:
    """Return the `device` setting of each replica; ValueError if there are too few GPUs.

    Replica i has the GPUs `i * tensor_parallel_size` and on, counted from the one that is named.
    """
    size, num_ranks, name = config.data_parallel_size, config.tensor_parallel_size, config.device
    if size == 1 or name == "cpu":
        return [name] * size
    count = num_gpus()
    if name == "auto" and not count:
        return ["cpu"] * size
    first = int(name.partition(":")[2] or 0)
    if size * num_ranks > count - first:
        raise ValueError(
            f"data_parallel_size={size} with tensor_parallel_size={num_ranks} needs {size * num_ranks} GPUs"
            f"{f' from {name} on' if first else ''}, but there are {count - first}"
        )
    return [f"cuda:{first + i * num_ranks}" for i in range(size)]
