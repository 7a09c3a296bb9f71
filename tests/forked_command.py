"""`nanovllm` commands in processes that are forked from one that has imported what they need, and so begin at once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any

import nanovllm.serve.app
import nanovllm.serve.main  # noqa: F401
from nanovllm.cli import main
from tests.forked_python import CONTEXT


class ForkedPopen(subprocess.Popen[bytes]):
    """A command with standard streams, environment and `preexec_fn` as `subprocess.Popen` has them."""

    def _execute_child(self, args: list[str], *others: Any) -> None:
        # What the child reads, and what it writes; the ends between are this process's.
        pipes = others[9:15]
        streams = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        before, environment = others[1], others[5]
        self._process = CONTEXT.Process(target=_Command(streams, args, dict(environment or os.environ), before))
        self._process.start()
        assert self._process.pid is not None
        self.pid, self._child_created = self._process.pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        code = self._process.exitcode
        if code is not None:
            self.returncode = code
        return code

    def _wait(self, timeout: float | None) -> int | None:
        self._process.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


class _Command:
    """Runs a command with some standard streams; its pickle takes them along."""

    def __init__(
        self, streams: list[int], arguments: list[str], environment: dict[str, str], before: Callable[[], Any] | None
    ) -> None:
        self.streams, self.arguments, self.environment, self.before = streams, arguments, environment, before

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"streams": [DupFd(stream) for stream in self.streams]}

    def __call__(self) -> None:
        for number, stream in enumerate(vars(self)["streams"]):
            os.dup2(stream.detach(), number)
        # A parent's file would be read from there.
        sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
        os.environ.clear()
        os.environ.update(self.environment)
        # Read from the environment when it was first asked for.
        tempfile.tempdir = None
        if self.before is not None:
            self.before()
        sys.argv = ["nanovllm", *self.arguments]
        sys.exit(main(self.arguments))
