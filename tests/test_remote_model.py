"""Models whose weights fsspec streams."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.models import remote_tensors
from nanovllm.models.remote_tensors import SafetensorsFile
from nanovllm.models.stored_tensors import stored_tensors, weight_files
from nanovllm.utils.hub import resolve_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def tokens(model: str | Path, **kwargs: Any) -> list[list[int]]:
    with LLM(model, device="cpu", max_model_len=64, kvcache_block_size=16, num_kvcache_blocks=20, **kwargs) as llm:
        return [output["token_ids"] for output in llm.generate([[1, 2, 3], [*range(40)]], GREEDY, use_tqdm=False)]


@pytest.fixture
def memory(checkpoint: Path) -> Any:
    """A checkpoint at memory://model."""
    files = fsspec.filesystem("memory")
    files.put(str(checkpoint), "/model", recursive=True)
    yield files
    files.rm("/model", recursive=True)


def shard(files: Any, checkpoint: Path) -> None:
    """Store the checkpoint at memory://model as two files and an index."""
    weights = load_file(checkpoint / "model.safetensors")
    names = sorted(weights)
    weight_map = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
    for file in set(weight_map.values()):
        local = checkpoint / file
        save_file({name: weights[name] for name in names if weight_map[name] == file}, local)
        files.put(str(local), f"/model/{file}")
    files.rm("/model/model.safetensors")
    files.pipe("/model/model.safetensors.index.json", str({"weight_map": weight_map}).replace("'", '"').encode())


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_are_streamed(
    sharded: bool, memory: Any, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sharded:
        shard(memory, Path(shutil.copytree(checkpoint, tmp_path / "copy")))
    largest, read = 2**16, []
    cat_file = MemoryFileSystem.cat_file

    # S3's has the version of the file after its path.
    def counted(self: Any, path: str, *, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        data: bytes = cat_file(self, path, start, end, **kwargs)
        if path.endswith(".safetensors"):
            read.append(len(data))
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    monkeypatch.setattr(remote_tensors, "_RANGE_BYTES", largest)
    remote = tokens("memory://model")
    total = sum(memory.size(path) for path in memory.glob("/model/*.safetensors"))
    sizes = [tensor.nbytes for tensor in load_file(checkpoint / "model.safetensors").values()]
    assert remote == tokens(checkpoint)
    assert max(read) <= max(largest, *sizes) < total, "more than a range or a tensor at once"
    assert len(read) < len(sizes), "neighbours are read together"
    assert not list(Path(resolve_model("memory://model", None)).glob("*.safetensors")), "weights are not copied"


def test_load_weights_takes_a_url(memory: Any, checkpoint: Path) -> None:
    with LLM(checkpoint, device="cpu", max_model_len=64) as llm:
        assert llm.load_weights("memory://model") == len(load_file(checkpoint / "model.safetensors"))
        with pytest.raises(ValueError, match="memory://absent"):
            llm.load_weights("memory://absent")


def test_two_ranks_stream_the_same_weights(checkpoint: Path) -> None:
    assert tokens(f"file://{checkpoint}", tensor_parallel_size=2) == tokens(checkpoint)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "model.safetensors' is damaged: it ends"),
        (lambda data: data[:5], "model.safetensors' is damaged: it ends"),
        (lambda data: data[:8] + b"!" + data[9:], "model.safetensors' is damaged: its header"),
        (lambda data: b"\xff" * 8 + data[8:], "model.safetensors' is damaged: its header"),
    ],
)
def test_damaged_files_are_refused_by_name(memory: Any, damage: Any, message: str) -> None:
    memory.pipe("/model/model.safetensors", damage(memory.cat_file("/model/model.safetensors")))
    with pytest.raises(ValueError, match=re.escape(message)):
        list(stored_tensors("memory://model"))


def test_a_missing_folder_or_file_is_named(memory: Any, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory://absent"):
        tokens("memory://absent")
    shard(memory, Path(shutil.copytree(checkpoint, tmp_path / "copy")))
    memory.rm("/model/model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"not there.*model-00002-of-00002"):
        weight_files("memory://model")


@pytest.mark.parametrize("method", ["ls", "get_file", "size", "cat_file"])
def test_errors_of_a_stores_client_name_the_url(method: str, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Lacking credentials is no OSError of S3's client.
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Unable to locate credentials")

    monkeypatch.setattr(MemoryFileSystem, method, fail)
    with pytest.raises(ValueError, match=r"memory://model.* failed: Unable to locate credentials"):
        SafetensorsFile("memory://model/model.safetensors")
        list(stored_tensors("memory://model"))
        resolve_model("memory://model", None)


def test_a_file_in_somebodys_folder_does_not_lead_elsewhere(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "weights.url").write_text("memory://elsewhere")
    assert all(file.startswith(str(folder)) for file in weight_files(str(folder)))


def test_a_local_folders_name_is_no_chain_of_file_systems(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model::memory")
    assert weight_files(str(folder)) == [str(folder / "model.safetensors")]
    assert tokens(folder) == tokens(checkpoint)
