"""Several GPUs as one engine. Run with `pytest -m gpu` on a machine that has them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.all_reduce import all_reduce_argmax
from tests import symmetric_buffer_ranks
from tests.conftest import MakeCheckpoint
from tests.parallel_engine import Plan, Result
from tests.test_all_reduce_rms_norm import check_step
from tests.test_gpu import prompts

pytestmark = pytest.mark.gpu

NUM_GPUS = torch.cuda.device_count()
SIZES = [size for size in (2, 3, 4, 8) if size <= NUM_GPUS]
SHAPE: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64,
    "num_attention_heads": 16, "num_key_value_heads": 8, "initializer_range": 0.05,
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 64, "num_kvcache_blocks": 300,
    "seed": 0,
}  # fmt: skip
# What some of the requests ask of sampling beyond a temperature.
ASKED: list[dict[str, Any]] = [
    {}, {}, {}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.05, "logprobs": 3}, {"allowed_token_ids": [*range(9, 900, 7)]},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {5: 2.0, 999: 3.0}}, {"hidden_states": [0, 1]},
]  # fmt: skip
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(**SHAPE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_messages_among_streams_of_one_gpu(dtype: torch.dtype) -> None:
    num_ranks = symmetric_buffer_ranks.NUM_RANKS
    memory = torch.zeros(num_ranks, 2**18, dtype=torch.uint8, device="cuda")
    abort = torch.ones(1, dtype=torch.int32, pin_memory=True)
    ranks = [symmetric_buffer_ranks.make_buffer(rank, memory, abort) for rank in range(num_ranks)]
    streams = [torch.cuda.Stream() for _ in ranks]
    steps = symmetric_buffer_ranks.make_steps(dtype, "cuda")
    # Loading a kernel's code and a stream's first memory wait for all that runs: now, while no rank waits for another.
    for buffer, stream in zip(ranks, streams, strict=True):
        with torch.cuda.stream(stream):
            for step in steps:
                symmetric_buffer_ranks.run_step(buffer, step)
        torch.cuda.synchronize()
        buffer.step.zero_()
    memory.zero_()
    abort.zero_()
    for step in steps:
        torch.cuda.synchronize()
        results = []
        for buffer, stream in zip(ranks, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(symmetric_buffer_ranks.run_step(buffer, step))
        torch.cuda.synchronize()
        check_step(results, step)


@pytest.mark.parametrize("call", range(4))
def test_a_rank_that_waits_alone_ends_when_it_is_told_to(call: int) -> None:
    memory = torch.zeros(symmetric_buffer_ranks.NUM_RANKS, 2**18, dtype=torch.uint8, device="cuda")
    abort = torch.ones(1, dtype=torch.int32, pin_memory=True)
    buffer = symmetric_buffer_ranks.make_buffer(0, memory, abort)
    step = symmetric_buffer_ranks.make_steps(torch.bfloat16, "cuda")[0]

    def run() -> None:
        buffer.step.add_(1)
        if call == len(step.calls):
            all_reduce_argmax(step.scores[0], step.tokens[0], buffer, 0)
        else:
            case = step.calls[call]
            symmetric_buffer_ranks.reduce(case, case.parts[0], buffer, call)
        torch.cuda.synchronize()

    run()
    abort.zero_()
    threading.Timer(0.3, lambda: abort.fill_(1)).start()
    started = time.monotonic()
    run()
    assert 0.2 < time.monotonic() - started < 2


def run_engines(tmp_path: Path, plan: Plan) -> list[Result]:
    """Run a plan's engines in a process of their own."""
    files = [tmp_path / "plan", tmp_path / "results"]
    files[0].write_bytes(pickle.dumps(plan))
    command = [sys.executable, "-m", "tests.parallel_engine", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
    results: list[Result] = pickle.loads(files[1].read_bytes())
    return results


def communicators(size: int, plan: Plan) -> list[str]:
    """The communicators that the plan's engines should have."""
    reachable = all(torch.cuda.can_device_access_peer(a, b) for a, b in permutations(range(size), 2))
    ours, nccl = "SymmetricCommunicator" if reachable else "DistributedCommunicator", "DistributedCommunicator"
    return [nccl if uses_nccl else ours for _, uses_nccl in plan.engines]


# Of OLMo 2 a step has an even number of all-reduces, some of them of two numbers a row.
@pytest.mark.parametrize("model", [{}, {"architecture": "Olmo2", "num_hidden_layers": 3, "pad_token_id": 0}])
@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_those_of_one_gpu_in_engines_side_by_side(
    model: dict[str, Any], make_checkpoint: MakeCheckpoint, tmp_path: Path, size: int
) -> None:
    folder = make_checkpoint(**(SHAPE | model))
    batch = prompts((1, 5, 64, 100, 255, 256, 257, 300, *range(20, 80)), seed=1)
    params = [SamplingParams(temperature=0.8 * (i % 2), max_tokens=30, ignore_eos=True, seed=i, **ASKED[i % len(ASKED)])
              for i in range(len(batch))]  # fmt: skip
    with LLM(folder, **SETTINGS) as llm:
        want = [output["token_ids"] for output in llm.generate(batch, params, use_tqdm=False)]
    shared = SETTINGS | {"tensor_parallel_size": size, "max_num_batched_tokens": 300}
    engines = [(shared | {"enforce_eager": eager}, nccl) for nccl in (False, True) for eager in (False, True)]
    plan = Plan(str(folder), engines, batch, params)
    results = run_engines(tmp_path, plan)
    assert [result["communicator"] for result in results] == communicators(size, plan)
    for result in results:
        assert result["rounds"] == [want, want]


@needs_two
def test_two_engines_at_once_on_the_same_gpus(folder: Path, tmp_path: Path) -> None:
    """Each one's kernels wait for their other rank while the other one's want the same multiprocessors."""
    batch = prompts((300, *range(20, 80)), seed=3)
    params = [SamplingParams(temperature=0.8, max_tokens=100, ignore_eos=True, seed=i) for i in range(len(batch))]
    with LLM(folder, **SETTINGS) as llm:
        want = [output["token_ids"] for output in llm.generate(batch, params, use_tqdm=False)]
    plan = Plan(str(folder), [(SETTINGS | {"tensor_parallel_size": 2}, False)], batch, params)
    folders = [tmp_path / "first", tmp_path / "second"]
    for place in folders:
        place.mkdir()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda place: run_engines(place, plan), folders))
    for (result,) in results:
        assert result["communicator"] == communicators(2, plan)[0] and result["rounds"] == [want, want]


@pytest.mark.parametrize("size", SIZES)
def test_bf16_logits_are_as_near_to_float32_as_transformers(folder: Path, tmp_path: Path, size: int) -> None:
    batch = prompts((20, 64, 150, 202), seed=2)
    model = AutoModelForCausalLM.from_pretrained(folder).float().cuda().eval()
    with torch.inference_mode():
        tokens = [torch.tensor([prompt], device="cuda") for prompt in batch]
        exact = torch.cat([model(row).logits[:, -1] for row in tokens]).cpu()
        model.bfloat16()
        theirs = torch.cat([model(row).logits[:, -1].float() for row in tokens]).cpu()
    settings = SETTINGS | {"tensor_parallel_size": size, "dtype": "bfloat16", "enforce_eager": True}
    params = [SamplingParams(temperature=0, max_tokens=1)] * len(batch)
    plan = Plan(str(folder), [(settings, False), (settings, True)], batch, params, logits=True)
    results = run_engines(tmp_path, plan)
    assert [result["communicator"] for result in results] == communicators(size, plan)
    for result in results:
        logits = result["logits"]
        assert logits is not None
        width = min(logits.shape[1], SHAPE["vocab_size"])
        ours, right, torchs = (tensor[:, :width] for tensor in (logits, exact, theirs))
        assert (ours - right).norm() <= 2 * (torchs - right).norm()
        assert (ours - right).abs().max() <= 2 * (torchs - right).abs().max()


KILLER = """
    import faulthandler, os, signal, sys, threading, time
    import torch
    from nanovllm import LLM, SamplingParams
    from tests.rank_processes import rank_pids

    def kill():
        if sys.argv[2] == "construction":
            while not rank_pids():
                time.sleep(0.01)
            time.sleep(float(sys.argv[3]))
        victim = rank_pids()[1]
        print("killing", time.monotonic(), flush=True)
        os.kill(victim, signal.SIGKILL)

    if __name__ == "__main__":
        # Should it hang, its output says where.
        faulthandler.dump_traceback_later(90, exit=True)
        if sys.argv[2] == "construction":
            threading.Thread(target=kill).start()
        settings = dict(device="cuda", tensor_parallel_size=2, max_model_len=512, gpu_memory_utilization=0.3)
        prompts, params = [[1, 2, 3]] * 8, SamplingParams(max_tokens=500, ignore_eos=True)
        if sys.argv[4:] == ["nccl"]:
            torch.cuda.can_device_access_peer = lambda a, b: False
        if sys.argv[4:] == ["copies"]:
            # Blocks leave the GPU and come back all the time.
            settings |= dict(swap_space=1.0, num_kvcache_blocks=60, kvcache_block_size=16)
            prompts, params = [[i] * 300 for i in range(24)], SamplingParams(max_tokens=4, ignore_eos=True)
        try:
            llm = LLM(sys.argv[1], **settings)
            llm.generate(prompts, params, use_tqdm=False)
            while sys.argv[4:] == ["copies"] and not llm.stats()["num_loaded_blocks"]:
                llm.generate(prompts, params, use_tqdm=False)
            threading.Timer(1.0, kill).start()
            while True:
                llm.generate(prompts, params, use_tqdm=False)
        except Exception as error:
            print("raised", time.monotonic(), "SIGKILL" in str(error), str(error)[:300].replace("\\n", " "), flush=True)
        assert not rank_pids()
"""


# In generate, or after that number of seconds of construction; with our kernels for collectives, or with NCCL; or while
# blocks are copied.
MOMENTS = ["generate 0", "construction 1", "construction 10", "generate 0 nccl", "generate 0 copies"]


@needs_two
def test_weights_that_change_reach_every_rank(folder: Path, make_checkpoint: MakeCheckpoint) -> None:
    other = make_checkpoint(seed=1, **SHAPE)
    params = SamplingParams(temperature=0, max_tokens=30)
    asked = prompts((5, 40, 200), seed=1)
    with LLM(other, **SETTINGS) as llm:
        expected = [output["token_ids"] for output in llm.generate(asked, params, use_tqdm=False)]
    weights = {name: tensor.cuda() for name, tensor in load_file(other / "model.safetensors").items()}
    with LLM(folder, tensor_parallel_size=2, **SETTINGS) as llm:
        before = [output["token_ids"] for output in llm.generate(asked, params, use_tqdm=False)]
        assert llm.load_weights(weights, strict=True) == len(weights)
        llm.reset_prefix_cache()
        assert [output["token_ids"] for output in llm.generate(asked, params, use_tqdm=False)] == expected != before


@needs_two
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_rank_fails_the_engine_and_frees_the_gpus(folder: Path, tmp_path: Path, moment: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLER))
    free = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    command = [sys.executable, str(script), str(folder), *moment.split()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    assert "raised" in lines and lines["raised"][2] == "True", done.stdout[-2000:] + done.stderr[-2000:]
    assert float(lines["raised"][1]) - float(lines["killing"][1]) < 5
    assert all(torch.cuda.mem_get_info(i)[0] >= free[i] - 2**28 for i in range(2))
