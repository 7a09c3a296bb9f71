"""The server's endpoints beside chats and completions: embeddings, token ids, state; and its sockets."""

from __future__ import annotations

import base64
import json
import os
import signal
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from tests.rank_processes import rank_pids
from tests.server_process import PATIENCE_SECONDS, ServerProcess, serving

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

KEYS = ["first", "second"]
NAMES = ["tiny", "gpt-4o"]
TEMPLATE = (
    "{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ tail }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    flags = [part for key in KEYS for part in ("--api-key", key)]
    flags += [part for name in NAMES for part in ("--served-model-name", name)]
    flags += ["--chat-template", str(template), "--default-chat-template-kwargs", '{"tail": "!"}']
    flags += ["--root-path", "/llm"]
    with serving(*flags, key=KEYS[1]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with httpx.Client(
        base_url=server.url, headers={"Authorization": f"Bearer {KEYS[0]}"}, timeout=PATIENCE_SECONDS
    ) as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, device="cpu", max_model_len=512, kvcache_block_size=16, seed=0) as llm:
        yield llm


def test_embeddings_are_those_of_the_library(server: ServerProcess, llm: LLM) -> None:
    texts = ["Monday", "one two three", "the sea"]
    expected = llm.embed(texts, use_tqdm=False).numpy()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0) as client:
        # The client asks for base64, unless it is told otherwise.
        answer = client.embeddings.create(model="tiny", input=texts)
        np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=1e-5)
        assert answer.usage.prompt_tokens == sum(len(llm.tokenizer(text)["input_ids"]) for text in texts)
        ids = llm.tokenizer("Monday")["input_ids"]
        numbers = client.embeddings.create(model="gpt-4o", input=ids, encoding_format="float", dimensions=256)
        np.testing.assert_allclose(numbers.data[0].embedding, expected[0], atol=1e-5)
        mistakes: list[dict[str, Any]] = [{"dimensions": 3}, {"extra_body": {"pooling": "first"}}, {"input": []}]
        for wrong in mistakes:
            with pytest.raises(openai.BadRequestError):
                client.embeddings.create(**{"model": "tiny", "input": "a", **wrong})
    raw = httpx.post(f"{server.url}/v1/embeddings", headers={"x-api-key": KEYS[1]},
                     json={"input": "Monday", "encoding_format": "base64", "pooling": "mean"})  # fmt: skip
    mean = np.frombuffer(base64.b64decode(raw.json()["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(mean, llm.embed("Monday", "mean", use_tqdm=False)[0], atol=1e-5)


def test_scores_and_ranks_are_cosines(client: Any, llm: LLM) -> None:
    texts = ["Monday", "Tuesday", "2, 3, 5, 7"]
    vectors = llm.embed(texts, use_tqdm=False)
    expected = (vectors @ vectors[0]).tolist()
    for path in ("/score", "/v1/score"):
        scores = client.post(path, json={"text_1": "Monday", "text_2": texts}).json()["data"]
        assert [item["score"] for item in scores] == pytest.approx(expected, abs=1e-5)
    pairs = client.post("/score", json={"text_1": texts, "text_2": texts[::-1]}).json()["data"]
    assert [item["score"] for item in pairs] == pytest.approx((vectors * vectors.flip(0)).sum(1).tolist(), abs=1e-5)
    assert client.post("/score", json={"text_1": texts, "text_2": texts[:2]}).status_code == 400
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = {"query": "Monday", "documents": [texts[2], {"text": texts[1]}, texts[0]], "top_n": 2}
        results = client.post(path, json=body).json()["results"]
        assert [(item["index"], item["document"]["text"]) for item in results] == [(2, "Monday"), (1, "Tuesday")]
        assert results[0]["relevance_score"] == pytest.approx(1, abs=1e-5)


def test_token_ids_in_and_out(client: Any, llm: LLM) -> None:
    ids = llm.tokenizer("1, 2, 3, 4")["input_ids"]
    params: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 6,
        "ignore_eos": True,
        "logprobs": 1,
        "prompt_logprobs": 0,
    }
    (expected,) = llm.generate([ids], SamplingParams(**params), use_tqdm=False)
    body = {"token_ids": ids, "sampling_params": {**params, "seed": None}, "request_id": "mine", "model": "tiny"}
    answer = client.post("/inference/v1/generate", json=body).json()
    (choice,) = answer["choices"]
    assert (answer["request_id"], choice["finish_reason"]) == ("mine", "length")
    assert choice["token_ids"] == expected.outputs[0].token_ids and len(choice["logprobs"]["content"]) == 6
    assert len(answer["prompt_logprobs"]) == len(ids) and answer["prompt_logprobs"][0] is None
    streamed: list[int] = []
    usage: dict[str, Any] = {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    plain = {name: value for name, value in params.items() if "logprobs" not in name}
    with client.stream("POST", "/inference/v1/generate", json={**body, **options, "sampling_params": plain}) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage", {})
                streamed += [token for item in event["choices"] for token in item["token_ids"]]
    assert streamed == choice["token_ids"] and usage["completion_tokens"] == 6
    wrong = client.post("/inference/v1/generate", json={**body, "sampling_params": {"temprature": 1}})
    assert wrong.status_code == 400 and "temprature" in wrong.text
    assert client.post("/inference/v1/generate", json={**body, "token_ids": [10**6]}).status_code == 400


def test_names_keys_and_templates(client: Any, server: ServerProcess, llm: LLM) -> None:
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == NAMES
    assert client.get("/v1/models/gpt-4o").json()["root"] == BUNDLED_MODEL
    keys = ("Bearer first", "bearer second", "Bearer third", "Bearer -", "Bearer first1", "Bearer firs", "Basic first")
    statuses = [client.get("/v1/models", headers={"Authorization": key}).status_code for key in keys]
    assert statuses == [200, 200, *[401] * 5]
    messages = [{"role": "user", "content": "hi"}]
    for kwargs, tail in (({}, "!"), ({"chat_template_kwargs": {"tail": "?"}}, "?")):
        tokens = client.post("/tokenize", json={"messages": messages, **kwargs}).json()["tokens"]
        assert llm.tokenizer.decode(tokens) == f"<|im_start|>user\nhi{tail}<|im_end|>\n<|im_start|>assistant"
    body = {"messages": messages, "documents": [{"text": "one, "}], "max_tokens": 2}
    answer = client.post("/v1/chat/completions", json={**body, "return_token_ids": True}).json()
    assert llm.tokenizer.decode(answer["prompt_token_ids"]).startswith("one, <|im_start|>user\nhi!")
    assert client.get("/tokenizer_info").json()["chat_template"] == TEMPLATE
    assert client.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    # An error has its API's form below the root path, too.
    assert client.post("/v1/messages", json={}).json()["type"] == "error"


def test_state(client: Any) -> None:
    open_paths = {path: httpx.get(f"{client.base_url}{path}") for path in ("/ping", "/version", "/health")}
    assert {answer.status_code for answer in open_paths.values()} == {200}
    assert client.get("/load").json() == {"server_load": 0}
    metrics = client.get("/metrics").text
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"}' in metrics
    assert 'vllm:cache_config_info{block_size="16"' in metrics
    # Metrics of a process are left out where there are several.
    is_alone = "NANOVLLM_TEST_FRONT_ENDS" not in os.environ
    assert ("process_resident_memory_bytes" in metrics) == is_alone


def test_a_unix_socket_tls_and_a_process_that_ends_with_its_engine(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("key.pem", "cert.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", files[0], "-out", files[1]]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    address = ("--uds", str(tmp_path / "socket"), "--ssl-keyfile", files[0], "--ssl-certfile", files[1])
    flags = (*address, "--tensor-parallel-size", "2", "--exit-when-engine-fails")
    transport = httpx.HTTPTransport(uds=str(tmp_path / "socket"), verify=ssl.create_default_context(cafile=files[1]))
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with ServerProcess(*flags) as server:
        assert server.url == f"unix:{tmp_path / 'socket'}"
        with httpx.Client(transport=transport, base_url="https://localhost", timeout=PATIENCE_SECONDS) as client:
            assert client.get("/health").json() == {"status": "ok"}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: {")
                os.kill(rank_pids(server.engine_pid)[1], signal.SIGKILL)
                assert any("rank 1 was killed by SIGKILL" in line for line in lines)
        assert server.process.wait(PATIENCE_SECONDS) == 1 and "the engine is lost" in server.log()
        assert not subprocess.run(["pgrep", "-P", str(server.process.pid)], check=False, stdout=subprocess.PIPE).stdout
