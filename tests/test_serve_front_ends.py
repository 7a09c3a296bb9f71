"""A server of three front ends and an engine: one port, one engine, one count of everything."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from nanovllm.serve.settings import ServeSettings
from tests.rank_processes import engine_pids, front_end_pids
from tests.server_process import PATIENCE_SECONDS, ServerProcess, read_to_end, request_bytes, wait_until

HELLO: Any = [{"role": "user", "content": "introduce yourself"}]
CHAT = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
ENDLESS = {"messages": HELLO, "ignore_eos": True, "temperature": 1, "stream": True}
MOST_REQUESTS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # Of its own, since other servers may run.
    folder = tmp_path_factory.mktemp("server")
    flags = ("--front-ends", "3", "--max-requests", str(MOST_REQUESTS), "--control")
    with ServerProcess(*flags, TMPDIR=str(folder)) as server:
        yield server
        # Whatever is killed, nothing is left.
        pids = [*engine_pids(server.process.pid).values(), *front_end_pids(server.process.pid).values()]
        server.process.kill()
        assert len(pids) >= 3
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        wait_until(lambda: not list(folder.glob("nanovllm-metrics-*")))


def send(server: ServerProcess, body: dict[str, Any]) -> socket.socket:
    """A connection of its own, over which a chat was sent."""
    connection = server.connect()
    connection.sendall(request_bytes(body))
    return connection


def sockets_of(pid: int) -> Iterator[tuple[str, str]]:
    """The address and the state of each of a process's sockets, as the system writes them."""
    inodes = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return ((row[1], row[3]) for row in rows if f"socket:[{row[9]}]" in inodes)


def connections_of(pid: int, port: int) -> int:
    """Return the number of a process's connections with clients of a port."""
    return sum(state == "01" and address.endswith(f":{port:04X}") for address, state in sockets_of(pid))


def has_front_ends(server: ServerProcess, count: int) -> bool:
    """Whether that number of front ends listen."""
    pids = front_end_pids(server.process.pid).values()
    return len(pids) == count and all("0A" in [state for _, state in sockets_of(pid)] for pid in pids)


def test_all_of_them_answer_and_a_scrape_shows_what_all_have_counted(server: ServerProcess) -> None:
    with ThreadPoolExecutor(8) as executor:
        answers = list(executor.map(lambda _: server.post({**CHAT, "stream": False}), range(24)))
        texts = {json.loads(body)["choices"][0]["message"]["content"] for _, body in answers}
    assert {status for status, _ in answers} == {200} and len(texts) == 1
    server.check_idle()
    # Whichever answers, the counts include all front ends, and the one engine.
    for _ in range(6):
        labels = 'engine="0",finished_reason="length",model_name="qwen3-tiny"'
        assert server.metric(f"vllm:request_success_total{{{labels}}}") == 24
        for name in ("request_generation_tokens_sum", "generation_tokens_total"):
            assert server.metric(f"vllm:{name}") == 24 * 12
        assert server.metric("vllm:iteration_tokens_total_count") > 0


def test_the_limit_of_requests_is_the_servers_and_who_goes_away_aborts(server: ServerProcess) -> None:
    server.check_idle()
    with ExitStack() as stack:
        streams = [stack.enter_context(send(server, ENDLESS)) for _ in range(MOST_REQUESTS)]
        for stream in streams:
            assert stream.recv(12) == b"HTTP/1.1 200"
        shares = [connections_of(pid, server.port) for pid in front_end_pids(server.process.pid).values()]
        # The kernel shares them out: all at one has a probability of 3 to the power of -11.
        assert sum(shares) >= MOST_REQUESTS and max(shares) < MOST_REQUESTS
        assert server.post(CHAT)[0] == 429
        wait_until(lambda: server.get("/load")["server_load"] == MOST_REQUESTS)
    server.check_idle()
    assert server.post(CHAT)[0] == 200
    wait_until(lambda: server.get("/load")["server_load"] == 0)


def test_what_one_front_end_is_told_holds_for_all(server: ServerProcess) -> None:
    def post(path: str) -> None:
        request = urllib.request.Request(f"{server.url}{path}", method="POST")
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answered:
            assert answered.status == 200

    def all_say(path: str, want: dict[str, bool]) -> None:
        # Of three, eight connections reach all with a probability of 89 %; the news are on their way.
        wait_until(lambda: all(server.get(path) == want for _ in range(8)))

    server.check_idle()
    post("/pause")
    all_say("/is_paused", {"is_paused": True})
    post("/sleep?level=1")
    all_say("/is_sleeping", {"is_sleeping": True})
    wait_until(lambda: not any(_is_healthy(server) for _ in range(8)))
    post("/wake_up")
    post("/resume")
    all_say("/is_paused", {"is_paused": False})
    assert all(server.post(CHAT)[0] == 200 for _ in range(4))


@pytest.mark.deaths
def test_a_dead_front_end_restarts_and_only_its_clients_notice(server: ServerProcess) -> None:
    server.check_idle()
    num_counted = server.metric("vllm:request_params_n_count")
    before = front_end_pids(server.process.pid)
    with ExitStack() as stack:
        streams = [stack.enter_context(send(server, {**ENDLESS, "max_tokens": 400})) for _ in range(9)]
        for stream in streams:
            assert stream.recv(12) == b"HTTP/1.1 200"
        # The one with the most of them.
        victim = max(before.values(), key=lambda pid: connections_of(pid, server.port))
        num_lost = connections_of(victim, server.port)
        os.kill(victim, signal.SIGKILL)
        ends = Counter(_ends_well(stream) for stream in streams)
    assert ends == {True: 9 - num_lost, False: num_lost}
    wait_until(lambda: has_front_ends(server, 3) and victim not in front_end_pids(server.process.pid).values())
    # Its requests are out of the engine, its places free, and what it had counted is not lost.
    server.check_idle()
    with ThreadPoolExecutor(8) as executor:
        assert {status for status, _ in executor.map(lambda _: server.post(CHAT), range(16))} == {200}
    assert server.metric("vllm:request_params_n_count") == num_counted + 9 + 16


def _ends_well(stream: socket.socket) -> bool:
    return read_to_end(stream).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.deaths
def test_the_death_of_the_engine_is_told_with_its_cause(server: ServerProcess) -> None:
    server.check_idle()
    with send(server, ENDLESS) as stream:
        assert stream.recv(12) == b"HTTP/1.1 200"
        os.kill(engine_pids(server.process.pid)[0], signal.SIGKILL)
        rest = read_to_end(stream)
    assert b"the engine's process has exited; the server's log says how" in rest and b"[DONE]" not in rest
    wait_until(lambda: "the engine's process was killed by SIGKILL" in server.log())
    # One that is idle notices within a moment.
    wait_until(lambda: not any(_is_healthy(server) for _ in range(8)))
    for _ in range(8):
        status, body = server.post(CHAT)
        assert status == 503 and b"the engine's process has exited" in body
        with pytest.raises(urllib.error.HTTPError) as health:
            server.get("/health")
        said = json.loads(health.value.read())["error"]["message"]
        assert said == "the engine is closed: the engine's process has exited; the server's log says how"


def _is_healthy(server: ServerProcess) -> bool:
    try:
        return bool(server.get("/health") == {"status": "ok"})
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return False


def test_the_rule_for_their_number() -> None:
    rule = [ServeSettings().num_front_ends(True, cores) for cores in (1, 7, 8, 12, 16, 64)]
    assert rule == [1, 1, 2, 3, 4, 4]
    assert ServeSettings().num_front_ends(False, 64) == ServeSettings(uds="a").num_front_ends(True, 64) == 1
    assert ServeSettings(front_ends=2).num_front_ends(False, 1) == 2
    with pytest.raises(ValueError, match="front_ends=2: a server with uds has one"):
        ServeSettings(front_ends=2, uds="a").num_front_ends(True, 16)
