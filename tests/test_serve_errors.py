"""Answers to refused requests, in plain words, and what the log leaves out."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

import nanovllm.serve  # noqa: E402
from nanovllm import AsyncLLM  # noqa: E402
from nanovllm.assets import BUNDLED_MODEL  # noqa: E402
from nanovllm.runner.worker_processes import WorkerError  # noqa: E402
from nanovllm.serve.app import create_app  # noqa: E402
from nanovllm.serve.logs import RequestLogs  # noqa: E402
from nanovllm.serve.protocol import MOST_CHOICES  # noqa: E402
from nanovllm.serve.service import Service  # noqa: E402
from nanovllm.serve.settings import ServeSettings  # noqa: E402
from tests.server_process import PATIENCE_SECONDS, ServerProcess, serving  # noqa: E402

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RESPONSES = "/v1/responses"
USER: Any = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("--control", "--access-log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS) as client:
        yield client


def refused(answer: Any) -> tuple[str | None, str | None, str]:
    """The code, the field and the message of an answer that must be a refusal."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["code"], error["param"], error["message"]


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "not UTF-8": (b'{"prompt": "\xff"}', "invalid unicode code point"),
    "no JSON": (b'{"prompt": a}', "line 1 column 12"),
    "deep lists": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion limit exceeded"),
    # Python reads it, and fails where it is written again.
    "deep objects": (b'{"prompt": "a", "x": ' + b'{"a": ' * 300 + b"1" + b"}" * 300 + b"}", "recursion limit exceeded"),
    "many digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "number out of range"),
    "NaN": (b'{"prompt": "a", "x": NaN}', "expected value"),
    # UTF-8 has no form of it.
    "half a character": (b'{"prompt": "a\\ud83d"}', "hex escape"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_body_that_cannot_be_read_says_why(client: Any, name: str) -> None:
    body, part = UNREADABLE[name]
    code, param, message = refused(client.post(COMPLETION, content=body, headers={"content-type": "application/json"}))
    assert (code, param) == ("invalid_json", None) and part in message
    assert message.startswith("what was sent cannot be read as JSON: ")


def test_the_deepest_bodies_and_longest_numbers_are_read(client: Any) -> None:
    deep = json.loads("[" * 199 + "]" * 199)
    body = {"prompt": "9" * 5000, "truncate_prompt_tokens": 1, "max_tokens": 1, "seed": 10**307}
    assert client.post(COMPLETION, json={**body, "x": [deep, []]}).status_code == 200
    assert refused(client.post(COMPLETION, json={**body, "x": [[deep], []]}))[0] == "invalid_json"


# No float holds them.
@pytest.mark.parametrize("number", ["1e999", "1" + "0" * 400])
def test_numbers_over_the_largest_are_a_mistake(client: Any, number: str) -> None:
    for path, body in (
        (COMPLETION, {"prompt": "a", "temperature": 0}),
        (COMPLETION, {"prompt": "a", "structured_outputs": {"json": {"type": "number", "maximum": 0}}}),
        (GENERATE, {"token_ids": [1], "sampling_params": {"top_p": 0}}),
        (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": 0}}),
    ):
        text = json.dumps(body).replace(": 0", f": {number}")
        assert refused(client.post(path, content=text, headers={"content-type": "application/json"}))[2]


LOOP = {"$ref": "#"}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}
WRONG: list[tuple[str, dict[str, Any], str, str, str]] = [
    (COMPLETION, {"prompt": [5, -1]}, "invalid_value", "prompt[1]", "greater than or equal to 0, not -1"),
    (COMPLETION, {"prompt": [[1], [True]]}, "invalid_type", "prompt[1][0]", "integer, not true"),
    (COMPLETION, {"prompt": ["a", 1]}, "invalid_type", "prompt[1]", "string, not 1"),
    (COMPLETION, {"prompt": {"a": 1}}, "invalid_type", "prompt", "a valid string or a valid list"),
    (COMPLETION, {"prompt": []}, "invalid_value", "prompt", "at least 1 item"),
    (COMPLETION, {"prompt": "a", "stop_token_ids": [1.0]}, "invalid_type", "stop_token_ids[0]", "integer, not 1.0"),
    (COMPLETION, {"prompt": "a", "allowed_token_ids": [True]}, "invalid_type", "allowed_token_ids[0]", "not true"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"²": 1}}, "invalid_value", "logit_bias", "an integer >= 0, not '²'"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "invalid_value", "logit_bias", "an integer >= 0"),
    ("/v1/embeddings", {"input": [True]}, "invalid_type", "input[0]", "a valid integer or a valid list, not true"),
    ("/detokenize", {"tokens": [1.0]}, "invalid_type", "tokens[0]", "integer, not 1.0"),
    (GENERATE, {"token_ids": ["1"]}, "invalid_type", "token_ids[0]", "integer"),
    (CHAT, {"messages": USER, "tool_choice": {"type": "function", "function": 1}}, "invalid_type",
     "tool_choice.function", "an object, not 1"),
    (CHAT, {"messages": USER, "tool_choice": 1}, "invalid_value", "tool_choice", "or 'required' or an object, not 1"),
    (CHAT, {"messages": USER, "tools": [{"type": "x"}]}, "invalid_value", "tools[0].type", "be 'function'"),
    ("/v1/responses", {"input": [5]}, "invalid_type", "input[0]", "an object, not 5"),
    ("/rerank", {"query": "a", "documents": ["a", {}]}, "missing_required_parameter", "documents[1].text", "required"),
    ("/score", {"text_1": [], "text_2": "a"}, "invalid_value", "text_1", "at least 1 item"),
    (COMPLETION, {"prompt": "a", "structured_outputs": {"json": LOOP}}, "invalid_value", "structured_outputs",
     "no text matches it; perhaps it refers to itself"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": LOOP}}},
     "invalid_value", "response_format", "no text matches it; perhaps it refers to itself"),
    # It is found when the answer has come so far.
    (CHAT, {"messages": USER, "structured_outputs": {"json": ENDLESS}}, "invalid_value", "structured_outputs",
     "no text matches it"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "code", "param", "part"), WRONG)
def test_the_error_is_that_of_the_form_which_was_meant(
    client: Any, path: str, body: dict[str, Any], code: str, param: str, part: str
) -> None:
    found = refused(client.post(path, json=body))
    assert found[:2] == (code, param) and part in found[2], found
    assert ("Field required" in found[2]) == (code == "missing_required_parameter"), found


def schema(given: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": given}}


FOO = {"type": "foo"}
IMAGE = {"role": "user", "content": [{"type": "input_image"}]}
FUNCTION = {"name": "f", "parameters": {"properties": {"a": FOO}}}
RENAMED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"logprobs": True, "top_logprobs": 50}, "top_logprobs", "top_logprobs=50 is over max_logprobs=20"),
    (CHAT, {"logprobs": True, "top_logprobs": -3}, "top_logprobs", "top_logprobs must be >= -1, not -3"),
    (COMPLETION, {"prompt": "a", "logprobs": 50}, "logprobs", "logprobs=50 is over"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be >= 1, not 0"),
    (CHAT, {"max_completion_tokens": 0, "max_tokens": 9}, "max_completion_tokens", "max_completion_tokens must be"),
    (CHAT, {"max_completion_tokens": None, "max_tokens": 0}, "max_tokens", "max_tokens must be"),
    (CHAT, {"max_completion_tokens": 3, "min_tokens": 5}, "min_tokens", "min_tokens=5 is over max_completion_tokens=3"),
    (RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be >= 1"),
    (CHAT, {"response_format": schema(FOO)}, "response_format", "response_format cannot be used: Invalid type: foo"),
    (COMPLETION, {"prompt": "a", "response_format": schema(FOO)}, "response_format", "response_format cannot be used"),
    (CHAT, {"response_format": {"type": "text"}, "structured_outputs": {"json": FOO}}, "structured_outputs",
     "structured_outputs cannot be used"),
    (CHAT, {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}, "tools",
     "tools cannot be used"),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": FOO}}},
     "text.format", "text.format cannot be used: Invalid type: foo"),
    (RESPONSES, {"input": "a", "text": {"format": FOO}}, "text.format.type", "text.format.type: Input should be"),
    (RESPONSES, {"input": "a", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required",
     "text": {"verbosity": "low"}}, "tools", "tools cannot be used"),
    (CHAT, {"messages": [*USER, IMAGE]}, "messages[1].content", "messages[1].content is a string, or a list of parts"),
    (RESPONSES, {"input": [*USER, IMAGE]}, "input[1].content", "input[1].content is a string, or a list of parts"),
    (RESPONSES, {"input": USER * 4096, "instructions": "a"}, "input", "input: List should have at most 4096"),
    (COMPLETION, {"prompt": ""}, "prompt", "the prompt is empty"),
    (COMPLETION, {"prompt": ["ok", ""]}, "prompt[1]", "prompt[1]: the prompt is empty"),
    (COMPLETION, {"prompt": [[1, 2], [99999999]]}, "prompt[1]", "prompt[1]: the prompt's token id 99999999 is outside"),
    ("/v1/embeddings", {"input": ["ok", ""]}, "input[1]", "input[1]: the prompt is empty"),
    (GENERATE, {"token_ids": [99999999]}, "token_ids", "the prompt's token id 99999999 is outside"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "begin"), RENAMED)
def test_an_error_names_what_the_client_sent(
    client: Any, path: str, fields: dict[str, Any], param: str, begin: str
) -> None:
    body = {"messages": USER, **fields} if path == CHAT else fields
    code, found, message = refused(client.post(path, json=body))
    assert (code, found) == ("invalid_value", param) and message.startswith(begin), message


def test_an_error_in_a_stream_names_what_the_client_sent(client: Any) -> None:
    text = {"format": {"type": "json_schema", "name": "a", "schema": ENDLESS}}
    for path, body, param in (
        (CHAT, {"messages": USER, "response_format": schema(ENDLESS)}, "response_format"),
        (RESPONSES, {"input": "a", "text": text}, "text.format"),
    ):
        *_, last = client.post(path, json={**body, "stream": True}).text.split("data: ")
        assert json.loads(last)["error"]["param"] == param


def test_queries_say_which_field_is_wrong(client: Any) -> None:
    cases: list[tuple[Any, tuple[str, str, str]]] = [
        (client.post("/pause?mode=x"), ("invalid_value", "mode", "'keep', 'wait' or 'abort'")),
        (client.post("/sleep?level=x"), ("invalid_type", "level", "integer")),
        (client.post("/wake_up?tags=x"), ("invalid_value", "tags", "'weights' or 'kv_cache'")),
    ]
    for answer, (code, param, part) in cases:
        found = refused(answer)
        assert found[:2] == (code, param) and part in found[2], found
    assert client.get("/is_paused").json() == {"is_paused": False}


def test_choices_are_as_many_as_the_readme_says(client: Any) -> None:
    readme = (Path(nanovllm.serve.__file__).parent / "README.md").read_text(encoding="utf-8")
    assert f"`choice` {MOST_CHOICES:,} texts" in readme
    choices = [f"c{i}" for i in range(MOST_CHOICES)]
    for path, body in (
        (COMPLETION, lambda given: {"prompt": "a", "max_tokens": 1, "structured_outputs": given}),
        (GENERATE, lambda given: {"token_ids": [1], "sampling_params": {"max_tokens": 1, "structured_outputs": given}}),
    ):
        assert client.post(path, json=body({"choice": choices})).status_code == 200
        found = refused(client.post(path, json=body({"choice": [*choices, "d"]})))
        assert found[:2] == ("invalid_value", "structured_outputs.choice") and "10001 texts are over 10000" in found[2]


@pytest.mark.parametrize(
    ("head", "status", "part"),
    [
        (
            b"GET /health HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\nhost: evil.example",
            400,
            b"more than one Host header",
        ),
        (b"GET /health?a=" + b"a" * 65_600 + b" HTTP/1.1\r\nHost: localhost", 400, b"what was sent is not HTTP/1.1"),
    ],
)
def test_a_head_that_is_refused_says_why(server: ServerProcess, head: bytes, status: int, part: bytes) -> None:
    answer = server.ask(head + b"\r\n\r\n")
    assert int(answer.split()[1]) == status and part in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


SECRET = "sesame"


def test_nothing_that_a_client_sends_is_in_the_log(client: Any, server: ServerProcess) -> None:
    late = f"start: /{SECRET[0]}[xy]{{4}}/ rest\nrest: " + " | ".join(f'"{SECRET}{i}"' for i in range(2500))
    bodies: list[tuple[str, Any, int]] = [
        (COMPLETION, {"prompt": "a", "max_tokens": 1, SECRET: 1}, 200),
        (COMPLETION, {"prompt": "a", "model": SECRET}, 404),
        (RESPONSES, {"input": "a", "metadata": {SECRET: 1}}, 400),
        (COMPLETION, {"prompt": "a", "logit_bias": {SECRET: 1}}, 400),
        (COMPLETION, {"prompt": "a", "structured_outputs": {"regex": f"({SECRET}"}}, 400),
        (COMPLETION, {"prompt": "a", "structured_outputs": {"grammar": late}}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": SECRET}]}]}, 400),
        (CHAT, {"messages": USER, "tool_choice": {"type": "function", "function": {"name": SECRET}}}, 400),
        (GENERATE, {"token_ids": [1], "sampling_params": {SECRET: 1}}, 400),
        ("/update_weights", {"weight_dir": SECRET}, 400),
        (f"/{SECRET}%0A", {}, 404),
        (f"/v1/completions?{SECRET}", {}, 400),
        (f"/wake_up?tags={SECRET}", {}, 400),
    ]
    for path, body, status in bodies:
        assert client.post(path, json=body).status_code == status, (path, body)
    for path in (f"/v1/models/{SECRET}", f"/page/{SECRET}", f"/health/?{SECRET}"):
        client.get(path)
    client.post(COMPLETION, json={"prompt": "a", "stop": 1}, headers={"X-Request-Id": "of-the-stop"})
    log = server.log()
    assert SECRET not in log
    for line in (
        "[of-the-stop] POST /v1/completions from ('127.0.0.1', ",
        ": 400 invalid_type (stop)",
        '"GET /v1/models/{name:path} HTTP/1.1" 404',
        '"POST - HTTP/1.1" 404',
        "the grammar of a request cannot be used\n",
    ):
        assert line in log, line


def test_a_fault_is_logged_with_its_place_and_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    async def app(*_: Any) -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(SECRET) from error

    scope: Any = {"type": "http", "headers": [], "path": "/", "root_path": ""}
    nothing: Any = None
    with caplog.at_level(logging.ERROR):
        asyncio.run(RequestLogs(app, set())(scope, nothing, nothing))
    assert SECRET not in caplog.text
    assert "KeyError, and then" in caplog.text and "raise ValueError(SECRET) from error\nValueError" in caplog.text


def test_health_says_in_a_sentence_how_the_engine_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = 'rank 1 failed:\nTraceback (most recent call last):\n  File "a.py", line 1\ntorch.cuda.Error: no memory'

    async def run() -> None:
        llm = AsyncLLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=20, kvcache_block_size=16)
        runner: Any = llm.llm.llm_engine._runner
        transport = httpx.ASGITransport(create_app(Service(llm, ServeSettings(control=True))))
        async with llm, httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            def fail(*_: object) -> None:
                raise WorkerError(trace)

            monkeypatch.setattr(runner, "forward", fail)
            monkeypatch.setattr(runner, "synchronize", fail)
            body = {"prompt": [300], "max_tokens": 2}
            answers = [await client.post(COMPLETION, json=body)]
            while llm.is_running:
                await asyncio.sleep(0.01)
            answers += [
                await client.get("/health"),
                await client.get("/liveness"),
                await client.post(COMPLETION, json=body),
            ]
        sentence = "a step failed: WorkerError: rank 1 failed: torch.cuda.Error: no memory; the engine is closed"
        assert [(answer.status_code, answer.json()["error"]["message"]) for answer in answers] == [(503, sentence)] * 4

    asyncio.run(run())


def test_too_many_requests_and_one_that_takes_too_long() -> None:
    body = {"prompt": "a", "max_tokens": 400, "n": 8, "ignore_eos": True, "temperature": 1}

    async def run() -> None:
        llm = AsyncLLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=300, kvcache_block_size=16)
        service = Service(llm, ServeSettings(max_requests=2, max_request_seconds=1))
        transport = httpx.ASGITransport(create_app(service))
        async with llm, httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
            await client.post(COMPLETION, json={"prompt": "a", "max_tokens": 1})
            # No request ends before its time is over, however fast the machine is.
            await llm.pause()
            long = [asyncio.ensure_future(client.post(COMPLETION, json={**body, "stream": s})) for s in (False, True)]
            while llm.num_pending_requests < 2:
                await asyncio.sleep(0.01)
            refused = await client.post(COMPLETION, json=body)
            assert refused.status_code == 429 and "max_requests" in refused.text
            for answer, status in zip(await asyncio.gather(*long), (408, 200), strict=True):
                assert answer.status_code == status and "max_request_seconds" in answer.text
            assert 'kind="timeout_error",model_name="qwen3-tiny"} 2.0' in (await client.get("/metrics")).text

    asyncio.run(run())
