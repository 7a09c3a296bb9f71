"""Models whose weights fsspec copies to the cache."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.utils.hub import resolve_model
from nanovllm.utils.remote import cached_copy
from nanovllm.weights.files import stored_tensors, weight_files
from tests.conftest import MakeCheckpoint
from tests.test_loading import tokens


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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that has copies of weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanovllm" / "remote"


def copies(cache: Path) -> list[str]:
    return sorted(path.name.split("-", 1)[1] for path in cache.glob("*/*.safetensors"))


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_are_copied_to_the_cache_once(
    sharded: bool, memory: Any, checkpoint: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sharded:
        shard(memory, Path(shutil.copytree(checkpoint, tmp_path / "copy")))
    files = ["model-00001-of-00002", "model-00002-of-00002"] if sharded else ["model"]
    assert tokens("memory://model") == tokens(checkpoint)
    assert copies(cache) == [f"{name}.safetensors" for name in files]
    assert not list(Path(resolve_model("memory://model", None)).glob("*.safetensors"))
    get_file, fetched = MemoryFileSystem.get_file, list[str]()

    def noted(self: Any, path: str, *args: Any, **kwargs: Any) -> None:
        fetched.append(path)
        get_file(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "get_file", noted)
    assert tokens("memory://model") == tokens(checkpoint)
    assert not [path for path in fetched if path.endswith(".safetensors")]
    assert tokens("memory://model", model_impl="transformers") == tokens(checkpoint, model_impl="transformers")


def test_a_file_that_has_changed_takes_the_place_of_its_copy(
    memory: Any, make_checkpoint: MakeCheckpoint, cache: Path
) -> None:
    tokens("memory://model")
    other = make_checkpoint(seed=5)
    memory.rm("/model/model.safetensors")
    memory.put(str(other / "model.safetensors"), "/model/model.safetensors")
    assert tokens("memory://model") == tokens(other)
    assert copies(cache) == ["model.safetensors"]


def test_a_copy_that_fails_leaves_nothing_that_is_read(
    memory: Any, checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, path: str, local: str, **kwargs: Any) -> None:
        Path(local).write_bytes(b"half")
        raise OSError("the network is gone")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", fail)
        with pytest.raises(ValueError, match="failed: the network is gone"):
            cached_copy("memory://model/model.safetensors")
    assert not copies(cache) and tokens("memory://model") == tokens(checkpoint)


def test_load_weights_takes_a_url(memory: Any, checkpoint: Path) -> None:
    with LLM(checkpoint, device="cpu", max_model_len=64) as llm:
        assert llm.load_weights("memory://model") == len(load_file(checkpoint / "model.safetensors"))
        with pytest.raises(ValueError, match="memory://absent"):
            llm.load_weights("memory://absent")


def test_two_ranks_read_the_same_copy(checkpoint: Path) -> None:
    assert tokens(f"file://{checkpoint}", tensor_parallel_size=2) == tokens(checkpoint)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "memory://model/model.safetensors' is damaged: "),
        (lambda data: data[:5], "memory://model/model.safetensors' is damaged: "),
        (lambda data: b"", "memory://model/model.safetensors' is empty"),
        (lambda data: data[:8] + b"!" + data[9:], "memory://model/model.safetensors' is damaged: "),
        (lambda data: b"\xff" * 8 + data[8:], "memory://model/model.safetensors' is damaged: "),
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


@pytest.mark.parametrize("method", ["ls", "get_file", "info"])
def test_errors_of_a_stores_client_name_the_url(method: str, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Lacking credentials is no OSError of S3's client.
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Unable to locate credentials")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, method, fail)
        with pytest.raises(ValueError, match=r"memory://model.* failed: Unable to locate credentials"):
            cached_copy("memory://model/model.safetensors")
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
