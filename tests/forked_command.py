"""`nanovllm` commands in processes that are forked from one that has imported what they need, and so begin at once."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile

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
