"""Processes of `start_python` that are forked from one that has imported what they need, and so begin at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import parent_process
from multiprocessing.reduction import DupFd
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
"""Its server imports what any process of the tests runs."""
CONTEXT.set_forkserver_preload(
    [
        "tests.forked_python", "tests.forked_command", "tests.mock_llm", "nanovllm.client.engine_server",
        "nanovllm.models.decoder", "nanovllm.runner.worker", "safetensors.torch", "fsspec.implementations.local",
    ]
)  # fmt: skip

started: list[ForkedPython] = []
"""The processes whose exit has not been seen."""


class ForkedPython:
    """A process with the methods of `subprocess.Popen` that `PythonProcess` calls."""

    def __init__(
        self, module: str, function: str, arguments: Sequence[int], title: str, descriptors: Sequence[int]
    ) -> None:
        args = module, function, arguments, title, descriptors, dict(os.environ), sys.path[:], os.getpid()
        self._process = CONTEXT.Process(target=_Main(*args), daemon=False)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.pid is not None
        self.pid, self.title = self._process.pid, title
        self._code: int | None = None
        started.append(self)

    def poll(self) -> int | None:
        if self in started and (code := self._process.exitcode) is not None:
            started.remove(self)
            self._code = code
            # And with it a descriptor.
            self._process.close()
        return self._code

    def wait(self) -> int | None:
        if self.poll() is None:
            self._process.join()
        return self.poll()

    def kill(self) -> None:
        if self.poll() is None:
            self._process.kill()

    def terminate(self) -> None:
        if self.poll() is None:
            self._process.terminate()


class _Main:
    """The call that a process makes; its pickle takes the descriptors along."""

    def __init__(
        self, module: str, function: str, arguments: Sequence[int], title: str, descriptors: Sequence[int],
        environment: dict[str, str], path: list[str], parent: int,
    ) -> None:  # fmt: skip
        self.module, self.function, self.arguments, self.title = module, function, arguments, title
        self.descriptors, self.environment, self.path, self.parent = descriptors, environment, path, parent

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"passed": [DupFd(descriptor) for descriptor in (1, 2, *self.descriptors)]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __call__(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.path
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        numbers = [passed.detach() for passed in vars(self)["passed"]]
        for own, passed in zip((1, 2), numbers, strict=False):
            os.dup2(passed, own)
        parent, caller = self.parent, parent_process()
        # A process ends when another is its parent.
        os.getppid = lambda: parent if caller is not None and caller.is_alive() else 1
        own_numbers = dict(zip(self.descriptors, numbers[2:], strict=True))
        getattr(import_module(self.module), self.function)(*(own_numbers.get(n, n) for n in self.arguments))
