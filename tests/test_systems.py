"""Systems without Triton kernels: what is refused, and what runs without them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore  # type: ignore[attr-defined]

from nanovllm import LLM, kernels
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.attention import AttentionSetup, make_backend
from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.attention.sdpa import SdpaBackend
from nanovllm.kernels import _triton
from nanovllm.kernels.e4m3 import Fp8Matrix
from nanovllm.kernels.linear.norm_linear import linear_into, norm_linear
from nanovllm.kernels.policy import FASTEST, LinearKernel
from nanovllm.kernels.rms_norm import Norm
from nanovllm.parallel import symmetric_communicator as symmetric
from nanovllm.runner import model_runner
from nanovllm.runner.memory import cpu_cache_budget
from tests.forked_python import CONTEXT
from tests.server_process import PATIENCE_SECONDS

CUDA = torch.device("cuda", 0)
ELSEWHERE = ("norm_linear_ref",)
"""Ops that are asked about otherwise: in parts, and below."""
# What Windows, macOS, or either of them has not. Triton and torch, which have ways of their own, are imported before.
PROGRAM = """
import multiprocessing.reduction, os, select, signal, sys
sys.modules["triton"] = None
import torch
from transformers import AutoConfig, AutoTokenizer
folder = sys.argv[1]
AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
os_calls = "fork getppid sched_getaffinity sched_yield sysconf sysconf_names WNOHANG"
sys.modules |= dict.fromkeys(["resource", "fcntl"])
for module, names in [(os, os_calls), (signal, "pthread_sigmask SIGKILL SIGCHLD"), (select, "poll epoll"),
                      (multiprocessing.reduction, "DupFd")]:
    for name in names.split():
        delattr(module, name)
from nanovllm import LLM, SamplingParams
with LLM(folder, device="cpu") as llm:
    (output,) = llm.generate(["1 + 1 ="], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
# It takes a third of a second to import.
assert "sympy" not in sys.modules
print(len(output["token_ids"]))
"""


@pytest.fixture(params=["old", "ROCm", "no Triton"])
def obstacle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A CUDA device, as torch calls it, that the kernels are not for; yields a part of what is wrong with it."""
    capability, hip, has_triton, message = {
        "old": ((7, 5), None, True, "they need compute capability 8.0 or more, and cuda:0 has 7.5"),
        "ROCm": ((9, 0), "6.4", True, "they need an NVIDIA GPU, and this PyTorch is built for ROCm 6.4"),
        "no Triton": (
            (9, 0),
            None,
            False,
            "Triton, which PyTorch's CUDA builds for Linux bring along, is not installed",
        ),
    }[request.param]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(_triton, "HAS_TRITON", has_triton)
    _forget_devices()
    yield message
    _forget_devices()


def _forget_devices() -> None:
    _triton.triton_obstacle.cache_clear()
    _triton.is_hopper.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "triton", "flash_attn"])
def test_a_device_that_no_kernel_is_for(obstacle: str, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A message of its own, and no other ValueError of this engine's.
    monkeypatch.setattr(model_runner, "load_model", Mock(side_effect=AssertionError))
    monkeypatch.setattr(model_runner, "compiler_ready", Mock(side_effect=AssertionError))
    with pytest.raises(ValueError, match=f"attention_backend='{backend}' .*{obstacle}.*: take 'sdpa'.*device='cpu'"):
        LLM(BUNDLED_MODEL, attention_backend=backend)


def test_sdpa_takes_every_op_in_plain_torch(obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_backend("sdpa", AttentionSetup(CUDA, torch.float16, 256, 4, [], num_slots=1)), SdpaBackend)
    spec = Paged(2, 1024, 64, None, torch.float16)
    with pytest.warns(UserWarning, match="without CUDA graphs .* at most 512 elements, and a layer has 1024"):
        assert isinstance(
            make_backend("auto", AttentionSetup(CUDA, torch.float16, 256, 4, [spec], num_slots=1)), SdpaBackend
        )
    assert not _triton.is_hopper(CUDA)
    ops = 0
    for info in pkgutil.walk_packages(kernels.__path__, "nanovllm.kernels."):
        # Gluon's are imported where there is a GPU for them.
        if info.name.rsplit(".", maxsplit=1)[-1].startswith(("_gluon", "hopper", "warp")):
            continue
        module = importlib.import_module(info.name)
        for ref in [name for name in vars(module) if name.endswith("_ref")]:
            if getattr(module, ref).__module__ != module.__name__ or ref in ELSEWHERE:
                continue
            op = getattr(module, ref.removesuffix("_ref"))
            plain = Mock()
            monkeypatch.setattr(module, ref, plain)
            needed = [p for p in inspect.signature(op).parameters.values() if p.default is p.empty]
            # A matrix in e4m3 has its device from its values, edited rows of logits from x.
            there = SimpleNamespace(device=CUDA)
            op(*[SimpleNamespace(device=CUDA, values=there, x=there)] * len(needed))
            assert plain.called, ref
            ops += 1
    assert ops == 21


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_products_without_kernels(obstacle: str, rows: int) -> None:
    shapes = (rows, 64), (128, 64), (64, 64), (64,)
    with FakeTensorMode():
        x, gate_up, down, norm = (torch.empty(shape, dtype=torch.float16, device=CUDA) for shape in shapes)
        out, total = norm_linear(x, gate_up, norm=Norm(norm, 1e-6), residual=x, gated=True)
        assert out.shape == x.shape and total.shape == x.shape
        assert linear_into(x, down, x)[0].shape == x.shape
        weight = Fp8Matrix(down, norm.view(-1, 1), 1, 64)
        assert FASTEST.fp8_linear(rows, x.dtype, weight) is LinearKernel.CUBLAS


def test_ranks_without_kernels_of_ours(obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(symmetric, "DistributedCommunicator", Mock(return_value="NCCL"))
    monkeypatch.setattr(symmetric.SymmetricCommunicator, "__init__", Mock(side_effect=AssertionError))
    limits: Any = None
    assert str(symmetric.connect(0, 2, CUDA, HashStore(), limits)) == "NCCL"


def test_systems_that_lack_triton_and_calls_of_linux() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, BUNDLED_MODEL], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "8\n", done.stdout + done.stderr


def test_triton_is_installed_for_tests_alone() -> None:
    # It takes a gigabyte; where it is of use, PyTorch depends on it.
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    needed, extras = text.split("\ndependencies = [")[1].split("[project.optional-dependencies]")
    assert "triton" not in needed and "triton" in extras.split("test = [")[1].split("\n]")[0]


def test_memory_that_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sysconf")
    assert cpu_cache_budget() == 2**30


def test_ranks_are_not_for_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Windows")
    with pytest.raises(RuntimeError, match="tensor_parallel_size=2 needs Linux or macOS, not Windows"):
        LLM(BUNDLED_MODEL, device="cpu", tensor_parallel_size=2)


def test_a_server_needs_no_client_and_no_plots() -> None:
    pytest.importorskip("fastapi")
    # The server's modules are loaded there, and these are not among them.
    process = CONTEXT.Process(target=_make_app)
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0


def _make_app() -> None:
    assert not {"openai", "matplotlib", "anthropic"} & set(sys.modules)
    absent: Any = dict.fromkeys(["openai", "matplotlib", "anthropic"])
    sys.modules |= absent
    create_app = importlib.import_module("nanovllm.serve.app").create_app
    create_app(Mock(settings=importlib.import_module("nanovllm.serve.settings").ServeSettings()))
