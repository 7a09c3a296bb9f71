"""The batch API, by OpenAI's client: files in, files out, and a server that is ended in between."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("python_multipart")

from nanovllm.serve.batches import Batches  # noqa: E402
from nanovllm.serve.settings import ServeSettings  # noqa: E402
from tests.server_process import PATIENCE_SECONDS, ServerProcess  # noqa: E402

CHAT = "/v1/chat/completions"


def client_of(server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def lines(bodies: list[dict[str, Any]], url: str = CHAT) -> bytes:
    requests = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def question(text: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def submit(client: Any, content: bytes, endpoint: str = CHAT) -> Any:
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    assert client.files.retrieve(file.id).bytes == len(content) and client.files.content(file.id).read() == content
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"of": "test"}
    )


def ended(client: Any, batch_id: str) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (batch := client.batches.retrieve(batch_id)).status in ("validating", "in_progress", "cancelling"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def answers(client: Any, file_id: str) -> dict[str, Any]:
    records = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    assert len({record["custom_id"] for record in records}) == len(records)
    return {record["custom_id"]: record["response"] for record in records}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(folder: Path) -> Any:
    """The last test that has it ends it."""
    server = ServerProcess("--batch-dir", str(folder), "--max-num-seqs", "4", "--max-file-bytes", "6000000")
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def test_batches_from_end_to_end(server: ServerProcess) -> None:
    client = client_of(server)
    bodies = [question(f"{i} + 3", max_tokens=8) for i in range(30)] + [question("a", temperature=-1), question(5)]
    batch = submit(client, lines(bodies))
    done = ended(client, batch.id)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 32, 30, 2)
    assert done.metadata == {"of": "test"}
    output, errors = answers(client, done.output_file_id), answers(client, done.error_file_id)
    for i in range(30):
        assert output[f"r{i}"]["body"]["choices"][0]["message"]["content"] == str(i + 3)
    assert errors["r30"]["status_code"] == 400 and "temperature" in errors["r30"]["body"]["error"]["message"]
    assert errors["r31"]["body"]["error"]["param"] == "messages[0].content"
    embedded = ended(client, submit(client, lines([{"input": "a"}], "/v1/embeddings"), "/v1/embeddings").id)
    assert len(answers(client, embedded.output_file_id)["r0"]["body"]["data"][0]["embedding"]) == 256
    assert next(iter(client.batches.list(limit=1))).id in (batch.id, embedded.id)
    listed = [one.id for one in client.batches.list(limit=1)]
    assert len(set(listed)) == len(listed) and {batch.id, embedded.id} <= set(listed)
    client.files.delete(done.output_file_id)
    for missing in (done.output_file_id, "file-../../x"):
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(missing)


def test_bad_files_and_requests(server: ServerProcess) -> None:
    client = client_of(server)
    first = lines([question("a")])
    cases = {
        b"": "empty_file", b"{}\n": "invalid_json_line", first + b"nonsense\n": "invalid_json_line",
        lines([question("a" * 5_000_000)]): "line_too_large",
        lines([question("a", x=[[]] * 300_000)]): "line_too_large",
        first + first: "duplicate_custom_id", lines([question("a")], "/v1/completions"): "invalid_url",
    }  # fmt: skip
    for content, code in cases.items():
        failed = ended(client, submit(client, content).id)
        assert failed.status == "failed" and failed.errors.data[0].code == code, content
    with pytest.raises(openai.APIStatusError) as refused:
        client.files.create(file=("in.jsonl", io.BytesIO(b"x" * 7_000_000)), purpose="batch")
    assert refused.value.status_code == 413
    with pytest.raises(openai.BadRequestError):
        submit(client, first, "/v1/models")
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-1", endpoint=CHAT, completion_window="24h")
    batch = submit(client, lines([question("a", max_tokens=400, ignore_eos=True)] * 40))
    client.batches.cancel(batch.id)
    done = ended(client, batch.id)
    assert done.status == "cancelled" and done.request_counts.completed < 40
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_many_lines_hold_nobody_up(tmp_path: Path) -> None:
    """Others get their turn while lines are gone through that have an answer, or get one at once."""
    service: Any = SimpleNamespace(settings=ServeSettings(), is_ending=False, llm=SimpleNamespace(is_running=True))

    async def run() -> None:
        batches = Batches(service, tmp_path, 10_000)
        file_id = batches.files.create("in.jsonl", "batch")
        batches.files.path(file_id).write_bytes(lines([{"messages": 1}] * 1000))
        batch = batches.create(file_id, CHAT, None)
        for _ in range(2):
            worker, num_turns = asyncio.create_task(batches.run()), 0
            while batch["status"] != "completed":
                await asyncio.sleep(0)
                num_turns += batch["status"] == "in_progress"
            worker.cancel()
            assert num_turns > 1000 and batch["request_counts"] == {"total": 1000, "completed": 0, "failed": 1000}
            # As a server finds it that was ended before.
            batch["status"] = "in_progress"

    asyncio.run(run())


def test_a_server_that_was_ended_goes_on(server: ServerProcess, folder: Path) -> None:
    bodies = [question(f"{i} + 5", max_tokens=40, ignore_eos=True) for i in range(40)]
    client = client_of(server)
    batch = submit(client, lines(bodies))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while client.batches.retrieve(batch.id).request_counts.completed < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.stop(signal.SIGTERM)[0] == -signal.SIGTERM
    state = json.loads((folder / "batches" / f"{batch.id}.json").read_text())
    assert state["status"] == "in_progress"
    output = folder / "files" / f"{state['output_file_id']}.jsonl"
    before = output.read_bytes()
    assert 5 <= before.count(b"\n") < 40
    # As a kill in the middle of a line leaves it.
    output.write_bytes(before + b'{"id": "half')
    again = ServerProcess("--batch-dir", str(folder), "--max-num-seqs", "4")
    try:
        client = client_of(again)
        done = ended(client, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 40)
        assert len(answers(client, done.output_file_id)) == 40
        assert client.files.content(done.output_file_id).read().startswith(before)
    finally:
        again.process.kill()
        again.process.communicate()
