"""A server in a process of its own, on a free port, with the bundled model on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.rank_processes import engine_pids

PATIENCE_SECONDS = 240
"""Longer than a busy machine takes, and shorter than pytest's limit, so that a failure says what was waited for."""


class ServerProcess:
    """The server's process, its address, and what it says of itself."""

    def __init__(self, *flags: str, key: str | None = None, num_files: int | None = None, **environment: str) -> None:
        front_ends = os.environ.get("NANOVLLM_TEST_FRONT_ENDS")
        if front_ends is not None and not {"--uds", "--front-ends"} & set(flags):
            flags = (*flags, "--front-ends", front_ends)
        settings = ("--device", "cpu", "--max-model-len", "512", "--kvcache-block-size", "16", "--seed", "0")
        command = [sys.executable, "-m", "nanovllm", "serve", "--port", "0", *settings, *flags]
        if num_files is not None:
            command = ["sh", "-c", 'ulimit -n "$0" && exec "$@"', str(num_files), *command]
        self.key = key
        # A pipe that nobody reads would hold the server up.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | environment,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.log()[-3000:])
        self.url = line.split()[-1]
        self.port = int(port) if (port := self.url.rsplit(":", 1)[1]).isdecimal() else -1

    @property
    def engine_pid(self) -> int:
        """The process whose children the engine's ranks are."""
        return engine_pids(self.process.pid).get(0, self.process.pid)

    def log(self) -> str:
        """What the server has written to stderr."""
        # The server goes on writing at the file's position, which must stay.
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode()

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return json.loads(answer.read())

    def check_idle(self) -> None:
        """Nothing runs, waits or holds a block once what was under way has ended, and requests are answered."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            stats = self.get("/stats")
            if not stats["num_running"] and not stats["num_waiting"] and not stats["cache_use"]:
                break
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)
        assert self.get("/health") == {"status": "ok"}

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30) -> tuple[int, str]:
        """End the process; returns its exit code and what it wrote to stderr."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.communicate(timeout=seconds)
        return self.process.returncode, self.log()


def unexpected_lines(log: str) -> list[str]:
    """The lines of a log that are no information or warning."""
    return [line for line in log.splitlines() if not re.match(r"\S+ \S+ (INFO|WARNING) (nanovllm|uvicorn)", line)]


@contextmanager
def serving(*flags: str, key: str | None = None, **options: Any) -> Iterator[ServerProcess]:
    """A server that must have nothing left when the `with` block ends, and by then has logged no error."""
    server = ServerProcess(*flags, key=key, **options)
    try:
        yield server
        server.check_idle()
        code, error = server.stop()
        assert code == -signal.SIGTERM and not unexpected_lines(error), unexpected_lines(error)
    finally:
        server.process.kill()
        server.process.wait()
