"""Sampling parameters through the engine, against transformers' processors on the same logits."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.request import RequestLimits
from nanovllm.sampling.state import SamplingState
from nanovllm.sampling_params import SamplingExtra
from tests.conftest import MakeCheckpoint
from tests.reference import check_logprobs, processed, prompt, reference_logits
from tests.streams import check_same

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "kvcache_block_size": 16, "seed": 0}
# Chunks of prompts beside decodes, and too few blocks for all.
TIGHT = SETTINGS | {"max_num_batched_tokens": 24, "max_num_seqs": 8, "num_kvcache_blocks": 17}
EOS = 3
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.7, "presence_penalty": 0.7, "frequency_penalty": -0.4}


@pytest.fixture(scope="module")
def folder(make_checkpoint: Any) -> Path:
    path: Path = make_checkpoint(eos_token_id=EOS)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, num_kvcache_blocks=200, **SETTINGS)


# Few tokens are likely, so that penalties, biases and EOS matter; three of them are.
FEW = list(range(3, 12))
GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -2.0},
    "bias": {"logit_bias": {17: 6.5, 200: 6.0, 5: -3.0}},
    "allowed": {"allowed_token_ids": FEW},
    "min_tokens": {"allowed_token_ids": FEW, "logit_bias": {EOS: 50, 7: 40}, "min_tokens": 3, "stop_token_ids": [7]},
    "all": {**PENALTIES, "logit_bias": {9: 4.0, 300: 3.0}, "allowed_token_ids": [*FEW, 300], "min_tokens": 2},
}


@pytest.mark.parametrize("given", GREEDY.values(), ids=GREEDY)
def test_greedy_tokens_are_the_argmax_of_transformers_processors(llm: LLM, folder: Path, given: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, **given)
    tokens = prompt(30, seed=1)
    (output,) = llm.generate([tokens], params, use_tqdm=False)
    got = output.outputs[0].token_ids
    want = processed(folder, params, len(tokens), tokens + got, [EOS]).argmax(1).tolist()
    assert got == want
    ends = {EOS, *(params.stop_token_ids or [])} & set(got)
    assert len(got) == 20 if not ends else got.index(min(ends, key=got.index)) == len(got) - 1
    plain = llm.generate([tokens], SamplingParams(0, 20), use_tqdm=False)[0].outputs[0].token_ids
    # The parameters matter here.
    assert (got != plain) == bool(given)
    if params.min_tokens == 3:
        assert len(got) == 4 and output.outputs[0].finish_reason == "stop"


SAMPLED: list[SamplingParams] = [
    SamplingParams(0.8, 20, seed=1, top_k=20, ignore_eos=True, logprobs=5),
    SamplingParams(1.2, 20, seed=2, top_p=0.7, logprobs=0, ignore_eos=True, **PENALTIES),
    SamplingParams(0.5, 20, seed=3, min_p=0.1, logprobs=3, logit_bias={8: 5.0, 9: 5.0}, ignore_eos=True),
    SamplingParams(1.0, 20, seed=4, ignore_eos=True),
    SamplingParams(0, 20, logprobs=2, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(1.5, 20, seed=5, logprobs=20, allowed_token_ids=FEW, min_tokens=8),
    SamplingParams(0.9, 20, seed=6, logprobs=1, top_k=30, top_p=0.8, min_p=0.01, frequency_penalty=2, ignore_eos=True),
    SamplingParams(0, 20, ignore_eos=True),
    SamplingParams(1.0, 20, seed=7, presence_penalty=-2, stop_token_ids=[*range(50, 60)], min_tokens=4),
]
PROMPTS = [prompt(25 + i, seed=i) for i in range(len(SAMPLED))]


def test_rows_keep_their_own_parameters_also_when_preempted(llm: LLM, folder: Path) -> None:
    alone = [llm.generate([p], s, use_tqdm=False)[0] for p, s in zip(PROMPTS, SAMPLED, strict=True)]
    check_same(llm.generate(PROMPTS, SAMPLED, use_tqdm=False), alone)
    with LLM(folder, **TIGHT) as tight:
        check_same(tight.generate(PROMPTS, SAMPLED, use_tqdm=False), alone)
        assert tight.stats()["num_preemptions"] > 0 == tight.stats()["num_used_blocks"]


def test_min_tokens_gives_way_where_nothing_else_may_come(llm: LLM) -> None:
    params = SamplingParams(0, 9, min_tokens=5, allowed_token_ids=[EOS], logprobs=1)
    item = llm.generate([prompt(5, seed=1)], params, use_tqdm=False)[0].outputs[0]
    assert (item.token_ids, item.finish_reason) == ([EOS], "stop")


@pytest.mark.parametrize("mode", [pytest.param("raw_logprobs", marks=pytest.mark.compat), "processed_logprobs"])
def test_two_ranks_sample_as_one(llm: LLM, folder: Path, mode: Any) -> None:
    params = [*SAMPLED, SamplingParams(0, 2, prompt_logprobs=3)]
    prompts = [*PROMPTS, prompt(70, seed=30)]
    with LLM(folder, logprobs_mode=mode, tensor_parallel_size=2, **TIGHT) as two:
        got = two.generate(prompts, params, use_tqdm=False)
        vectors = two.embed(PROMPTS[:2], use_tqdm=False)
    with LLM(folder, logprobs_mode=mode, **TIGHT) as one:
        want = one.generate(prompts, params, use_tqdm=False)
        torch.testing.assert_close(vectors, one.embed(PROMPTS[:2], use_tqdm=False), rtol=1e-4, atol=1e-5)
    check_same(got, want)


@pytest.mark.parametrize("mode", ["processed_logprobs", "scaled_logprobs"])
def test_log_probabilities_are_of_raw_or_of_processed_logits(llm: LLM, folder: Path, mode: Any) -> None:
    asked = [(p, s) for p, s in zip(PROMPTS, SAMPLED, strict=True) if s.logprobs is not None]
    prompts, params = [p for p, _ in asked], [s for _, s in asked]
    with LLM(folder, logprobs_mode=mode, **TIGHT) as tight:
        found = tight.generate(prompts, params, use_tqdm=False)
    for output, raw, param in zip(found, llm.generate(prompts, params, use_tqdm=False), params, strict=True):
        token_ids, start = output.outputs[0].token_ids, len(output.prompt_token_ids)
        whole = output.prompt_token_ids + token_ids
        assert raw.outputs[0].token_ids == token_ids
        check_logprobs(raw, reference_logits(folder, whole)[start - 1 : -1], param.logprobs or 0)
        uncut = dataclasses.replace(param, top_k=0, top_p=1.0, min_p=0.0, min_tokens=0)
        logits = processed(folder, uncut if mode == "scaled_logprobs" else param, start, whole, [EOS])
        check_logprobs(output, logits, param.logprobs or 0)


CUTOFFS: list[dict[str, Any]] = [
    {}, {"top_p": 0.6}, {"min_p": 0.02, "top_k": 15, "top_p": 0.8},
    {"top_k": 12, "logit_bias": {11: 8.0}, **PENALTIES},
]  # fmt: skip


@pytest.mark.parametrize("given", CUTOFFS, ids=lambda given: "-".join(given) or "temperature")
def test_draws_have_the_distribution_of_transformers_warpers(llm: LLM, folder: Path, given: dict[str, Any]) -> None:
    num_draws, tokens = 2000, prompt(4, seed=2)
    params = SamplingParams(1.3, 1, seed=5, n=num_draws // 2, **given)
    other = SamplingParams(1.3, 1, seed=77, n=num_draws // 2, **given)
    outputs = llm.generate([tokens, tokens], [params, other], use_tqdm=False)
    counts = Counter(item.token_ids[0] for output in outputs for item in output.outputs)
    probs = processed(folder, params, len(tokens), [*tokens, 0], [EOS])[0].softmax(0)
    expected = {token: num_draws * p for token, p in enumerate(probs.tolist()) if p > 0}
    assert set(counts) <= set(expected) and sum(counts.values()) == num_draws
    # Cells of fewer than five expected draws are one cell.
    cells = [(counts[token], value) for token, value in expected.items() if value >= 5]
    rest = (num_draws - sum(c for c, _ in cells), num_draws - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    statistic, freedom = sum((count - value) ** 2 / value for count, value in cells), len(cells) - 1
    assert freedom >= 2
    # Chi-square's cube root is nearly normal (Wilson and Hilferty 1931).
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4


def test_minus_one_stands_for_none_and_for_all() -> None:
    params = SamplingParams(seed=-1, logprobs=-1, prompt_logprobs=-1, top_k=-1)
    assert (params.seed, params.top_k) == (None, 0)
    checked = RequestLimits(100, 64, 64, 64, 100).check_params(params)
    assert (checked.logprobs, checked.prompt_logprobs) == (100, 100)
    with pytest.raises(ValueError, match="logprobs=-1, all 100 tokens, is over max_logprobs=20"):
        RequestLimits(100, 64, 64, 64, 20).check_params(params)


@pytest.fixture(scope="module")
def uneven(make_checkpoint: MakeCheckpoint) -> Path:
    # No multiple of the 64 tokens that are drawn from together.
    return make_checkpoint(vocab_size=310)


def draws(llm: LLM, seeds: list[int | None], temperature: float = 1.0) -> list[list[int]]:
    """The tokens of one prompt by each of the seeds."""
    params = [SamplingParams(temperature, max_tokens=30, ignore_eos=True, seed=seed) for seed in seeds]
    return [output["token_ids"] for output in llm.generate([[1]] * len(seeds), params, use_tqdm=False)]


def test_extreme_temperatures_and_seeds(uneven: Path) -> None:
    with LLM(uneven, num_kvcache_blocks=20, **SETTINGS) as llm:
        # 1e39 is no float32, and 3e38 times the noise is none.
        for temperature in (1e300, 1e39, 3e38):
            tokens = [token for drawn in draws(llm, list(range(8)), temperature) for token in drawn]
            assert min(tokens) >= 0 and max(tokens) < 310
            # Of 240 draws from 310 tokens that are equally likely, 167 differ on average, and 140 nearly always.
            assert len(set(tokens)) > 140
        # The lowest, the highest, and such as differ in one word of 32 bits or in the first bit of one.
        seeds: list[int | None] = [0, 2**64 - 1, 5, 5 + 2**32, 2**32, 5 + 2**31, 5 + 2**63]
        first = draws(llm, seeds)
        assert draws(llm, seeds) == first and len({tuple(tokens) for tokens in first}) == len(seeds)


def test_an_engine_with_a_seed_repeats_and_one_without_does_not(uneven: Path) -> None:
    runs = []
    for seed in (0, 0, 1, None, None):
        with LLM(uneven, num_kvcache_blocks=20, **(SETTINGS | {"seed": seed})) as llm:
            runs.append(draws(llm, [None, None]))
    assert runs[0] == runs[1]
    # Two requests of each of four different engines.
    assert len({tuple(tokens) for run in runs for tokens in run}) == 8


def test_rows_are_given_back_when_their_slots_are_taken_again() -> None:
    state = SamplingState(64, torch.device("cpu"), "raw_logprobs")
    params = SamplingParams(presence_penalty=0.5, logit_bias={3: 1.0})
    for turn in range(10):
        extra = SamplingExtra(params, array("i", [turn, 5]), num_prompt_tokens=1)
        for slot in range(3):
            state.add(slot, extra)
        rows = state.rows_of([0, 1, 2], np.full(3, 2))
        assert rows is not None and rows.edits.counts_rows is not None and rows.edits.counts is not None
        assert len(set(rows.edits.counts_rows.tolist())) == 3
        # Nothing is left of the turn before.
        for row in rows.edits.counts_rows.tolist():
            assert rows.edits.counts[row].nonzero().flatten().tolist() == sorted({turn, 5})
    # The least that a pool has; three slots never need more.
    assert len(state._counts.tensor) == len(state._bias.tensor) == 8
    assert len(state._counts._free) == len(state._bias._free) == 5
