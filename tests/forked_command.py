"""`nanovllm` commands in processes that are forked from one that has imported what they need, and so begin at once."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any

import nanovllm.serve.app
import nanovllm.serve.main  # noqa: F401
from nanovllm.cli import main
from tests.forked_python import CONTEXT


def _run(arguments: list[str], files: list[str], environment: dict[str, str], num_files: int | None) -> None:
    os.environ.clear()
    os.environ.update(environment)
    # Read from the environment when it was first asked for.
    tempfile.tempdir = None
    for descriptor, name in enumerate(files, 1):
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    if num_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    sys.argv = ["nanovllm", *arguments]
    sys.exit(main(arguments))


class ForkedPopen(subprocess.Popen[bytes]):
    """A command with standard streams as `subprocess.Popen` makes them."""

    def _execute_child(self, args: list[str], *others: Any) -> None:
        # What the child reads, and what it writes; the ends between are this process's.
        pipes = others[9:15]
        streams = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._process = CONTEXT.Process(target=_Streams(streams, args, dict(os.environ)))
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


class _Streams:
    """Runs a command with some standard streams; its pickle takes them along."""

    def __init__(self, streams: list[int], arguments: list[str], environment: dict[str, str]) -> None:
        self.streams, self.arguments, self.environment = streams, arguments, environment

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"streams": [DupFd(stream) for stream in self.streams]}

    def __call__(self) -> None:
        for number, stream in enumerate(vars(self)["streams"]):
            os.dup2(stream.detach(), number)
        # A parent's file would be read from there.
        sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
        _run(self.arguments, [], self.environment, None)


class ForkedCommand:
    """A process with the methods of `subprocess.Popen`, whose output goes to files."""

    def __init__(self, arguments: list[str], num_files: int | None, environment: dict[str, str]) -> None:
        self._files = [tempfile.NamedTemporaryFile() for _ in range(2)]  # noqa: SIM115
        names = [file.name for file in self._files]
        self._process = CONTEXT.Process(target=_run, args=(arguments, names, environment, num_files))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def written(self) -> tuple[str, str]:
        """Its stdout and stderr so far."""
        out, errors = (os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in self._files)
        return out, errors

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("nanovllm", timeout or 0)
        return self.returncode
