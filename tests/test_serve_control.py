"""The endpoints of a training loop: prime-rl's calls under streaming clients, and what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from nanovllm import LLM, AsyncLLM, SamplingParams  # noqa: E402
from nanovllm.assets import BUNDLED_MODEL  # noqa: E402
from nanovllm.serve.app import create_app  # noqa: E402
from nanovllm.serve.service import Service  # noqa: E402
from nanovllm.serve.settings import ServeSettings  # noqa: E402
from nanovllm.weights.model_weights import ModelWeights  # noqa: E402
from tests.server_process import ServerProcess, unexpected_lines  # noqa: E402

KEY = "secret"
NUM_CLIENTS, NUM_TOKENS = 3, 60


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the folders of two later steps of a training."""
    root = tmp_path_factory.mktemp("weights")
    weights = load_file(Path(BUNDLED_MODEL) / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for step in (1, 2):
        (root / f"step_{step}").mkdir()
        for name, tensor in weights.items():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * 0.05
            weights[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(weights, root / f"step_{step}" / "model.safetensors", metadata={"format": "pt"})
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--control", "--weights-root", str(root), "--api-key", KEY, key=KEY) as server:
        yield server
        server.check_idle()
        _, log = server.stop()
        assert all("503 service_unavailable" in line for line in unexpected_lines(log)), log


def client_of(server: ServerProcess) -> Any:
    return httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=240)


async def stream(client: Any, number: int, begun: asyncio.Event) -> list[int]:
    """The tokens of one client."""
    body = {
        "prompt": [300 + number, 301], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line[6:])["choices"][0].get("token_ids") or []
                if len(tokens) > 4:
                    begun.set()
    return tokens


async def update(client: Any, folder: Path) -> None:
    """Update weights as prime-rl does after a step of its trainer."""
    for path, arguments in (
        ("/pause", {"params": {"mode": "keep", "clear_cache": "false"}}),
        ("/update_weights", {"json": {"weight_dir": folder.as_posix()}}),
        ("/resume", {}),
    ):
        (await client.post(path, **arguments)).raise_for_status()


def test_weights_change_under_running_streams(server: ServerProcess, root: Path) -> None:
    params = SamplingParams(0, NUM_TOKENS, ignore_eos=True)
    prompts = [[300 + number, 301] for number in range(NUM_CLIENTS)]
    with LLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=200, kvcache_block_size=16) as llm:
        first = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        llm.load_weights(root / "step_2")
        llm.reset_prefix_cache()
        last = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    async def run() -> list[list[list[int]]]:
        async with client_of(server) as client:
            assert (await client.get("/liveness")).json() == {"status": "alive"}
            assert (await client.get("/get_world_size")).json() == {"world_size": 1}
            begun = [asyncio.Event() for _ in range(NUM_CLIENTS)]
            streams = [asyncio.create_task(stream(client, number, event)) for number, event in enumerate(begun)]
            await asyncio.gather(*(event.wait() for event in begun))
            for step in (1, 2):
                await update(client, root / f"step_{step}")
            during = await asyncio.gather(*streams)
            after = await asyncio.gather(*(stream(client, number, event) for number, event in enumerate(begun)))
            return [list(during), list(after)]

    during, after = asyncio.run(run())
    assert {len(tokens) for tokens in during} == {NUM_TOKENS} and after == last
    # Each begins as with the first weights, and goes on with others.
    assert all(tokens[:5] == begin[:5] for tokens, begin in zip(during, first, strict=True)) and during != first


def test_pauses_and_sleep_over_http(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url, headers={"x-api-key": KEY}, timeout=240) as client:
        body = {"prompt": [300, 301], "max_tokens": 2}
        assert client.post("/pause", params={"mode": "abort", "clear_cache": True}).json() == {"status": "paused"}
        assert client.get("/is_paused").json() == {"is_paused": True}
        client.post("/resume").raise_for_status()
        assert client.post("/sleep").json() == {"status": "asleep"} and client.get("/is_sleeping").json()["is_sleeping"]
        assert [client.get(path).status_code for path in ("/health", "/liveness")] == [503, 200]
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 503 and "the engine is asleep" in refused.json()["error"]["message"]
        assert client.post("/wake_up", params={"tags": ["weights"]}).json() == {"status": "asleep"}
        assert client.post("/wake_up").json() == {"status": "awake"}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/reset_prefix_cache").json() == {"success": True}


def test_what_is_refused(server: ServerProcess, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "step_1", tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    with httpx.Client(base_url=server.url, headers={"x-api-key": KEY}, timeout=240) as client:
        for weight_dir in (str(tmp_path / "outside"), "../outside", "link", "nowhere", "/", "step_1/model.safetensors"):
            answer = client.post("/update_weights", json={"weight_dir": weight_dir})
            assert answer.status_code == 400 and "is no folder under" in answer.json()["error"]["message"], weight_dir
        assert client.post("/update_weights", json={"weight_dir": None}).status_code == 400
        assert client.post("/sleep", params={"level": 3}).status_code == 400
        assert client.post("/pause", headers={"Origin": "http://evil.example"}).status_code == 403
        assert client.get("/is_paused").json() == {"is_paused": False}
    assert httpx.post(f"{server.url}/pause").status_code == 401
    cases: list[tuple[dict[str, Any], str]] = [
        ({"host": "0.0.0.0"}, "control=True needs an api_key"),
        ({"weights_root": "/nowhere"}, "weights_root='/nowhere' must be a folder"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            ServeSettings(control=True, **settings).check_access()
    ServeSettings(control=True).check_access()


def test_a_failed_update_leaves_an_unhealthy_server(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = ModelWeights.write

    def failing(live: ModelWeights, name: str, tensor: Any) -> None:
        if len(written) == 5:
            raise OSError("the file is gone")
        written.append(name)
        write(live, name, tensor)

    async def run() -> None:
        llm = AsyncLLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=20, kvcache_block_size=16)
        app = create_app(Service(llm, ServeSettings(control=True, weights_root=str(root))))
        transport = httpx.ASGITransport(app)
        async with llm, httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asked = {"prompt": [300], "max_tokens": 2}
            monkeypatch.setattr(ModelWeights, "write", failing)
            failed = await client.post("/update_weights", json={"weight_dir": "step_1"})
            assert failed.status_code == 500 and "the file is gone" in failed.json()["error"]["message"]
            for answer in (await client.get("/health"), await client.post("/v1/completions", json=asked)):
                assert answer.status_code == 503 and "left undone by a load that" in answer.json()["error"]["message"]
            monkeypatch.setattr(ModelWeights, "write", write)
            assert (await client.post("/update_weights", json={"weight_dir": "step_1"})).status_code == 200
            assert (await client.post("/v1/completions", json=asked)).status_code == 200
            norm = torch.full_like(load_file(root / "step_1" / "model.safetensors")["model.norm.weight"], torch.nan)
            (root / "nan").mkdir()
            save_file({"model.norm.weight": norm}, root / "nan" / "model.safetensors")
            answer = (await client.post("/update_weights", json={"weight_dir": "nan"})).json()
            assert answer == {"status": "ok", "num_tensors": 1, "nan_tensors": ["model.norm.weight"]}

    asyncio.run(run())
    assert len(written) == 5
