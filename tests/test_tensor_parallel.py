"""Several ranks, over gloo on the CPU: the same tokens as one, whatever is asked of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import HashStore  # type: ignore[attr-defined]

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.parallel import symmetric_communicator as symmetric
from nanovllm.parallel.distributed_communicator import DistributedCommunicator
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.utils.device import resolve_device
from tests.cache_checks import check_blocks
from tests.conftest import MakeCheckpoint
from tests.rank_processes import rank_pids
from tests.reference import prompts as random_prompts
from tests.test_live_weights import save_adapter

# Each test starts several processes, on however few cores.

# The last rank's share of the vocabulary is part padding; of the MLP's columns the last rank has what is left over.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2},
    "qwen2-tied": {
        "architecture": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96,
        "intermediate_size": 104, "tie_word_embeddings": True, "num_hidden_layers": 1,
    },
}  # fmt: skip
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "seed": 0}
# Steps that decode some sequences beside chunks of others' prompts, in a cache too small for all.
TIGHT = SETTINGS | {"max_num_batched_tokens": 32, "max_num_seqs": 6, "num_kvcache_blocks": 16}


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[tuple[list[int], int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(output["token_ids"], output["num_cached_tokens"]) for output in outputs]


def everything(llm: LLM) -> list[list[tuple[list[int], int]]]:
    """Mixed steps with preemption, greedy and drawn; then shared prefixes, cold and warm."""
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    drawn = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    mixed = random_prompts((31, 40, 33, 47, 15, 17, 1, 33), seed=1)
    (prefix,) = random_prompts((64,), seed=2)
    shared = [prefix, prefix, prefix[:48] + mixed[0]]
    runs = [generate(llm, mixed, greedy), generate(llm, mixed, drawn)]
    assert llm.stats()["num_preemptions"] > 0
    runs += [generate(llm, shared, greedy), generate(llm, shared, drawn)]
    assert sum(cached for _, cached in runs[2]) > 0 and sum(cached for _, cached in runs[3]) > 64
    check_blocks(llm.llm_engine.block_manager)
    return runs


@pytest.mark.parametrize(("model", "size"), [pytest.param("qwen3", 2, marks=pytest.mark.compat), ("qwen2-tied", 3)])
def test_any_number_of_ranks_says_the_same(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, model: str, size: int
) -> None:
    folder, other = (make_checkpoint(seed=seed, **MODELS[model]) for seed in (0, 1))
    # New weights, too, in the engine that lives: with an adapter, from tensors, and from a folder.
    base = load_file(folder / "model.safetensors")
    num_changed = sum(tensor is not base[name] for name, tensor in save_adapter(tmp_path, base, 1).items())
    weights, prompts = load_file(other / "model.safetensors"), random_prompts((3, 40), seed=3)

    def with_others(llm: LLM) -> list[list[tuple[list[int], int]]]:
        runs = []
        for source, count in (
            (tmp_path, num_changed),
            (weights, len(weights)),
            (folder, len(weights)),
            (other, len(weights)),
        ):
            assert llm.load_weights(source, strict=True) == count and llm.reset_prefix_cache()
            runs.append(generate(llm, prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)))
        assert runs[1] == runs[3] != runs[2] != runs[0]
        return runs

    with LLM(folder, **TIGHT) as llm:
        want, others = everything(llm), with_others(llm)
    with LLM(folder, tensor_parallel_size=size, **TIGHT) as llm:
        assert len(rank_pids()) == size - 1 and llm.llm_engine._runner is not None
        # As on GPUs, a step is launched before the one before it has been taken in.
        llm.llm_engine._runner.pipeline_depth = size - 2
        assert everything(llm) == want
        check_calls(llm, size)
        assert with_others(llm) == others
    assert not rank_pids()


def check_calls(llm: LLM, size: int) -> None:
    """A call has a reply or an exception of every rank; one that failed disturbs neither the next one nor a step."""
    runner: Any = llm.llm_engine._runner
    shards = runner.call(ModelRunner.__getattribute__, "shard")
    assert [shard.kv_heads.start for shard in shards] == [0, *(shard.kv_heads.stop for shard in shards[:-1])]
    with pytest.raises(RuntimeError, match=r"(?s)a call failed on rank 1:\nTraceback.*no_such_attribute"):
        runner.call(ModelRunner.__getattribute__, "no_such_attribute", own=list)
    assert runner.call(ModelRunner.check) == [None] * size


@pytest.fixture
def taken_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """torch's usual port, taken by another socket, and named in the environment."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port: int = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        yield port


class Roomy(DistributedCommunicator):
    """A rank with room for more blocks than the others."""

    def all_reduce_min(self, value: int) -> int:
        return super().all_reduce_min(value + 10**9)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.compat)])
def test_the_bundled_model_on_ranks_and_other_engines_beside_it(
    taken_port: int, checkpoint: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric, "DistributedCommunicator", Roomy)
    prompts = ["introduce yourself", "list all prime numbers within 100", "12 + 34"]
    # The room that these sequences take is free on any machine; engines with less of it have fewer blocks.
    settings = SETTINGS | {"max_num_seqs": 4}
    with LLM(BUNDLED_MODEL, tensor_parallel_size=size, **settings) as llm, LLM(BUNDLED_MODEL, **settings) as alone:
        params = SamplingParams(0.8, max_tokens=5, ignore_eos=True, seed=7)
        want = alone.generate(prompts, params, use_tqdm=False)
        assert llm.generate(prompts, params, use_tqdm=False) == want
        # The ranks with the least room decide.
        assert llm.stats()["num_free_blocks"] == alone.stats()["num_free_blocks"] > 0
        with LLM(BUNDLED_MODEL, tensor_parallel_size=2, **settings) as beside:
            assert beside.generate(prompts, params, use_tqdm=False) == want
        assert llm.generate(prompts, params, use_tqdm=False)[0]["token_ids"] == want[0]["token_ids"]


def test_the_programs_own_process_group_is_left_alone(checkpoint: Path) -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    own, params = dist.group.WORLD, SamplingParams(temperature=0, max_tokens=3)
    try:
        with LLM(checkpoint, **SETTINGS) as llm, LLM(checkpoint, tensor_parallel_size=2, **SETTINGS) as parallel:
            want = llm.generate([[1, 2, 3]], params, use_tqdm=False)
            assert parallel.generate([[1, 2, 3]], params, use_tqdm=False) == want
        assert dist.group.WORLD is own
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_torch_and_the_environment_are_left_alone(checkpoint: Path) -> None:
    def state() -> tuple[Any, ...]:
        torch_state = torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device()
        return *torch_state, torch.is_grad_enabled(), dict(os.environ)

    before, descriptors = state(), len(os.listdir("/dev/fd"))
    for _ in range(2):
        with LLM(checkpoint, tensor_parallel_size=2, dtype="bfloat16", **SETTINGS) as llm:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
            assert state() == before
        assert state() == before and not dist.is_initialized()
        # The first engine also opens what the process keeps; each one's own is closed again.
        descriptors, opened = len(os.listdir("/dev/fd")), descriptors
    assert descriptors <= opened


def test_ranks_take_gpus_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert resolve_device("cuda").index == 2
    assert [resolve_device(name, 1, 2).index for name in ("auto", "cuda", "cuda:1")] == [1, 1, 2]
    for name, size in (("auto", 4), ("cuda", 4), ("cuda:1", 3), ("cuda:2", 2)):
        with pytest.raises(ValueError, match=f"with tensor_parallel_size={size}, but there are 3 CUDA devices"):
            resolve_device(name, 0, size)
