"""Clients that attack: while they do, another one is answered soon, and afterwards nothing is held."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from tests.server_process import (
    ServerProcess,
    head,
    read_to_end,
    request_bytes,
    serving,
    status,
    unexpected_lines,
    wait_until,
)  # fmt: skip

KEY = "secret"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MOST_WAIT_SECONDS = 0.5
MOST_GROWTH_BYTES = 100e6
READ_SECONDS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    limits = ("--max-requests", "8", "--max-read-seconds", str(READ_SECONDS), "--max-write-seconds", "2")
    with serving(*limits, key=KEY, NANOVLLM_API_KEY=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def open_server() -> Iterator[ServerProcess]:
    """A server without a key, which the last test that has it ends."""
    flags = ("--allowed-origins", "https://chat.example.com", "--grace-seconds", "3", "--access-log", "--log-requests")
    with ServerProcess(*flags, num_files=128) as server:
        yield server


def post(path: str, body: Any, key: str | None = KEY) -> bytes:
    return request_bytes(body, path, key=key)


def memory(server: ServerProcess) -> float:
    """The resident bytes of the server."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{server.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def others_wait_little(server: ServerProcess) -> Iterator[None]:
    """Another client, on new connections, is answered soon all the while; then as much memory is free as before."""
    has_ended = threading.Event()

    def run() -> list[float]:
        waits: list[float] = []
        while not has_ended.wait(0.01) or not waits:
            began = time.perf_counter()
            server.get("/v1/models")
            waits.append(time.perf_counter() - began)
        return waits

    before = memory(server)
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(run)
        try:
            yield
            wait_until(lambda: memory(server) < before + MOST_GROWTH_BYTES)
        finally:
            has_ended.set()
        waits = future.result()
    assert max(waits) < most_wait_seconds(), sorted(waits)[-5:]
    server.check_idle()


def most_wait_seconds() -> float:
    """Return how long an answer may take: longer by as much as other programs slow this one and the server down now."""
    began, computed = time.perf_counter(), time.thread_time()
    while (spent := time.thread_time() - computed) < 0.02:
        pass
    slowdown = max(1, (time.perf_counter() - began) / spent)
    return MOST_WAIT_SECONDS * slowdown * slowdown


def test_clients_without_the_key_take_no_place(server: ServerProcess) -> None:
    completion = post("/v1/completions", {"prompt": "a", "max_tokens": 2})
    with others_wait_little(server), ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(40)]
        for number, connection in enumerate(connections):
            connection.sendall(head(("/health", "/v1/completions")[number % 2], 10, key=None))
        assert status(server.ask(completion)) == 200
        answers = [read_to_end(connection) for connection in connections]
    assert [status(answer) for answer in answers] == [413, 401] * 20


def test_heads_and_trailers_are_cut(server: ServerProcess) -> None:
    begin = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for endless in (b"a" * 2**25, b"a: b\r\n" * 2**22, b"\r\n" * 2**24):
        with others_wait_little(server):
            assert server.ask((b"" if endless[:1] == b"\r" else begin) + endless)[:12] in (b"", b"HTTP/1.1 431")
    # All of it at once, so that it was whole before it was looked at.
    assert status(server.ask(begin + b"a: " + b"b" * 131_100 + b"\r\n\r\n")) == 431
    chunked = head("/v1/completions", 0, KEY).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with others_wait_little(server):
        assert server.ask(chunked + b"2\r\n{}\r\n0\r\na: " + b"b" * 2**25)[:12] in (b"", b"HTTP/1.1 431")
    within = begin + b"Connection: close\r\na: " + b"b" * 130_000 + b"\r\n\r\n"
    assert status(server.ask(within)) == 200


@pytest.mark.parametrize("rest", [HEALTH * 100_000, HEALTH[:20], b"\0\0"])
def test_early_bytes_do_not_cut_an_answer(server: ServerProcess, rest: bytes) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": True}).encode()
    with others_wait_little(server):
        answer = server.ask(head("/v1/completions", len(body), KEY) + body + rest)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("rest", [b"\r\n", HEALTH[:20]])
def test_a_connection_is_closed_that_never_sends_a_whole_head(server: ServerProcess, rest: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(HEALTH)
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(2**16)
        began = time.monotonic()
        connection.settimeout(0.5)
        while True:
            try:
                connection.sendall(rest[:1])
                more = connection.recv(1)
            except TimeoutError:
                rest = rest[1:] or rest
                continue
            except OSError:
                more = b""
            break
    assert status(answer) == 200 and more == b""
    assert READ_SECONDS - 0.5 < time.monotonic() - began < 100


def test_connections_are_bounded_by_the_descriptors(open_server: ServerProcess) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(open_server.connect()) for _ in range(60)]
        # Those that came too late are told so; the others keep their places until they are needed.
        refused = [connection for connection in connections if is_readable(connection)]
        assert 20 < len(refused) < 60 and {status(read_to_end(connection)) for connection in refused} == {503}
        completion = post("/v1/completions", {"prompt": "a", "max_tokens": 2}, key=None)
        wait_until(lambda: open_server.ask(completion).startswith(b"HTTP/1.1 200"))
        with others_wait_little(open_server):
            assert status(open_server.ask(completion)) == 200
        # Too many at once for all of them to be told.
        connections += [stack.enter_context(open_server.connect()) for _ in range(300)]
        wait_until(lambda: open_server.ask(completion).startswith(b"HTTP/1.1 200"))
        with others_wait_little(open_server):
            assert status(open_server.ask(completion)) == 200


def is_readable(connection: socket.socket) -> bool:
    connection.settimeout(0.1)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False


def test_hosts_that_are_not_this_machine_are_refused_without_a_key(open_server: ServerProcess) -> None:
    assert status(open_server.ask(HEALTH.replace(b"localhost", b"evil.example.com\r\nConnection: close"))) == 400
    near = HEALTH.replace(b"localhost", b"localhost:1\r\nConnection: close\r\nOrigin: https://%s.example.com")
    assert b"access-control-allow-origin: https://chat.example.com\r\n" in open_server.ask(near % b"chat")
    assert b"access-control-allow-origin" not in open_server.ask(near % b"evil")


@pytest.mark.compat
def test_no_request_breaks_the_server(tmp_path: Path) -> None:
    """Requests that schemathesis makes of the server's own OpenAPI schema: no 500, no answer unlike the schema."""
    pytest.importorskip("schemathesis")
    checks = "not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance"
    options = f"--checks {checks} --max-examples 25 --phases fuzzing --request-timeout 20 --seed 1 --no-color"
    with serving("--max-output-tokens", "16", "--max-outputs", "8") as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *options.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert not done.returncode, done.stdout[-5000:] + done.stderr[-2000:]


def many(count: int, value: str) -> str:
    return "{" + ",".join(f'"{i:x}":{value}' for i in range(count)) + "}"


HELLO = '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, '
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG_MESSAGE = {"messages": [{"role": "user", "content": "ab " * 10**6}]}
LARGE_BODIES = {
    "unknown fields": (b"fields are over 128", CHAT, HELLO + many(120_000, "1")[1:]),
    "too many fields": (b"quotes and brackets", CHAT, HELLO + many(400_000, "1")[1:]),
    "metadata": (b"fields are over 128", "/v1/responses", '{"input": "a", "metadata": ' + many(120_000, "1") + "}"),
    "logit bias": (b"fields are over 4096", CHAT, HELLO + '"logit_bias": ' + many(60_000, '"a"') + "}"),
    "options": (b"fields are over 128", CHAT, HELLO + '"stream_options": ' + many(120_000, "1") + "}"),
    "lists": (b"quotes and brackets", CHAT, HELLO + '"tools": [' + "[]," * 1_300_000 + "[]]}"),
    "a long prompt": (b"characters, over the", TEXT, {"prompt": "a b " * 10**6}),
    "long prompts": (b"characters, over the", TEXT, {"prompt": ["a b " * 2000] * 128, "max_tokens": 1}),
    "a long message": (b"characters, over the", CHAT, LONG_MESSAGE),
    "bad words": (b"one of bad_words has", TEXT, {"prompt": ["a"] * 100, "bad_words": ["a b " * 15_000] * 64}),
    "long documents": (b"over max_model_len", "/rerank", {"query": "a", "documents": ["b" * 4000] * 300}),
    "short bad words": (
        b"text_completion", TEXT, {"prompt": ["a"] * 100, "bad_words": ["a b " * 30] * 64, "max_tokens": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE_BODIES)
def test_a_large_body_holds_nobody_up(server: ServerProcess, name: str) -> None:
    expected, path, body = LARGE_BODIES[name]
    tiny = post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    with others_wait_little(server), ThreadPoolExecutor(1) as executor:
        attack = executor.submit(server.ask, post(path, body.encode() if isinstance(body, str) else body))
        while not attack.done():
            began = time.perf_counter()
            assert status(server.ask(tiny)) == 200
            assert time.perf_counter() - began < most_wait_seconds()
    assert expected in attack.result(), attack.result()[-300:]


def test_a_schema_that_compiles_for_minutes_is_refused_while_others_are_answered(server: ServerProcess) -> None:
    def ask_for(schema: dict[str, Any]) -> bytes:
        answer = {"type": "json_schema", "json_schema": {"name": "number", "schema": {"type": "integer", **schema}}}
        messages = [{"role": "user", "content": "a number"}]
        return server.ask(post("/v1/chat/completions", {"messages": messages, "response_format": answer}))

    assert status(ask_for({})) == 200
    num_answered = 0
    with others_wait_little(server), ThreadPoolExecutor(3) as executor:
        # More than there are threads for what takes long, and a place is left for the others.
        attacks = [executor.submit(ask_for, {"multipleOf": 999_983 + 2 * i}) for i in range(3)]
        while not all(attack.done() for attack in attacks):
            num_answered += 1
            assert status(ask_for({"minimum": num_answered})) == 200
    assert num_answered > 2
    for attack in attacks:
        assert status(attack.result()) == 400 and b"takes more than 2 s of CPU time" in attack.result()


def test_an_answer_is_bounded_and_a_large_one_holds_nobody_up(server: ServerProcess) -> None:
    large = {"prompt": "a", "ignore_eos": True, "max_tokens": 400, "logprobs": 20, "temperature": 1}
    assert b"max_logprobs_per_request" in server.ask(post("/v1/completions", {**large, "n": 100}))
    assert b"max_logprobs_per_request" in server.ask(
        post("/v1/completions", {"prompt": [[1] * 500] * 60, "echo": True, "max_tokens": 0, "logprobs": 20})
    )
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "n": 8}
    chat |= {"ignore_eos": True, "max_tokens": 100, "temperature": 1}
    with others_wait_little(server):
        answer = server.ask(post("/v1/chat/completions", chat))
    assert status(answer) == 200 and len(json.loads(answer.partition(b"\r\n\r\n")[2])["choices"]) == 8


PARTS = [{"type": "text", "text": ""}] * 4000
HELD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": PARTS}] * 6,
        "max_tokens": 460,
        "ignore_eos": True,
    },
    # What is shown again at the end.
    "/v1/responses": {
        "input": "a",
        "max_output_tokens": 460,
        "tools": [{"type": "function", "name": "f", "parameters": {"a": PARTS}}] * 6,
        "tool_choice": "none",
        "text": {"format": {"type": "json_schema", "name": "p", "schema": {"pattern": "^a{400}$", "type": "string"}}},
    },
}


@pytest.mark.parametrize("path", HELD)
def test_a_body_is_not_kept_while_its_answer_is_streamed(open_server: ServerProcess, path: str) -> None:
    request = post(path, {**HELD[path], "stream": True}, key=None)
    with open_server.connect() as first:
        # It takes memory that is kept for others.
        first.sendall(request)
        read_until(first, b'"delta":')
    open_server.check_idle()
    with ExitStack() as stack:
        before = memory(open_server)
        for _ in range(8):
            connection = stack.enter_context(open_server.connect())
            connection.sendall(request)
            assert b"a" in read_until(connection, b'"delta":')
        assert memory(open_server) < before + 8 * 6e6
    open_server.check_idle()


def read_until(connection: socket.socket, end: bytes) -> bytes:
    answer = b""
    while end not in answer:
        part = connection.recv(2**16)
        assert part, answer
        answer += part
    return answer


LARGE = {"prompt": "a", "ignore_eos": True, "max_tokens": 400, "logprobs": 20, "temperature": 1, "n": 16}


def test_logs_say_what_happened(open_server: ServerProcess) -> None:
    request = post("/v1/completions", {"prompt": "a", "max_tokens": 2}, key=None)
    for given, expected in ((b"a-1", b"a-1"), (b"a b", None), (b"a" * 129, None)):
        answer = open_server.ask(request.replace(b"\r\n", b"\r\nX-Request-Id: " + given + b"\r\n", 1))
        found = re.search(rb"x-request-id: (\S+)\r\n", answer)
        assert found is not None and (found[1] == expected if expected else re.fullmatch(rb"[0-9a-f]{32}", found[1]))
    open_server.ask(HEALTH.replace(b"health", b"no%0Asuch").replace(b"localhost", b"localhost\r\nConnection: close"))
    lines = open_server.log().splitlines()
    for expected_line in (
        r"INFO nanovllm\.serve\.main \[-\] loading .*qwen3-tiny",
        r"INFO nanovllm\.serve\.(app|main) \[-\] serving qwen3-tiny at http://127.*",
        r"INFO nanovllm\.serve\.service \[a-1\] a prompt of 1 tokens: SamplingParams\(.*max_tokens=2.*",
        r"INFO nanovllm\.serve\.service \[a-1\] 1 prompt tokens, ended: \['length'\], .*",
        r'INFO uvicorn\.access \[a-1\] 127\.0\.0\.1:\d+ - "POST /v1/completions HTTP/1.1" 200',
        r"WARNING nanovllm\.serve\.logs \[[0-9a-f]{32}\] GET - from .*: 404 not_found_error",
    ):
        assert any(re.fullmatch(r"\S+ \S+ " + expected_line, line) for line in lines), (expected_line, lines)


def test_sigterm_ends_the_server_within_its_grace_whatever_clients_do(open_server: ServerProcess) -> None:
    stream = post("/v1/completions", {**LARGE, "stream": True}, key=None)
    whole = post("/v1/completions", LARGE, key=None)
    slow = post("/tokenize", {"prompt": "a b " * 10**6}, key=None)
    assert not unexpected_lines(open_server.log())
    with ExitStack() as stack:
        for sent in (b"", HEALTH, HEALTH[:20], stream[:-9], stream, stream + HEALTH, whole, slow, b"\0\0"):
            connection = stack.enter_context(open_server.connect(reads_little=True))
            connection.sendall(sent)
        wait_until(lambda: open_server.get("/stats")["num_running"] == 48)
        began = time.monotonic()
        code, log = open_server.stop()
        assert time.monotonic() - began < 100
    assert code == -signal.SIGTERM and "Traceback" not in log and " INFO nanovllm.serve.app [-] ended\n" in log, log
