"""Greedy output is transformers', token for token, in float32 on the CPU, however the engine gets there."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.attention import sdpa
from tests.cache_checks import check_blocks
from tests.conftest import MakeCheckpoint

MAX_TOKENS = 24
LENGTHS = (1, 15, 16, 17, 31, 33, 64, 255, 256, 257)
MODELS: dict[str, dict[str, Any]] = {
    # An epsilon so large changes the tokens wherever another is taken.
    "untied-4/4": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 0.05},
    "tied-4/2": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    "untied-8/1": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64},
    "qwen2-tied": {"architecture": "qwen2", "tie_word_embeddings": True},
    "qwen2-untied": {"architecture": "qwen2"},
    "yarn": {
        # Some versions of transformers take the factor from the ratio of the two lengths: here they agree.
        "max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        "rope_theta": 10000.0,
    },
}
# What a model computes and how it is scheduled go wrong each by itself: one model has every schedule.
SCHEDULED = "tied-4/2"
SCHEDULES = [(SCHEDULED, depth, block_size) for block_size in (16, 32, 256) for depth in (0, 1)]
CASES = [*((name, 0, 16) for name in MODELS if name != SCHEDULED), *SCHEDULES]
every_model, every_schedule = (
    pytest.mark.parametrize(("model", "depth", "block_size"), cases, indirect=["model"]) for cases in (CASES, SCHEDULES)
)
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(320, (n,), generator=generator).tolist() for n in lengths]


class Reference:
    """What transformers says."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
        self.complete = cache(self._complete)

    def _complete(self, prompt: tuple[int, ...]) -> list[int]:
        token_ids = torch.tensor([prompt])
        output = self.model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint) -> tuple[Path, Reference]:
    folder = make_checkpoint(**MODELS[request.param])
    return folder, Reference(folder)


def check(llm: LLM, reference: Reference, batch: list[list[int]]) -> list[int]:
    """Assert that the engine says what transformers says; return how many tokens of each came from the cache."""
    # Who finds whose blocks depends on the order.
    outputs = llm.generate(batch, PARAMS, use_tqdm=False, schedule="arrival")
    for prompt, output in zip(batch, outputs, strict=True):
        assert output["token_ids"] == reference.complete(tuple(prompt)), f"prompt of {len(prompt)} tokens"
    check_blocks(llm.llm_engine.block_manager, llm.llm_engine.scheduler.sequences)
    assert llm.stats()["num_used_blocks"] == 0
    return [output["num_cached_tokens"] for output in outputs]


def make_llm(folder: Path, **kwargs: Any) -> LLM:
    settings: dict[str, Any] = {"max_model_len": 512, "kvcache_block_size": 16, "num_kvcache_blocks": 200}
    return LLM(folder, **(settings | kwargs))


@every_model
def test_alone_batched_and_resubmitted(model: tuple[Path, Reference], depth: int, block_size: int) -> None:
    folder, reference = model
    with make_llm(folder, kvcache_block_size=block_size, num_kvcache_blocks=6400 // block_size) as llm:
        set_depth(llm, depth)
        for prompt in prompts():
            assert check(llm, reference, [prompt]) == [0]
        # The same ones again, all in one batch, out of the cache as far as whole blocks go.
        cached = check(llm, reference, prompts())
        assert cached == [min(n // block_size * block_size, n - 1) for n in LENGTHS]
    with make_llm(folder, kvcache_block_size=block_size, num_kvcache_blocks=6400 // block_size) as llm:
        set_depth(llm, depth)
        assert not any(check(llm, reference, prompts()))


@every_model
def test_chunked(model: tuple[Path, Reference], depth: int, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Most chunks are then of more queries than are computed at once.
    monkeypatch.setattr(sdpa, "_MAX_QUERIES", 8)
    folder, reference = model
    sizes = {"kvcache_block_size": block_size, "num_kvcache_blocks": 6400 // block_size}
    with make_llm(folder, max_num_batched_tokens=32, max_num_seqs=6, **sizes) as llm:
        set_depth(llm, depth)
        check(llm, reference, prompts())
        assert llm.stats()["num_steps"] > sum(LENGTHS) // 32


@every_schedule
def test_preempted(model: tuple[Path, Reference], depth: int, block_size: int) -> None:
    folder, reference = model
    batch = prompts((31, 33, 64, 100, 15, 16, 17, 2, 1, 31, 33, 64), seed=1)
    if block_size == 256:
        batch = prompts((250, 240, 255, 300), seed=1)
    sizes = {"kvcache_block_size": block_size, "num_kvcache_blocks": max(256 // block_size, 3)}
    with make_llm(folder, max_num_seqs=8, **sizes) as llm:
        set_depth(llm, depth)
        check(llm, reference, batch)
        assert llm.stats()["num_preemptions"] > 0


@every_schedule
def test_shared_prefixes_cold_and_warm(model: tuple[Path, Reference], depth: int, block_size: int) -> None:
    folder, reference = model
    cold, warm = {
        16: ([0, 80, 96, 32, 64, 96], [79, 96, 96, 32, 64, 112]),
        32: ([0, 64, 96, 32, 64, 96], [64, 96, 96, 32, 64, 96]),
        256: ([0] * 6, [0] * 6),
    }[block_size]
    (prefix,) = prompts((100,), seed=2)
    tails = zip((40, 64, 96), prompts((7, 1, 30), 3), strict=True)
    batch = [prefix[:80], prefix, prefix, *(prefix[:n] + tail for n, tail in tails)]
    with make_llm(folder, kvcache_block_size=block_size, num_kvcache_blocks=6400 // block_size) as llm:
        set_depth(llm, depth)
        assert check(llm, reference, batch) == cold
        assert check(llm, reference, batch) == warm


@pytest.mark.parametrize("model", [SCHEDULED], indirect=True)
def test_prefix_caching_off(model: tuple[Path, Reference]) -> None:
    folder, reference = model
    with make_llm(folder, enable_prefix_caching=False) as llm:
        assert check(llm, reference, prompts((64, 64))) == [0, 0]


def set_depth(llm: LLM, depth: int) -> None:
    assert llm.llm_engine._runner is not None
    llm.llm_engine._runner.pipeline_depth = depth
