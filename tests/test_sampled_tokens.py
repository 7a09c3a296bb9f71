"""Temperature and seed on their way from a request to its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from tests.conftest import MakeCheckpoint

# No multiple of the 64 tokens that are drawn from together.
VOCAB_SIZE = 310


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with make_llm(folder, None) as llm:
        yield llm


def make_llm(folder: Path, seed: int | None) -> LLM:
    return LLM(folder, device="cpu", max_model_len=64, kvcache_block_size=16, num_kvcache_blocks=20, seed=seed)


def sample(llm: LLM, seeds: list[int | None], temperature: float = 1.0) -> list[list[int]]:
    """The tokens of one prompt by each of the seeds."""
    params = [SamplingParams(temperature, max_tokens=30, ignore_eos=True, seed=seed) for seed in seeds]
    return [output["token_ids"] for output in llm.generate([[1]] * len(seeds), params, use_tqdm=False)]


# 1e39 is no float32, and 3e38 times the noise is none.
@pytest.mark.parametrize("temperature", [1e300, 1e39, 3e38])
def test_no_temperature_draws_an_id_outside_the_vocabulary(llm: LLM, temperature: float) -> None:
    tokens = [token for drawn in sample(llm, list(range(8)), temperature) for token in drawn]
    assert min(tokens) >= 0 and max(tokens) < VOCAB_SIZE
    # Of 240 draws from 310 tokens that are equally likely, 167 differ on average, and 140 nearly always.
    assert len(set(tokens)) > 140


def test_each_seed_repeats_and_all_its_bits_count(llm: LLM) -> None:
    # The lowest, the highest, and such as differ in one word of 32 bits or in the first bit of one.
    seeds: list[int | None] = [0, 2**64 - 1, 5, 5 + 2**32, 2**32, 5 + 2**31, 5 + 2**63]
    first = sample(llm, seeds)
    assert sample(llm, seeds) == first
    assert len({tuple(tokens) for tokens in first}) == len(seeds)


def test_an_engine_with_a_seed_repeats_and_one_without_does_not(folder: Path) -> None:
    runs = []
    for seed in (0, 0, 1, None, None):
        with make_llm(folder, seed) as llm:
            runs.append(sample(llm, [None, None]))
    assert runs[0] == runs[1]
    # Two requests of each of four different engines.
    assert len({tuple(tokens) for run in runs for tokens in run}) == 8
