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
MODEL = "qwen3-tiny"
USER: Any = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    limits = ("--max-outputs", "8", "--max-output-tokens", "400")
    with serving(*limits, "--control", "--access-log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS) as client:
        yield client


def refused(answer: Any) -> tuple[str | None, str | None, str]:
    """The code, the field and the message of an answer that must be a refusal."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
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
    body = {"prompt": "9" * 5000, "truncate_prompt_tokens": 1, "max_tokens": 1, "seed": 10**307, "priority": 0}
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
FOO = {"type": "foo"}
IMAGE = {"role": "user", "content": [{"type": "input_image"}]}
FUNCTION = {"name": "f", "parameters": {"properties": {"a": FOO}}}
LONG: Any = [{"role": "user", "content": "a " * 4000}]


def schema(given: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": given}}


def refusal(path: str, fields: dict[str, Any], param: str | None, part: str, code: str = "invalid_value") -> Any:
    return path, fields, param, part, code


# Chats say "a" if nothing else is given. The field is named as the client sent it, and in the form which was meant.
REFUSED = [
    refusal(COMPLETION, {"prompt": [5, -1]}, "prompt[1]", "greater than or equal to 0, not -1"),
    refusal(COMPLETION, {"prompt": [[1], [True]]}, "prompt[1][0]", "integer, not true", "invalid_type"),
    refusal(COMPLETION, {"prompt": ["a", 1]}, "prompt[1]", "string, not 1", "invalid_type"),
    refusal(COMPLETION, {"prompt": {"a": 1}}, "prompt", "a valid string or a valid list", "invalid_type"),
    refusal(COMPLETION, {"prompt": []}, "prompt", "at least 1 item"),
    refusal(COMPLETION, {"prompt": ""}, "prompt", "the prompt is empty"),
    refusal(COMPLETION, {"prompt": ["ok", ""]}, "prompt[1]", "prompt[1]: the prompt is empty"),
    refusal(COMPLETION, {"prompt": [[1, 2], [99999999]]}, "prompt[1]", "prompt[1]: the prompt's token id 9999"),
    refusal(COMPLETION, {"prompt": [256] * 300, "max_tokens": 300}, "prompt", "512 tokens; ",
            "context_length_exceeded"),
    refusal(COMPLETION, {"prompt": "a " * 600}, "prompt", "512 tokens; ", "context_length_exceeded"),
    refusal(CHAT, {"messages": LONG}, "messages", "this model's maximum context length is 512 tok",
            "context_length_exceeded"),
    refusal(COMPLETION, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    refusal(COMPLETION, {"prompt": "a", "stop_token_ids": [1.0]}, "stop_token_ids[0]", "integer, not 1.0",
            "invalid_type"),
    refusal(COMPLETION, {"prompt": "a", "allowed_token_ids": [True]}, "allowed_token_ids[0]", "not true",
            "invalid_type"),
    refusal(COMPLETION, {"prompt": "a", "logit_bias": {"²": 1}}, "logit_bias", "an integer >= 0, not '²'"),
    refusal(COMPLETION, {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "an integer >= 0"),
    refusal(COMPLETION, {"prompt": "a", "logprobs": 50}, "logprobs", "logprobs=50 is over"),
    refusal(COMPLETION, {"prompt": "a", "best_of": 4}, "best_of", "best_of must be n=1, if given, not 4"),
    refusal(COMPLETION, {"prompt": "a", "response_format": schema(FOO)}, "response_format",
            "response_format cannot be used"),
    refusal(COMPLETION, {"prompt": "a", "structured_outputs": {"json": LOOP}}, "structured_outputs",
            "no text matches it; perhaps it refers to itself"),
    refusal(COMPLETION, {"prompt": "a", "truncate_prompt_tokens": 513}, None, "is over max_model_len=512"),
    refusal("/v1/embeddings", {"input": [True]}, "input[0]", "a valid integer or a valid list, not true",
            "invalid_type"),
    refusal("/v1/embeddings", {"input": ["ok", ""]}, "input[1]", "input[1]: the prompt is empty"),
    refusal("/detokenize", {"tokens": [1.0]}, "tokens[0]", "integer, not 1.0", "invalid_type"),
    refusal("/rerank", {"query": "a", "documents": ["a", {}]}, "documents[1].text", "required",
            "missing_required_parameter"),
    refusal("/score", {"text_1": [], "text_2": "a"}, "text_1", "at least 1 item"),
    refusal(GENERATE, {"token_ids": ["1"]}, "token_ids[0]", "integer", "invalid_type"),
    refusal(GENERATE, {"token_ids": [99999999]}, "token_ids", "the prompt's token id 99999999 is outside"),
    refusal(RESPONSES, {"input": [5]}, "input[0]", "an object, not 5", "invalid_type"),
    refusal(RESPONSES, {"input": [*USER, IMAGE]}, "input[1].content", "input[1].content is a string, or a list"),
    refusal(RESPONSES, {"input": USER * 4096, "instructions": "a"}, "input", "input: List should have at most"),
    refusal(RESPONSES, {"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
    refusal(RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": FOO}}},
            "text.format", "text.format cannot be used: Invalid type: foo"),
    refusal(RESPONSES, {"input": "a", "text": {"format": FOO}}, "text.format.type",
            "text.format.type: Input should be"),
    refusal(RESPONSES, {"input": "a", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required",
            "text": {"verbosity": "low"}}, "tools", "tools cannot be used"),
    refusal(CHAT, {"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role",
            "missing_required_parameter"),
    refusal(CHAT, {"messages": [*USER, IMAGE]}, "messages[1].content", "messages[1].content is a string, or"),
    refusal(CHAT, {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]",
            "a valid string or an object", "invalid_type"),
    refusal(CHAT, {"temperature": -1}, "temperature", "temperature must be"),
    refusal(CHAT, {"priority": -1}, "priority", "allow_priority"),
    refusal(CHAT, {"n": 9, "temperature": 1}, None, "max_outputs"),
    refusal(CHAT, {"n": 2, "temperature": 0}, "n", "greedy"),
    refusal(CHAT, {"logit_bias": {"9999": 1}}, "logit_bias", "vocabulary"),
    refusal(CHAT, {"stop": 1}, "stop", "a valid string or a valid list, not 1", "invalid_type"),
    refusal(CHAT, {"stop": ["a"] * 65}, "stop", "at most 64 items"),
    refusal(CHAT, {"top_logprobs": 3}, "top_logprobs", "logprobs to be true"),
    refusal(CHAT, {"logprobs": True, "top_logprobs": 50}, "top_logprobs", "top_logprobs=50 is over max_logpro"),
    refusal(CHAT, {"logprobs": True, "top_logprobs": -3}, "top_logprobs", "top_logprobs must be >= -1, not -3"),
    refusal(CHAT, {"max_tokens": 401}, "max_tokens", "max_output_tokens"),
    refusal(CHAT, {"max_completion_tokens": 0, "max_tokens": 9}, "max_completion_tokens", "max_completion_tok"),
    refusal(CHAT, {"max_completion_tokens": None, "max_tokens": 0}, "max_tokens", "max_tokens must be"),
    refusal(CHAT, {"max_completion_tokens": 3, "min_tokens": 5}, "min_tokens",
            "min_tokens=5 is over max_completion_tokens=3"),
    refusal(CHAT, {"functions": [{"name": "f"}]}, "functions", "functions"),
    refusal(CHAT, {"use_beam_search": True}, "use_beam_search", "use_beam_search"),
    refusal(CHAT, {"include_reasoning": False}, "include_reasoning", "include_reasoning"),
    refusal(CHAT, {"guided_regex": "a"}, "guided_regex", "structured_outputs={", "unsupported_parameter"),
    refusal(CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    # It is found when the answer has come so far.
    refusal(CHAT, {"structured_outputs": {"json": ENDLESS}}, "structured_outputs", "no text matches it"),
    refusal(CHAT, {"response_format": {"type": "text"}, "structured_outputs": {"json": FOO}}, "structured_outputs",
            "structured_outputs cannot be used"),
    refusal(CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format", "exclude"),
    refusal(CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "response_format"),
    refusal(CHAT, {"response_format": schema(FOO)}, "response_format", "response_format cannot be used: Inva"),
    refusal(CHAT, {"response_format": schema(LOOP)}, "response_format", "perhaps it refers to itself"),
    refusal(CHAT, {"chat_template": "x"}, "chat_template", "--chat-template"),
    refusal(CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "chat_template"),
    refusal(CHAT, {"chat_template_kwargs": {"self": "x"}}, "chat_template_kwargs", "self"),
    refusal(CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "exclude"),
    refusal(CHAT, {"tools": [{"type": "x"}]}, "tools[0].type", "be 'function'"),
    refusal(CHAT, {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}, "tools",
            "tools cannot be used"),
    refusal(CHAT, {"tool_choice": "required"}, "tool_choice", "there are no tools"),
    refusal(CHAT, {"tool_choice": 1}, "tool_choice", "or 'required' or an object, not 1"),
    refusal(CHAT, {"tool_choice": {"type": "function", "function": 1}}, "tool_choice.function", "an object, not 1",
            "invalid_type"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "part", "code"), REFUSED)
def test_a_refusal_names_the_field(
    client: Any, path: str, fields: dict[str, Any], param: str | None, part: str, code: str
) -> None:
    # A stream is refused before it begins, too.
    chat = {"messages": USER, "stream": len(part) % 2 == 1} if path == CHAT else {}
    found = refused(client.post(path, json=chat | fields))
    assert found[:2] == (code, param) and part in found[2], found
    assert ("Field required" in found[2]) == (code == "missing_required_parameter"), found


def test_an_error_in_a_stream_names_what_the_client_sent(client: Any) -> None:
    form = {"format": {"type": "json_schema", "name": "a", "schema": ENDLESS}}
    for path, body, param in (
        (CHAT, {"messages": USER, "response_format": schema(ENDLESS)}, "response_format"),
        (RESPONSES, {"input": "a", "text": form}, "text.format"),
    ):
        *_, last = client.post(path, json={**body, "stream": True}).text.split("data: ")
        assert json.loads(last)["error"]["param"] == param
    anthropics = {"format": {"type": "json_schema", "schema": ENDLESS}}
    asked = {"model": MODEL, "messages": USER, "max_tokens": 400, "output_config": anthropics, "stream": True}
    events = client.post("/v1/messages", json=asked).text.strip().split("\n\n")
    name, data = events[-1].split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"], error["error"]["type"]) == ("event: error", "error", "invalid_request_error")
    assert "no text matches it" in error["error"]["message"]


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
