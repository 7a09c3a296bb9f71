"""Kernels that start before the one ahead has ended give the same bits as kernels that wait for its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MakeCheckpoint

pytestmark = pytest.mark.gpu

PROGRAM = """
import sys
import torch
from nanovllm import LLM, SamplingParams

generator = torch.Generator().manual_seed(0)
def prompts(*lengths):
    return [torch.randint(5000, (n,), generator=generator).tolist() for n in lengths]

batches = [prompts(5), prompts(300), prompts(*[40] * 8), prompts(*range(3, 203, 4)), prompts(*[20] * 200, 1000)]
shared = prompts(512)[0]
batches.append([shared + prompt for prompt in prompts(*[9] * 64)])
with LLM(sys.argv[1], device="cuda", dtype="bfloat16", max_model_len=2048, num_kvcache_blocks=500, seed=0) as llm:
    for batch in batches:
        for asked in ({}, {"logprobs": 2}):
            params = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, **asked)
            for output in llm.generate(batch, params, use_tqdm=False):
                print(output["token_ids"], output.outputs[0].logprobs)
"""


@pytest.fixture(scope="module", params=["qwen3", "Qwen3Moe"])
def folder(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint) -> Path:
    """Of Qwen3-0.6B's sizes, for which most kernels of few and of many rows are chosen."""
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "norm_topk_prob": True}
    return make_checkpoint(
        request.param, vocab_size=5000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
        initializer_range=0.05, **(experts if request.param == "Qwen3Moe" else {}),
    )  # fmt: skip


def run(folder: Path, setting: dict[str, str]) -> str:
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "NANOVLLM_PDL"} | setting
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bits_are_the_same_with_and_without_early_starts(folder: Path) -> None:
    early, late = run(folder, {}), run(folder, {"NANOVLLM_PDL": "wait"})
    assert len(early.splitlines()) == 2 * (1 + 1 + 8 + 50 + 201 + 64)
    assert early == late
