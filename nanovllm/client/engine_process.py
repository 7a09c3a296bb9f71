"""The process of an engine, as the process that has started it sees it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from nanovllm.client.messages import CONNECT, SHUTDOWN, EngineInfo, EnginePlan, StartFailure
from nanovllm.client.replica_devices import replica_devices
from nanovllm.config import Config
from nanovllm.utils.host_memory import check_swap_space
from nanovllm.utils.interrupt import deferred_signals
from nanovllm.utils.python_process import describe_exit, start_python

_POLL_SECONDS = 0.1
_EXIT_SECONDS = 10.0
_GRACE_SECONDS = 2.0
"""How long the end of a process may become visible after its connections have ended."""


class EngineProcess:
    """An engine in a process of its own. The constructor starts it; it then waits for a plan.

    Args:
        index, size: which of the replicas it is, and how many there are.
    """

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.name = "the engine's process" if size == 1 else f"replica {index} of {size}"
        self._control, other = Pipe()
        # A signal handler may end the engine while another thread looks at the process.
        self._lock = threading.RLock()
        with other:
            arguments = other.fileno(), os.getpid()
            title = f"nanovllm engine {index}"
            self._process = start_python(
                "nanovllm.client.engine_main", "run_engine", arguments, title, [other.fileno()]
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def plan(self, plan: EnginePlan) -> None:
        """Let it load the model; it may have ended by now, which `info` finds."""
        with suppress(OSError):
            self._control.send(plan)

    def info(self) -> EngineInfo:
        """Wait until the model is loaded.

        Raises:
            ValueError: of the user's making, as an engine in this process raises it.
            RuntimeError: it failed.
        """
        try:
            # So that Ctrl-C is heard.
            while not self._control.poll(_POLL_SECONDS):
                pass
            answer = self._control.recv()
        except (EOFError, OSError):
            self._wait(_GRACE_SECONDS)
            raise RuntimeError(f"{self.exit_text()} before it had started; its own output says why") from None
        if isinstance(answer, StartFailure):
            if isinstance(answer.error, ValueError):
                raise answer.error
            raise RuntimeError(f"{self.name} could not be started:\n{answer.traceback}")
        assert isinstance(answer, EngineInfo)
        return answer

    def connect(self) -> Connection:
        """Return a new front end's connection to the engine; it is closed at once if the engine has ended."""
        own, other = Pipe()
        with other, suppress(OSError):
            self._control.send(CONNECT)
            send_handle(self._control, other.fileno(), self.pid)
        return own

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        with self._lock:
            return self._process.poll() is not None

    def exit_text(self) -> str:
        """Return how it has ended, once its connections have."""
        self._wait(_GRACE_SECONDS)
        code = self._process.returncode
        return f"{self.name} " + ("does not answer any more" if code is None else describe_exit(code))

    def shut_down(self) -> None:
        """Tell it to free the device and to end."""
        with suppress(OSError):
            self._control.send(SHUTDOWN)

    def stop(self, wait: float = 0.0) -> None:
        """Wait until it has ended, and kill it if that takes too many seconds; a second call does nothing."""
        self._wait(wait)
        with self._lock:
            if self._process.returncode is None:
                self._process.kill()
                self._process.wait()
        self._control.close()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)


class EngineProcesses:
    """The processes of all replicas.

    Args:
        config: of all of them.

    Attributes:
        infos: of the engines, in order, once `load` has returned.

    Raises:
        ValueError: there are too few GPUs, or too little memory for the `swap_space` of all.
    """

    def __init__(self, config: Config) -> None:
        size = config.data_parallel_size
        self._config = config
        self._devices = replica_devices(config)
        check_swap_space(config.swap_space, size)
        self.all: list[EngineProcess] = []
        self.infos: list[EngineInfo] = []
        with ExitStack() as stack:
            stack.callback(self.stop)
            # An interrupt between start and append would leave a process that nothing ends.
            with deferred_signals():
                for index in range(size):
                    self.all.append(EngineProcess(index, size))
            stack.pop_all()

    @contextmanager
    def stopped_on_error(self) -> Iterator[None]:
        """Kill all processes if the `with` block raises."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def load(self, folder: str) -> None:
        """Load the model from a folder in all of them, side by side; those that share a GPU one after the other.

        Raises:
            ValueError, RuntimeError: see `EngineProcess.info`.
        """
        # What is free of a GPU while another engine loads says nothing.
        used: set[str] = set()
        for process, device in zip(self.all, self._devices, strict=True):
            if device in used:
                self._wait_for_infos(process.index)
            used |= {device} - {"cpu"}
            config = replace(self._config, model=folder, data_parallel_size=1, device=device)
            process.plan(EnginePlan(config, len(self.all)))
        self._wait_for_infos(len(self.all))

    def _wait_for_infos(self, count: int) -> None:
        self.infos += [process.info() for process in self.all[len(self.infos) : count]]

    def exit(self) -> None:
        """Free all devices and end the processes."""
        for process in self.all:
            process.shut_down()
        self.stop(_EXIT_SECONDS)

    def stop(self, wait: float = 0.0) -> None:
        """Kill those that have not ended after so many seconds."""
        with deferred_signals():
            for process in self.all:
                process.stop(wait)
