"""The load generator, against a server whose delays, counts and faults are known."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("aiohttp")
from aiohttp import web

from tests.load.__main__ import _allow_open_files, main, num_requests, parse_arguments
from tests.load.client import AnswerStream, Outcome, arrival_times, open_session, send_all
from tests.load.report import notes, percentile, summarize

FIRST, BETWEEN = 0.05, 0.02
TEXTS = ["a ", "b ", 'say "', "é ", "c"]


class FakeServer:
    """An OpenAI-compatible server in a thread; the model's name says what it does.

    An answer has five events, the first after `FIRST` seconds and the others `BETWEEN` seconds apart.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.num_live = self.most_live = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "plain"}, {"id": "other"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.times.append(time.perf_counter())
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.path)
        self.keys.append(request.headers.get("Authorization"))
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        try:
            return await self._behave(request, body["model"], len(self.bodies))
        finally:
            self.num_live -= 1

    async def _behave(self, request: web.Request, model: str, number: int) -> web.StreamResponse:
        if model == "busy" or (model == "sometimes busy" and number % 3 == 0):
            return web.Response(status=503, text="no room,\ncome later")
        if model == "drops":
            assert request.transport is not None
            request.transport.abort()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for wait, event in self._events(model, chat="chat" in request.path):
            await asyncio.sleep(wait)
            if event is None:
                assert request.transport is not None
                request.transport.abort()
                break
            await response.write(b"data: " + event + (b"\r\n\r\n" if model == "no usage" else b"\n\n"))
        return response

    def _events(self, model: str, chat: bool) -> Iterator[tuple[float, bytes | None]]:
        """Seconds to wait, and the event then; None breaks the connection."""
        if chat:
            yield 0, json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]}).encode()
        if model == "hangs":
            yield 30, b"{}"
        for i, text in enumerate(TEXTS):
            choice = {"delta": {"content": text}} if chat else {"text": text}
            yield FIRST if i == 0 else BETWEEN, json.dumps({"choices": [choice], "usage": None}).encode()
            if i == 1 and model == "breaks":
                yield 0, None
        if model == "garbles":
            yield 0, b'{"usage": {"prompt'
        if model == "reports":
            yield 0, b'{"error": {"message": "a step failed"}}'
        if model not in ("no usage", "garbles"):
            # Two tokens each.
            yield 0, b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":10,"total_tokens":17}}'
        if model != "ends early":
            yield 0, b"[DONE]"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def bench(server: FakeServer, model: str, *flags: str, tmp_path: Path) -> tuple[int, list[Any]]:
    """Return the exit code and the JSON's rates."""
    path = tmp_path / "results.json"
    code = main(["--url", server.url, "--model", model, "--json", str(path), *flags])
    return code, json.loads(path.read_text())["rates"]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize(("model", "num_tokens", "num_inputs"), [("plain", 10, 7), ("no usage", 5, 0)])
def test_figures_are_those_of_the_server(
    server: FakeServer, tmp_path: Path, endpoint: str, model: str, num_tokens: int, num_inputs: int
) -> None:
    started = time.perf_counter()
    code, (result,) = bench(
        server, model, "--rate", "100", "--num-requests", "20", "--endpoint", endpoint, tmp_path=tmp_path
    )
    seconds = time.perf_counter() - started
    assert code == 0 and result["completed"] == 20 and not result["errors"]
    assert result["output_tokens"] == 20 * num_tokens and result["input_tokens"] == 20 * num_inputs
    assert 0.13 < result["seconds"] < seconds
    assert result["requests_per_second"] == pytest.approx(20 / result["seconds"])
    assert result["output_tokens_per_second"] == pytest.approx(20 * num_tokens / result["seconds"])
    streaming = 1000 * 4 * BETWEEN
    # A role alone, which a chat's stream begins with, is no token.
    assert 1000 * FIRST < result["ttft_ms"]["p50"] < 1000 * FIRST + 150
    assert 0.8 * streaming < result["tpot_ms"]["p50"] * (num_tokens - 1) < streaming + 150
    assert 1000 * FIRST + streaming < result["e2e_ms"]["p50"] < 1000 * FIRST + streaming + 250
    for figures in (result["ttft_ms"], result["tpot_ms"], result["e2e_ms"]):
        assert figures["p50"] <= figures["p95"] <= figures["p99"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_stream_may_be_cut_anywhere(end: bytes, separators: tuple[str, str]) -> None:
    events: list[Any] = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None, "error": None},
        {"choices": [{"delta": {"reasoning_content": "x"}}]},
        {"choices": [{"text": "\"usage\": {}, \"error\": {}, \"choices\": [{}], data: [DONE]\n\ndata: 5"}]},
        {"choices": [{"text": ""}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}}]},
        {"choices": [{"text": "", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}},
    ]  # fmt: skip
    lines = [b"data:" + json.dumps(event, separators=separators).encode() for event in events]
    data = end.join(line + end for line in [*lines, b": a comment", b"data: [DONE]"])
    for cut in range(len(data) + 1):
        stream, outcome = AnswerStream(), Outcome(0, 0)
        stream.feed(data[:cut], 1.0)
        stream.feed(data[cut:], 2.0)
        stream.write_to(outcome)
        assert (outcome.input_tokens, outcome.output_tokens, outcome.error) == (3, 9, None)
        assert stream.num_texts == 3 and stream.first is not None
        # One event after the other.
        whole = [data[:cut].count(line + end) == 1 for line in lines]
        assert (stream.first, stream.last) == (1.0 if whole[1] else 2.0, 1.0 if whole[5] else 2.0)
    unended = AnswerStream()
    unended.feed(data[: data.rindex(b"data: [DONE]")], 1.0)
    unended.write_to(outcome)
    assert outcome.error == "broken stream"


def test_latencies_follow_from_the_times() -> None:
    outcomes = [
        Outcome(0.0, 1.0, 9.0, first=1.5, last=3.5, input_tokens=4, output_tokens=5),
        Outcome(1.0, 1.0, 2.0, first=1.25, last=1.25, input_tokens=4, output_tokens=1),
        # Tokens without text.
        Outcome(2.0, 2.0, 4.0, last=3.0, input_tokens=4, output_tokens=2),
        Outcome(3.0, 3.0, 11.0, first=3.5, last=4.0, output_tokens=7, error="timeout", detail="a\n b"),
        Outcome(4.0, 4.0, 5.0, error="HTTP 500"),
    ]
    result = summarize(math.inf, outcomes, 10.0)
    assert result.latencies == {"ttft": [500.0, 250.0], "tpot": [500.0], "e2e": [8000.0, 1000.0, 2000.0]}
    assert (result.completed, result.input_tokens, result.output_tokens) == (3, 12, 8)
    figures = result.to_json()
    assert figures["rate"] == "inf" and figures["output_tokens_per_second"] == 0.8
    assert figures["ttft_ms"] == {"p50": 375.0, "p95": 487.5, "p99": 497.5}
    assert figures["requests_per_second"] == 0.3 and figures["errors"] == {"timeout": 1, "HTTP 500": 1}
    failures = ["2.5: 1 of 5 failed: timeout (one of them: a b)", "2.5: 1 of 5 failed: HTTP 500"]
    assert notes([result]) == [f"rate {line}".replace("2.5", "inf") for line in failures]
    # A finite rate was not kept.
    late = "2.5: requests were sent up to 960 ms late (p99)"
    assert notes([summarize(2.5, outcomes, 10.0)]) == [f"rate {line}" for line in (*failures, late)]


def test_percentiles() -> None:
    rng = Random(0)
    for count in (2, 3, 10, 101):
        values = [rng.random() for _ in range(count)]
        expected = statistics.quantiles(values, n=100, method="inclusive")
        assert [percentile(values, share) for share in range(1, 100)] == pytest.approx(expected)
        assert (percentile(values, 0), percentile(values, 100)) == (min(values), max(values))
    assert percentile([3.0], 99) == 3.0


@pytest.mark.parametrize(
    ("model", "kind", "detail"),
    [
        ("busy", "HTTP 503", "no room, come later"),
        ("drops", "connection lost", ""),
        ("breaks", "broken stream", ""),
        ("ends early", "broken stream", "without [DONE]"),
        ("garbles", "broken stream", "Unterminated"),
        ("reports", "error in the stream", "a step failed"),
        ("hangs", "timeout", ""),
    ],
)
def test_errors_are_counted_by_kind(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, kind: str, detail: str
) -> None:
    timeout = "0.2" if model == "hangs" else "30"
    flags = ["--rate", "inf", "--num-requests", "4", "--timeout", timeout]
    started = time.perf_counter()
    code, (result,) = bench(server, model, *flags, tmp_path=tmp_path)
    assert time.perf_counter() - started < 4
    assert code == 1 and result["errors"] == {kind: 4} and result["completed"] == 0 and result["output_tokens"] == 0
    assert result["ttft_ms"] == result["tpot_ms"] == result["e2e_ms"] == {"p50": None, "p95": None, "p99": None}
    output, errors = capsys.readouterr()
    assert f"rate inf: 4 of 4 failed: {kind}" in output and detail in output.splitlines()[-1]
    assert errors == "python -m tests.load: error: no request succeeded\n"


def test_nobody_listens(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.url, url = "http://localhost:1", server.url
    code, (result,) = bench(server, "plain", "--rate", "inf", "--num-requests", "3", tmp_path=tmp_path)
    assert code == 1 and result["errors"] == {"connection refused": 3}
    capsys.readouterr()
    # Without a model's name, the server is asked for one.
    assert main(["--url", server.url, "--rate", "1"]) == 1
    expected = "python -m tests.load: error: http://localhost:1/v1/models: connection refused\n"
    assert capsys.readouterr() == ("", expected)
    assert main(["--url", f"{url}/nothing", "--rate", "1"]) == 1
    assert capsys.readouterr().err.endswith("/nothing/v1/models: HTTP 404\n")


def test_some_errors_are_no_failure(server: FakeServer, tmp_path: Path) -> None:
    code, (result,) = bench(server, "sometimes busy", "--rate", "inf", "--num-requests", "9", tmp_path=tmp_path)
    assert code == 0 and result["completed"] == 6 and result["errors"] == {"HTTP 503": 3}
    assert result["output_tokens"] == 60


def test_arrivals_are_a_poisson_process() -> None:
    times = arrival_times(20000, 50.0, Random(3))
    gaps = [b - a for a, b in pairwise(times)]
    mean = statistics.fmean(gaps)
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= 400
    assert mean == pytest.approx(1 / 50, rel=0.01)
    # An exponential distribution's deviation is its mean, and its median ln 2 of that.
    assert statistics.pstdev(gaps) == pytest.approx(mean, rel=0.05)
    assert statistics.median(gaps) == pytest.approx(mean * math.log(2), rel=0.05)
    assert times == arrival_times(20000, 50.0, Random(3)) != arrival_times(20000, 50.0, Random(4))
    assert arrival_times(3, math.inf, Random(3)) == [0.0, 0.0, 0.0]


def test_requests_are_sent_at_their_times(server: FakeServer) -> None:
    times = arrival_times(50, 100.0, Random(1))

    async def run() -> list[Outcome]:
        async with open_session(None, 10) as session:
            body = b'{"model": "plain"}'
            return await send_all(session, f"{server.url}/v1/completions", [body] * 50, times, 100)

    outcomes = asyncio.run(run())
    started = outcomes[0].due - times[0]
    assert [o.due - started for o in outcomes] == pytest.approx(times)
    # Answers take 130 ms, so many are under way when the next request is due.
    late = [arrived - o.due for o, arrived in zip(outcomes, sorted(server.times), strict=True)]
    assert min(late) > 0 and statistics.median(late) < 0.1 and server.most_live > 5
    assert all(o.sent >= o.due and o.error is None for o in outcomes)


def test_what_is_due_is_sent_before_answers_are_read() -> None:
    log: list[str] = []

    class Post:
        status = 500

        async def __aenter__(self) -> Post:
            log.append("sent")
            await asyncio.sleep(0)
            return self

        async def __aexit__(self, *_: object) -> None:
            log.append("read")

        async def text(self, errors: str) -> str:
            return errors

    session: Any = type("Session", (), {"post": lambda *_, **__: Post()})()
    asyncio.run(send_all(session, "", [b""] * 9, [0.0] * 9, 9))
    assert log == ["sent"] * 9 + ["read"] * 9


@pytest.mark.parametrize("concurrency", [3, 12])
def test_an_infinite_rate_is_bounded_by_the_concurrency(server: FakeServer, tmp_path: Path, concurrency: int) -> None:
    flags = ["--rate", "inf", "--num-requests", "12", "--concurrency", str(concurrency)]
    code, (result,) = bench(server, "plain", *flags, tmp_path=tmp_path)
    assert code == 0 and result["completed"] == 12 and server.most_live == concurrency
    # The wait for a slot is not the server's.
    assert result["ttft_ms"]["p50"] < 1000 * FIRST + 100


def test_requests_have_what_the_flags_say(server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    common = ["--rate", "inf", "--num-requests", "2"]
    assert main([*common, "--url", f"{server.url}/v1/", "--input-tokens", "9", "--seed", "5"]) == 0
    plain = server.bodies[0]
    # The server's first model is taken.
    assert plain == {
        "model": "plain", "max_tokens": 128, "stream": True, "stream_options": {"include_usage": True},
        "prompt": plain["prompt"],
    }  # fmt: skip
    assert len(plain["prompt"].split()) == 9 and server.paths[0] == "/v1/completions" and server.keys[0] is None
    assert main([*common, "--url", server.url, "--input-tokens", "9", "--seed", "5"]) == 0
    assert {b["prompt"] for b in server.bodies[2:]} == {b["prompt"] for b in server.bodies[:2]}
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    flags = ["--endpoint", "chat", "--ignore-eos", "--temperature", "0", "--output-tokens", "6", "--model", "other"]
    assert main([*common, "--url", server.url, *flags]) == 0
    chat = server.bodies[-1]
    assert chat["messages"][0]["role"] == "user" and len(chat["messages"][0]["content"].split()) == 256
    assert (chat["ignore_eos"], chat["temperature"], chat["max_tokens"], chat["model"]) == (True, 0, 6, "other")
    assert server.paths[-1] == "/v1/chat/completions" and server.keys[-1] == "Bearer secret"
    flags = ["--prompt-ids", "--vocab-size", "50", "--input-tokens", "400", "--api-key", "mine"]
    assert main([*common, "--url", server.url, *flags]) == 0
    assert len(server.bodies[-1]["prompt"]) == 400 and 40 < len(set(server.bodies[-1]["prompt"])) <= 50
    assert max(server.bodies[-1]["prompt"]) < 50
    assert server.keys[-1] == "Bearer mine"
    # All prompts differ, so that no prefix cache serves them.
    assert len({str(b.get("prompt", b.get("messages"))) for b in server.bodies[2:]}) == 6


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        (["--rate", "1,inf,16"], [30, 480, 480]),
        (["--rate", "0.01,0.1", "--seconds", "20"], [1, 2]),
        (["--rate", "inf"], [1000]),
        (["--rate", "inf,5", "--num-requests", "7"], [7, 7]),
    ],
)
def test_a_rate_gets_requests_for_the_seconds(flags: list[str], numbers: list[int]) -> None:
    options = parse_arguments(["--url", "http://x", *flags])
    assert [num_requests(options, rate) for rate in options.rate] == numbers


def test_a_table_a_plot_and_a_file(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("rates.png", "one.png", "broken.png", "out.json")]
    common = ["--url", server.url, "--json", str(files[3])]
    assert main([*common, "--rate", "inf,20,80", "--seconds", "0.25", "--plot", str(files[0])]) == 0
    output, errors = capsys.readouterr()
    # A busy machine sends late, which is said below the table.
    first, *table = [line for line in output.splitlines() if not line.startswith("rate ")]
    assert not errors and first.startswith(f"plain at {server.url}/v1/completions, 256 tokens in, up to 128 out, seed ")
    # An infinite rate gets as many requests as the highest other.
    assert [line.split()[:3] for line in table[-3:]] == [["inf", "20", "0"], ["20", "5", "0"], ["80", "20", "0"]]  # fmt: skip # noqa: E501
    written = json.loads(files[3].read_text())
    assert [rate["rate"] for rate in written["rates"]] == ["inf", 20, 80]
    assert (written["model"], written["url"], written["input_tokens"]) == ("plain", f"{server.url}/v1", 256)
    figures = table[-1].split()[3:]
    shown = [written["rates"][2][name] for name in ("requests_per_second", "output_tokens_per_second")]
    shown += [written["rates"][2][name][share] for name in ("ttft_ms", "tpot_ms") for share in ("p50", "p95", "p99")]
    shown += [written["rates"][2]["e2e_ms"]["p50"]]
    assert [float(text) for text in figures] == pytest.approx(shown, abs=0.51) and len(figures) == 9
    assert main([*common, "--rate", "inf", "--num-requests", "5", "--plot", str(files[1])]) == 0
    assert main([*common, "--model", "busy", "--rate", "inf", "--num-requests", "1", "--plot", str(files[2])]) == 1
    pictures = [file.read_bytes() for file in files[:3]]
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 10000 for picture in pictures)
    # Three panels over the rates, two for the distributions at a single one.
    assert [struct.unpack(">II", picture[16:24]) for picture in pictures] == [(1200, 1350), (1200, 900), (1200, 900)]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--rate", "1"], "--url"),
        (["--url", "http://x"], "--rate"),
        (["--url", "127.0.0.1:8000", "--rate", "1"], "http://host:port"),
        (["--url", "http://x", "--rate", "1,0"], "must be positive, not 0"),
        (["--url", "http://x", "--rate", "nan"], "must be positive, not nan"),
        (["--url", "http://x", "--rate", "fast"], "fast"),
        (["--url", "http://x", "--rate", "1", "--seconds", "inf"], "must be positive, not inf"),
        (["--url", "http://x", "--rate", "1", "--concurrency", "0"], "must be 1 or more"),
        (["--url", "http://x", "--rate", "1", "--seconds", "5", "--num-requests", "5"], "not allowed with"),
        (["--url", "http://x", "--rate", "1", "--prompt-ids"], "--prompt-ids needs --vocab-size"),
        (["--url", "http://x", "--rate", "1", "--vocab-size", "5"], "--vocab-size needs --prompt-ids"),
        (["--url", "http://x", "--rate", "1", "--json", "/nowhere/x"], "/nowhere/x"),
        (["--url", "http://x", "--rate", "1", "--plot", "/nowhere/x"], "/nowhere/x"),
    ],
)
def test_a_bad_value_ends_with_code_2_and_one_line(
    flags: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([*flags])
    output, errors = capsys.readouterr()
    assert exit_info.value.code == 2 and not output and part in errors
    assert errors.count("\n") == 1 and errors.startswith("python -m tests.load: error: ")


@pytest.mark.parametrize("package", ["aiohttp", "matplotlib"])
def test_what_is_not_installed_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as exit_info:
        main(["--url", "http://x", "--rate", "1", "--plot", str(tmp_path / "x.png")])
    assert exit_info.value.code == 2
    expected = f"python -m tests.load: error: {package} is not installed: pip install '.[test]'\n"
    assert capsys.readouterr().err == expected


def test_neither_torch_nor_the_engine_is_imported() -> None:
    program = """
import sys
from tests.load.__main__ import main
assert main(["--url", "http://127.0.0.1:1", "--rate", "inf", "--num-requests", "1", "--model", "m"])
loaded = {name.split(".")[0] for name in sys.modules} | {".".join(name.split(".")[:2]) for name in sys.modules}
assert not loaded & {"torch", "transformers", "matplotlib", "nanovllm.llm", "nanovllm.engine", "nanovllm.runner"}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_limit_on_open_files_is_raised() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 300
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        _allow_open_files(low - 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (low, hard)
        _allow_open_files(low + 5)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (low + 5, hard)
        if hard != resource.RLIM_INFINITY:
            _allow_open_files(hard + 1)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
