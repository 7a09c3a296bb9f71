"""Shared fixtures. Without a GPU, Triton's kernels run in its interpreter."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before the library is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        from tests import quick_interpreter

        quick_interpreter.install()

import transformers

from nanovllm import LLM
from nanovllm.client import engine_process
from nanovllm.runner import worker_processes
from tests.forked_python import ForkedPython

# Its assertions hold under `python -O` too, as assertions in tests do.
pytest.register_assert_rewrite("tests.mock_runner", "tests.streams")

# A shell that starts the tests in the background, and nohup, have it ignored, by all processes that tests start, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests' tensors are too small to share between threads, in the processes that tests start, too.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Otherwise each of the processes that tests start compiles the library anew, and each of pytest's all tests, too.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_xdist_auto_num_workers() -> int:
    """Tests of a GPU look at its memory, and so have it to themselves; others often wait for processes of theirs."""
    return 0 if torch.cuda.is_available() else 3


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for name in ("compat", "all_devices", "deaths"):
            # Keywords also have the names of folders.
            if item.get_closest_marker(name) is not None and name not in config.option.markexpr:
                item.add_marker(pytest.mark.skip(reason=f"takes long: pytest -m {name}"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def processes_begin_at_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork ranks and replicas; tests of processes themselves have `real_processes = True` in their module."""
    if torch.cuda.is_available() or getattr(request.module, "real_processes", False):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for module in (worker_processes, engine_process):
            patch.setattr(module, "start_python", ForkedPython)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--triton", action="append", metavar="FOLDER", help="a Triton to compile with in tests/test_portability.py"
    )

    parser.addoption("--front-ends", type=int, metavar="K", help="front ends of the servers that tests start")


def pytest_configure(config: pytest.Config) -> None:
    front_ends = config.getoption("--front-ends")
    if front_ends is not None:
        # Pytest's other processes inherit it; see `ServerProcess`.
        os.environ["NANOVLLM_TEST_FRONT_ENDS"] = str(front_ends)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "triton" in metafunc.fixturenames:
        folders: list[str] = metafunc.config.getoption("triton") or [""]
        metafunc.parametrize("triton", folders, ids=[Path(folder).name or "installed" for folder in folders])


MakeCheckpoint = Callable[..., Path]


def write_checkpoint(folder: Path, architecture: str = "qwen3", seed: int = 0, **changes: object) -> Path:
    """Write a random model of transformers to a folder; keyword arguments change its config."""
    settings: dict[str, object] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "use_sliding_window": False,
    }
    if architecture == "qwen3":
        settings["head_dim"] = 32
    # By transformers' names: "qwen3" is Qwen3.
    family = architecture[:1].upper() + architecture[1:]
    config_class, model_class = (getattr(transformers, f"{family}{part}") for part in ("Config", "ForCausalLM"))
    torch.manual_seed(seed)
    model = model_class(config_class(**(settings | changes)))
    for name, param in model.named_parameters():
        # Freshly made norms are all ones and biases all zeros, which would hide a wrong one.
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(param, mean=float("norm" in name), std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """`write_checkpoint` to a folder of its own."""

    def make(architecture: str = "qwen3", seed: int = 0, **changes: object) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp(architecture), architecture, seed, **changes)

    return make


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    """An engine of that model on the CPU, for one test."""
    with LLM(checkpoint, device="cpu", max_model_len=128, kvcache_block_size=16, num_kvcache_blocks=40) as llm:
        yield llm


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: MakeCheckpoint) -> Path:
    """A random Qwen3 of two layers."""
    return make_checkpoint()
