"""Compiles what an engine's start would, for a GPU that is not there: `python -m tests.fake_device 80 0.6B bfloat16`.

Tensors are fake, so that the runner, the model and the dispatchers go their own way, and so is the driver that tells
Triton what to compile for. A size that ends in "-fp8" has weights and KV cache in e4m3, one that ends
in "-fp8-block" has weights with scales by blocks, and one that ends in "-int4" weights in four bits. A fourth argument
is the number of ranks that share the model, and compiles for the first; further ones are the names of the kernels to
compile, if not all.

Prints as JSON Triton's version and a list of kernels: their names, how many bytes of shared memory they take, how many
bytes they spill (by ptxas), whether they loop, whether products and sums are fused,
whether they start before the previous kernel ends, which accesses to memory are volatile or of system scope, and bank
conflicts of their operands (see `bank_conflicts.py`).
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext, redirect_stdout
from contextvars import copy_context
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import Olmo2Config, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from nanovllm.config import Config, Dtype
from nanovllm.configs.model import ModelConfig
from nanovllm.configs.quantization import QuantizationConfig
from nanovllm.kernels._triton import to_compile
from nanovllm.models import make_model
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.symmetric_communicator import StepLimits, SymmetricCommunicator, make_buffer
from nanovllm.runner import model_runner
from nanovllm.runner.batch import Staging
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.worker import step_limits
from tests.bank_conflicts import most_conflicts

SHARED_KIB = {"75": 64, "80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "120": 99}
"""Of a block, at most, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
SIZES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    **{
        f"heads-{size}": {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32, "head_dim": size}
        for size in (96, 256, 512)
    },
    "30B-A3B": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
    "3.5-4B": {
        "hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "num_hidden_layers": 4,
    },
    "OLMo-7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
}  # fmt: skip
CONFIGS = {"30B-A3B": Qwen3MoeConfig, "3.5-4B": Qwen3_5TextConfig, "OLMo-7B": Olmo2Config}
"""Of the sizes that are not Qwen3's."""
_ALIGNED = 256


class Properties(NamedTuple):
    """The properties that Triton and the library ask of a device."""

    shared_memory_per_block_optin: int
    multi_processor_count: int = 128


class Driver:
    """Triton's, as far as it takes to compile."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def getitem(x: torch.Tensor, index: Any) -> torch.Tensor:
    """Index a fake tensor; torch's own way asks for the device where torch is built without CUDA."""
    dim = 0
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, int):
            x = x.select(dim, item)
            continue
        if isinstance(item, slice):
            x = torch.ops.aten.slice(x, dim, item.start, item.stop, item.step or 1)
        else:
            x = x.index_select(dim, item)
        dim += 1
    return x


def init_staging(staging: Staging, capacity: int, device: torch.device) -> None:
    staging._device_buffer = torch.zeros(capacity, dtype=torch.int32, device=device)


def send(staging: Staging, parts: list[np.ndarray]) -> list[torch.Tensor]:
    lengths = [len(part) for part in parts]
    return list(staging._device_buffer[: sum(lengths)].split(lengths))


def load_model(
    model_config: ModelConfig,
    communicator: Communicator,
    config: Config,
    folder: str,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Any, None]:
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = make_model(model_config, communicator)
    model.tabulate_rope(max_model_len, device)
    return model, None


class FirstRank(SymmetricCommunicator):
    """Rank 0 of several; the others do not exist."""

    def __init__(self, size: int, device: torch.device, limits: StepLimits) -> None:
        self.size, self._forward_calls = size, limits.forward_calls
        self._buffer = make_buffer(0, size, device, limits)

    def prepare_step(self) -> None:
        """Nothing is cleared, as nothing is sent."""

    def all_reduce_min(self, value: int) -> int:
        return value


def start(capability: str, size: str, dtype: Dtype, num_ranks: int, names: list[str]) -> list[Callable[[], Any]]:
    """Make a runner on the fake device; returns what compiles each kernel of its start, or only `names`."""
    kernels: dict[Any, Callable[[], Any]] = {}

    def record(device: torch.device, runs: Iterable[Callable[[], None]], rank: int, size: int) -> None:
        assert (rank, size) == (0, num_ranks)
        context = copy_context()
        context.run(to_compile.set, kernels)
        for run in runs:
            context.run(run)

    version = int(capability[:-1]), int(capability[-1])
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: num_ranks),
        (torch.cuda, "get_device_capability", lambda device: version),
        (torch.cuda, "get_device_properties", lambda device: Properties(1024 * SHARED_KIB[capability])),
        (FakeTensor, "data_ptr", lambda x: _ALIGNED + x.storage_offset() * x.element_size()),
        (FakeTensor, "__getitem__", getitem),
        (FakeTensor, "__setitem__", lambda x, index, value: None),
        (Staging, "__init__", init_staging),
        (Staging, "send", send),
        (model_runner, "load_model", load_model),
        (model_runner, "free_memory", lambda device: 0),
        (ModelRunner, "_device_guard", lambda runner: nullcontext()),
        (model_runner, "compiler_ready", lambda device: None),
        (model_runner, "compile_ahead", record),
    ]
    has_blocks = size.endswith("-fp8-block")
    is_fp8 = has_blocks or size.endswith("-fp8")
    is_int4 = size.endswith("-int4")
    size = size.removesuffix("-block").removesuffix("-fp8").removesuffix("-int4")
    config_class = CONFIGS.get(size, Qwen3Config)
    usual = {"num_hidden_layers": 2, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    shape = config_class(**usual | SIZES[size])
    shape.architectures = [re.sub("(Text)?Config", "ForCausalLM", config_class.__name__)]
    config = Config(
        "none",
        device="cuda:0",
        dtype=dtype,
        num_kvcache_blocks=1,
        enforce_eager=True,
        kv_cache_dtype="fp8" if is_fp8 else "auto",
    )
    with ExitStack() as stack:
        for target, name, value in replaced:
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(FakeTensorMode())
        model, communicator = ModelConfig.from_hf(shape), Communicator()
        if has_blocks:
            model = replace(model, quantization=QuantizationConfig("block", is_stored=True))
        elif is_fp8 or is_int4:
            model = model.with_quantization("int4" if is_int4 else "fp8")
        if num_ranks > 1:
            limits = step_limits(config, model)
            assert limits is not None
            communicator = FirstRank(num_ranks, torch.device("cuda:0"), limits)
        ModelRunner(config, model, "none", communicator=communicator, max_model_len=config.max_model_len)
    return [compiles for (kernel, _), compiles in kernels.items() if not names or kernel.__name__ in names]


def compiled(compiles: Callable[[], Any]) -> dict[str, Any]:
    log = io.StringIO()
    with redirect_stdout(log):
        kernel = compiles()
    (spilled,) = re.findall(r"(\d+) bytes spill stores", log.getvalue())
    loops = re.search(r"scf\.(for|while)", kernel.asm["ttgir"]) is not None
    accesses = re.findall(r"\b(?:ld|st)\.[\w.:]*(?:volatile|sys)[\w.:]*", kernel.asm["ptx"])
    return {
        "name": kernel.name,
        "shared_bytes": kernel.metadata.shared,
        "spilled_bytes": int(spilled),
        "loops": loops,
        "fp_fusion": kernel.metadata.enable_fp_fusion,
        "launch_pdl": kernel.metadata.launch_pdl,
        "accesses": sorted(set(accesses)),
        "conflicts": most_conflicts(kernel.asm["ttgir"]),
    }


def main() -> None:
    capability, size, given, *more = sys.argv[1:]
    dtype: Any = given
    driver.set_active(Driver(int(capability)))
    knobs.nvidia.dump_ptxas_log = True
    jobs = start(capability, size, dtype, int(more[0]) if more else 1, more[1:])
    print(json.dumps({"triton": triton.__version__, "kernels": [compiled(compiles) for compiles in jobs]}))


if __name__ == "__main__":
    main()
