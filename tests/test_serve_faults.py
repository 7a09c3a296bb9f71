"""Clients that misbehave, and a server that is ended: nothing is left behind, and `/health` says the truth."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from concurrent.futures import ThreadPoolExecutor

import uvicorn
from starlette.staticfiles import StaticFiles
from uvicorn.server import ServerState

from nanovllm.serve.limits import Connection, ConnectionPool
from nanovllm.serve.settings import ServeSettings
from tests.server_process import (
    PATIENCE_SECONDS,
    ServerProcess,
    read_to_end,
    request_bytes,
    serving,
    unexpected_lines,
    wait_until,
)  # fmt: skip

HELLO: Any = [{"role": "user", "content": "introduce yourself"}]
ENDLESS = {"messages": HELLO, "ignore_eos": True, "temperature": 1}
MOST_BYTES = 2_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    limits = ("--max-body-bytes", str(MOST_BYTES), "--max-read-seconds", "1", "--max-write-seconds", "2")
    with serving(*limits) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").check_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_vanish(server: ServerProcess, stream: bool) -> None:
    # In the prefill of a long prompt, and in mid-answer.
    num_vanished = server.num_errors("client_disconnect")
    aborted = r'vllm:request_success_total{[^}]*finished_reason="abort"[^}]*}'
    num_aborted = server.metric(aborted)
    # One that stays is not counted.
    assert server.post({"messages": HELLO, "max_tokens": 2, "stream": stream})[0] == 200
    long = {"messages": [{"role": "user", "content": "a b " * 110}], "stream": stream, "n": 4, "temperature": 1}
    for body, name in ((long, "num_waiting"), ({**ENDLESS, "stream": stream}, "num_running")):
        before = server.get("/stats")["num_output_tokens"]
        connections = [server.connect() for _ in range(8)]
        for connection in connections:
            connection.sendall(request_bytes(body))
        if name == "num_running":
            server.wait_for_tokens(before + 20)
        for connection in connections:
            connection.close()
        server.check_idle()
        num_vanished += len(connections)
        server.wait_for_errors("client_disconnect", num_vanished)
        assert server.num_errors("client_disconnect") == num_vanished
    assert num_aborted < server.metric(aborted) <= num_aborted + 2 * len(connections)


# A client of a thousand streams may be slow to send and to read, which is not what is tested with these.
PATIENT = [part for name in ("read", "write") for part in (f"--max-{name}-seconds", str(PATIENCE_SECONDS))]
ROOMY = ("--max-requests", "1200", "--max-num-seqs", "1024", *PATIENT, "--grace-seconds", str(PATIENCE_SECONDS))


@pytest.fixture(scope="module")
def roomy_server() -> Iterator[ServerProcess]:
    """A server with room for a thousand requests, which the last test that has it ends."""
    with ServerProcess(*ROOMY) as server:
        yield server


@pytest.mark.parametrize("num_streams", [100, pytest.param(1000, marks=pytest.mark.compat)])
def test_many_streams_at_once(roomy_server: ServerProcess, num_streams: int) -> None:
    body = request_bytes({"messages": HELLO, "max_tokens": 12, "temperature": 0, "stream": True})

    async def read() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", roomy_server.port)
        writer.write(body)
        answer = (await reader.read()).decode()
        writer.close()
        assert answer.endswith("data: [DONE]\n\n\r\n0\r\n\r\n"), answer[-200:]
        events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        return "".join(event["choices"][0]["delta"].get("content", "") for event in events)

    async def run() -> None:
        texts = await asyncio.gather(*(read() for _ in range(num_streams)))
        assert set(texts) == {"Hello! I am Nano, a tiny language model that ships"}, set(texts)

    asyncio.run(run())
    roomy_server.check_idle()
    assert not unexpected_lines(roomy_server.log())


# Enough to fill every buffer on the way, twice.
LARGE = {**ENDLESS, "logprobs": True, "top_logprobs": 20, "n": 32, "max_tokens": 120}


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.compat), True])
def test_a_client_that_does_not_read_is_cut_off(server: ServerProcess, stream: bool) -> None:
    before = server.num_errors("slow_client")
    with server.connect(reads_little=True) as connection:
        connection.sendall(request_bytes({**LARGE, "stream": stream}))
        # This connection, and no other one that a busy machine has made slow.
        wait_until(lambda: f"cut the connection of {connection.getsockname()}" in server.log())
        assert server.num_errors("slow_client") > before
        server.check_idle()
        rest = read_to_end(connection)
    head, _, body = rest.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert not (body.endswith(b"0\r\n\r\n") if length is None else len(body) == int(length[1]))
    assert (length is None) == stream


class Transport(asyncio.Transport):
    """A connection whose client reads what the test says."""

    aborted = False
    num_unsent = 9

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        pass


def make_connection(errors: list[str], **limits: Any) -> tuple[Any, Transport]:
    """A connection to a server, and the protocol that serves it."""
    config = uvicorn.Config(StaticFiles(check_dir=False), log_config=None)
    pool = ConnectionPool(ServeSettings(**limits), errors.append, 10)
    protocol = Connection(pool, config=config, server_state=ServerState(), app_state={})
    transport = Transport()
    protocol.connection_made(transport)
    return protocol, transport


def test_the_timers_of_a_connection_end_with_it() -> None:
    async def run() -> None:
        protocol, _ = make_connection([], max_write_seconds=100)
        protocol.pause_writing()
        timers = protocol._head_timer, protocol._write_timer
        protocol.connection_lost(None)
        assert [timer.cancelled() for timer in timers] == [True, True]

    asyncio.run(run())


def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    async def run() -> None:
        errors: list[str] = []
        protocol, transport = make_connection(errors, max_write_seconds=0.1)
        protocol.pause_writing()
        for _ in range(5):
            transport.num_unsent -= 1
            await asyncio.sleep(0.08)
        assert not transport.aborted
        await asyncio.sleep(0.3)
        assert transport.aborted and errors == ["slow_client"]

    asyncio.run(run())


def test_a_client_that_reads_an_answer_too_slowly_is_cut_off() -> None:
    async def run() -> None:
        errors: list[str] = []
        protocol, transport = make_connection(
            errors, max_write_seconds=0.2, max_read_seconds=0.2, max_request_seconds=0.2
        )
        transport.num_unsent = 10**6
        protocol.data_received(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        protocol.pause_writing()
        began = time.monotonic()
        while not transport.aborted:
            # Something is sent all the time.
            transport.num_unsent -= 1
            await asyncio.sleep(0.02)
            assert time.monotonic() - began < PATIENCE_SECONDS
        assert time.monotonic() - began > 0.5 and errors == ["slow_client"]

    asyncio.run(run())


@pytest.mark.parametrize("head", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_connection_without_a_request_is_closed(server: ServerProcess, head: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(head)
        # Else there is a TimeoutError.
        with suppress(ConnectionResetError):
            assert connection.recv(100) == b""


BODIES: dict[str, tuple[bytes, set[int]]] = {
    "many wrong messages": (b'{"messages": [' + b"1," * 900_000 + b"1]}", {400}),
    "many wrong stops": (b'{"messages": [], "stop": [' + b"1," * 900_000 + b"1]}", {400}),
    "too large": (b" " * (MOST_BYTES + 1), {413}),
    "as large as may be": (
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}'.rjust(MOST_BYTES),
        {200},
    ),
    "empty": (b"", {400}),
    "no object": (b"[1, 2]", {400}),
    "nul": (b'{"messages": [{"role": "user", "content": "\\u0000"}], "max_tokens": 2}', {200}),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_wrong(server: ServerProcess, name: str) -> None:
    body, statuses = BODIES[name]
    status, answer = server.post(body)
    assert status in statuses, answer
    if status != 200:
        assert json.loads(answer)["error"]["message"]


def test_a_chunked_body_that_never_ends_is_cut(server: ServerProcess) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head)
        answer = b""
        try:
            for _ in range(100):
                connection.sendall(b"8000\r\n" + b" " * 0x8000 + b"\r\n")
        except OSError:
            # The server has closed the connection, perhaps before its answer could be read.
            return
        answer = connection.recv(2**16)
    assert answer.split()[1] == b"413"


def test_a_slow_sender_is_dropped(server: ServerProcess) -> None:
    status, body = server.post(b'{"mess', length=100)
    assert status == 408 and b"max_read_seconds" in body


def test_a_signal_lets_what_runs_finish_and_a_second_one_ends_it(roomy_server: ServerProcess) -> None:
    """`test_serve_attacks.py` has requests that outlast the grace period."""
    check_signals(roomy_server, 1)


@pytest.mark.deaths
def test_a_second_signal_ends_the_requests_of_all_front_ends() -> None:
    with ServerProcess("--front-ends", "2", *ROOMY) as server:
        check_signals(server, 2)


def check_signals(server: ServerProcess, num_front_ends: int) -> None:
    with ThreadPoolExecutor(6) as pool:
        short = [pool.submit(server.post, {**ENDLESS, "max_tokens": 20, "n": 8}) for _ in range(2)]
        long = [pool.submit(server.post, {**ENDLESS, "max_tokens": 400, "n": 64}) for _ in range(4)]
        wait_until(lambda: server.get("/stats")["num_running"] >= 256)
        server.process.send_signal(signal.SIGINT)
        assert [future.result()[0] for future in short] == [200, 200]
        # Signals that come before the first one is handled are one.
        wait_until(lambda: server.log().count("ending within") >= num_front_ends)
        code, error = server.stop(signal.SIGINT)
        answers = [future.result() for future in long]
    assert all(status == 200 and b'"abort"' in body for status, body in answers), answers
    assert code == 128 + signal.SIGINT and "Traceback" not in error, error
