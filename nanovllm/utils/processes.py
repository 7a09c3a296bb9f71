"""Starts processes, watches them, and ends them with their parents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.spawn import get_executable

_POLL_SECONDS = 0.01
_PARENT_SECONDS = 0.5
_PROGRAM = "import sys; sys.path[:] = {path}; from {module} import {function}; {function}({arguments})"


def start_python(
    module: str, function: str, arguments: Sequence[int], title: str, descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a process that calls a module's function and ignores Ctrl-C; it does not import the user's program.

    It is started by `subprocess`: a fork of this process would at exit terminate the processes of `multiprocessing`.
    `title` is the last item of its command line, for process lists; it inherits `descriptors`.
    """
    # The import system ignores entries that are not strings, whose repr may be invalid.
    path = [entry for entry in sys.path if isinstance(entry, str)]
    called = ", ".join(map(str, arguments))
    program = _PROGRAM.format(path=path, module=module, function=function, arguments=called)
    command = [os.fsdecode(get_executable()), "-c", program, title]
    with _blocked_sigint():
        return subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL)


class PythonProcess:
    """Watches a process of `start_python` until its exit; usable from any thread and from signal handlers."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        # While one thread is in `Popen.poll`, another one gets None even if the process exited.
        self._lock = threading.RLock()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        with self._lock:
            return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for the exit and return the exit code; None if the process is still running."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return code

    def kill(self) -> None:
        """Kill the process if it is running, without waiting for its exit."""
        with self._lock:
            self._process.kill()

    def terminate(self) -> None:
        """Ask the process to exit if it is running, without waiting for its exit."""
        with self._lock:
            self._process.terminate()

    def stop(self, wait: float = 0.0) -> None:
        """Wait up to `wait` seconds for the exit, then kill the process; a second call does nothing."""
        if self.wait(wait) is None:
            with self._lock:
                self._process.kill()
                self._process.wait()


def describe_exit(code: int) -> str:
    """Describe a process's exit, as a predicate: "was killed by SIGKILL", "exited with code 1"."""
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"exited with code {code}"


@contextmanager
def _blocked_sigint() -> Iterator[None]:
    """Block SIGINT in this thread inside the `with` block; processes started there inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(parent: int, clean_up: Callable[[], object] = lambda: None) -> None:
    """Exit this process, after `clean_up`, once `parent` is gone, even if the main thread is blocked."""

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        try:
            clean_up()
        finally:
            os._exit(1)

    threading.Thread(target=poll, name="nanovllm-parent", daemon=True).start()
