"""A server in a process of its own, on a free port, with the bundled model on the CPU."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Any

from tests.rank_processes import engine_pids

PATIENCE_SECONDS = 240
"""Longer than a busy machine takes, and shorter than pytest's limit, so that a failure says what was waited for."""


def wait_until(reached: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def head(path: str, length: int, key: str | None = None, **headers: str) -> bytes:
    """The head of a request."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [] if key is None else [f"Authorization: Bearer {key}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def request_bytes(
    body: Any, path: str = "/v1/chat/completions", *, key: str | None = None, length: int | None = None
) -> bytes:
    """A request, after which the server closes the connection; with `length`, its head says so."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, len(content) if length is None else length, key, Connection="close") + content


def read_to_end(connection: socket.socket) -> bytes:
    """All that comes until the connection is closed, or cut."""
    parts: list[bytes] = []
    with suppress(ConnectionResetError):
        parts.extend(iter(lambda: connection.recv(2**16), b""))
    return b"".join(parts)


def status(answer: bytes) -> int:
    """The status of an answer."""
    return int(answer.split()[1])


def written(file: IO[bytes]) -> str:
    """The text that another process has written to a file."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()


class ServerProcess:
    """The server's process, its address, and what it says of itself."""

    def __init__(self, *flags: str, key: str | None = None, num_files: int | None = None, **environment: str) -> None:
        front_ends = os.environ.get("NANOVLLM_TEST_FRONT_ENDS")
        if front_ends is not None and not {"--uds", "--front-ends"} & set(flags):
            flags = (*flags, "--front-ends", front_ends)
        settings = ("--device", "cpu", "--max-model-len", "512", "--kvcache-block-size", "16", "--seed", "0")
        # Needs the packages of the server, which those do not who only wait.
        from tests.forked_command import ForkedPopen  # noqa: PLC0415

        self.key = key
        limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (num_files, num_files)) if num_files else None
        self._out, self._errors = (tempfile.NamedTemporaryFile() for _ in range(2))  # noqa: SIM115
        self.process = ForkedPopen(
            ["serve", "--port", "0", *settings, *flags], stdin=subprocess.DEVNULL, stdout=self._out,
            stderr=self._errors, env=os.environ | environment, preexec_fn=limit,
        )  # fmt: skip
        wait_until(lambda: "\n" in written(self._out) or self.process.poll() is not None)
        if not written(self._out):
            raise RuntimeError(self.log()[-3000:])
        self.url = written(self._out).split()[-1]
        self.port = int(port) if (port := self.url.rsplit(":", 1)[1]).isdecimal() else -1

    @property
    def engine_pid(self) -> int:
        """The process whose children the engine's ranks are."""
        return engine_pids(self.process.pid).get(0, self.process.pid)

    def log(self) -> str:
        """The server's stderr so far."""
        return written(self._errors)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return json.loads(answer.read())

    def connect(self, *, reads_little: bool = False) -> socket.socket:
        """A connection to it, whose buffer may be small."""
        connection = socket.socket()
        if reads_little:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def ask(self, request: bytes) -> bytes:
        """The whole answer to a request, after which the server closes the connection."""
        with self.connect() as connection:
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(request)
            return read_to_end(connection)

    def post(self, body: Any, **options: Any) -> tuple[int, bytes]:
        """The status and the body of an answer; see `request_bytes`."""
        answer = self.ask(request_bytes(body, **options))
        return status(answer), answer.partition(b"\r\n\r\n")[2]

    def metric(self, name: str) -> float:
        """The value of a metric by a pattern of its name, and labels if there are several; 0 if there is none."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=PATIENCE_SECONDS) as answer:
            found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def num_errors(self, kind: str) -> float:
        """The errors of a kind that it has counted."""
        return self.metric(rf'\S*errors_total{{[^}}]*kind="{kind}"[^}}]*}}')

    def wait_for_errors(self, kind: str, least: float) -> None:
        """Wait until at least `least` errors of a kind are counted."""
        wait_until(lambda: self.num_errors(kind) >= least)

    def wait_for_tokens(self, least: int) -> None:
        """Wait until at least `least` tokens are sampled."""
        wait_until(lambda: self.get("/stats")["num_output_tokens"] >= least)

    def check_idle(self) -> None:
        """Check that soon nothing runs, waits or holds a block, and that requests are answered."""
        names = ("num_running", "num_waiting", "cache_use")
        wait_until(lambda: not any(map(self.get("/stats").get, names)))
        assert self.get("/health") == {"status": "ok"}

    def stop(self, number: int = signal.SIGTERM, seconds: float = PATIENCE_SECONDS) -> tuple[int, str]:
        """End the process; returns its exit code and what it wrote to stderr."""
        self.process.send_signal(number)
        return self.process.wait(seconds), self.log()


def unexpected_lines(log: str) -> list[str]:
    """The lines of a log that are no information or warning."""
    return [line for line in log.splitlines() if not re.match(r"\S+ \S+ (INFO|WARNING) (nanovllm|uvicorn)", line)]


@contextmanager
def serving(*flags: str, key: str | None = None, **options: Any) -> Iterator[ServerProcess]:
    """A server that must have nothing left when the `with` block ends, and by then has logged no error."""
    with ServerProcess(*flags, key=key, **options) as server:
        yield server
        server.check_idle()
        code, error = server.stop()
        assert code == -signal.SIGTERM and not unexpected_lines(error), unexpected_lines(error)
