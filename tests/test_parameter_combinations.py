"""Parameters that cannot be served, and any combination of those that can."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import BeamSearchParams, StructuredOutputsParams
from tests.cache_checks import check_blocks
from tests.conftest import MakeCheckpoint
from tests.examples import num_examples

# Half the blocks that the longest requests need together, and chunks of their prompts.
TIGHT: dict[str, Any] = {
    "device": "cpu", "max_model_len": 128, "kvcache_block_size": 16, "num_kvcache_blocks": 9, "seed": 0,
    "max_num_batched_tokens": 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(make_checkpoint: MakeCheckpoint) -> Iterator[LLM]:
    folder = make_checkpoint(vocab_size=512, num_hidden_layers=1, eos_token_id=[2, 0])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(BUNDLED_MODEL) / name, folder)
    with LLM(folder, **TIGHT) as llm:
        yield llm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be >= 1, not 0"),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"temperature": 10**400}, "temperature must be a finite number"),
        ({"temperature": -0.1}, "temperature must be a finite number >= 0, not -0.1"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, not 'no'"),
        ({"seed": -2}, "seed must be"),
        ({"seed": 2**64}, "seed must be"),
        ({"n": 0}, "n must be >= 1, not 0"),
        ({"n": 2, "temperature": 0}, "n=2 with temperature=0"),
        ({"top_p": 0}, "top_p must be a finite number > 0 and <= 1, not 0"),
        ({"top_p": 1.01}, "> 0 and <= 1, not 1.01"),
        ({"top_k": -2}, "top_k must be >= -1, not -2"),
        ({"top_k": 1.5}, "top_k must be an integer >= -1, not 1.5"),
        ({"min_p": -0.1}, "min_p must be a finite number >= 0 and <= 1, not -0.1"),
        ({"min_p": 1.1}, ">= 0 and <= 1, not 1.1"),
        ({"presence_penalty": 2.1}, "presence_penalty must be a finite number >= -2 and <= 2, not 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be a finite number >= -2 and <= 2, not -2.1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number > 0, not 0"),
        ({"logit_bias": [1]}, "logit_bias maps token ids to numbers, not [1]"),
        ({"logit_bias": {5: 101}}, "a value of logit_bias must be a finite number >= -100 and <= 100, not 101"),
        ({"logit_bias": {-1: 1}}, "a token id of logit_bias must be >= 0, not -1"),
        ({"logit_bias": {"x": 1}}, "a token id of logit_bias must be an integer >= 0, not 'x'"),
        ({"bad_words": "abc"}, "bad_words must be a list of strings that are not empty, not 'abc'"),
        ({"bad_words": [""]}, "bad_words must be a list of strings that are not empty"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list of token ids, not 5"),
        ({"stop_token_ids": [True]}, "an id of stop_token_ids must be an integer >= 0, not True"),
        ({"stop_token_ids": [-1]}, "an id of stop_token_ids must be >= 0, not -1"),
        ({"min_tokens": -1}, "min_tokens must be >= 0, not -1"),
        ({"min_tokens": 65}, "min_tokens=65 is over max_tokens=64"),
        ({"stop": ["a", ""]}, "stop must be a list of strings that are not empty"),
        ({"stop": 5}, "stop must be a list of strings"),
        ({"stop": "a", "detokenize": False}, "stop=['a'] needs text, but detokenize=False"),
        ({"logprobs": -2}, "logprobs must be >= -1, not -2"),
        ({"prompt_logprobs": -2}, "prompt_logprobs must be >= -1, not -2"),
        ({"prompt_logprobs_start": -1}, "prompt_logprobs_start must be >= 0, not -1"),
        ({"skip_special_tokens": 1}, "skip_special_tokens must be True or False, not 1"),
        ({"top_q": 1}, "unknown argument top_q; SamplingParams takes temperature"),
        ({"self": 1}, "unknown argument self; SamplingParams takes temperature"),
    ],
)  # fmt: skip
def test_values_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**settings)
    params = SamplingParams()
    for name, value in settings.items():
        setattr(params, name, value)
    if "unknown" not in message:
        with pytest.raises(ValueError, match=re.escape(message)):
            params.checked()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": {512: 1}}, r"logit_bias: token id 512 is outside the vocabulary, 0 \.\.\. 511"),
        ({"allowed_token_ids": [1, 900]}, "allowed_token_ids: token id 900 is outside"),
        ({"stop_token_ids": [512]}, "stop_token_ids: token id 512 is outside"),
        ({"prompt_logprobs_start": 4}, "prompt_logprobs_start=4 is over the prompt's 3 tokens"),
    ],
)
def test_values_beyond_the_model(llm: LLM, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([[1, 2, 3]], SamplingParams(0, 2, **settings))
    assert llm.is_finished()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam_width": 0}, r"beam_width must be in 1 \.\.\. 10, not 0"),
        ({"beam_width": 11}, r"beam_width must be in 1 \.\.\. 10, not 11"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, not 0"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"temperature": -0.5}, "temperature must be"),
        ({"length_penalty": math.inf}, "length_penalty must be a finite number, not inf"),
        ({"early": 1}, "unknown argument early; BeamSearchParams takes beam_width"),
    ],
)
def test_bad_beam_search_params(settings: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"beam_width": 2, "max_tokens": 4}
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**(good | settings))


TOKEN_IDS = st.lists(st.integers(0, 511), min_size=1, max_size=6)


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    """One parameter in four is not at its default."""

    def maybe(name: str, values: st.SearchStrategy[Any]) -> None:
        if draw(st.integers(0, 3)) == 0:
            chosen[name] = draw(values)

    chosen: dict[str, Any] = {"temperature": draw(st.sampled_from([0.0, 0.3, 1.0, 5.0])), "max_tokens": 40}
    maybe("n", st.integers(1, 3))
    maybe("seed", st.integers(0, 2**64 - 1))
    maybe("top_k", st.integers(-1, 600))
    maybe("top_p", st.sampled_from([1e-9, 0.5, 1.0]))
    maybe("min_p", st.sampled_from([0.0, 0.3, 1.0]))
    for name in ("presence_penalty", "frequency_penalty"):
        maybe(name, st.sampled_from([-2.0, 0.5, 2.0]))
    maybe("repetition_penalty", st.sampled_from([0.01, 1.3, 1000.0]))
    maybe("logit_bias", st.dictionaries(st.integers(0, 511), st.sampled_from([-100.0, 5.0, 100.0]), max_size=4))
    maybe("bad_words", st.lists(st.sampled_from(["tiny", "nano vllm", "é", "ab"]), max_size=2))
    maybe("allowed_token_ids", TOKEN_IDS)
    maybe("min_tokens", st.integers(0, 40))
    maybe("stop", st.lists(st.sampled_from(["a", " t", "é", ", h"]), max_size=2))
    maybe("include_stop_str_in_output", st.booleans())
    maybe("stop_token_ids", TOKEN_IDS)
    maybe("logprobs", st.integers(0, 20))
    maybe("prompt_logprobs", st.integers(0, 20))
    maybe("ignore_eos", st.booleans())
    maybe("skip_special_tokens", st.booleans())
    if "stop" not in chosen:
        maybe("detokenize", st.booleans())
    # Together they can leave nothing that may come.
    if not {"allowed_token_ids", "bad_words"} & set(chosen):
        grammars: list[dict[str, Any]] = [
            {"regex": "[a-e]{2,30}é"},
            {"choice": ["ab", "é tiny"]},
            {"json_object": True},
        ]
        maybe("structured_outputs", st.sampled_from(grammars).map(lambda fields: StructuredOutputsParams(**fields)))
    if chosen["temperature"] == 0:
        chosen.pop("n", None)
    return SamplingParams(**chosen)


def obeys(output: RequestOutput, params: SamplingParams, llm: LLM) -> None:
    """Check an output against what its parameters say."""
    assert output.finished and len(output.outputs) == params.n
    if params.prompt_logprobs is not None:
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    ends = (set() if params.ignore_eos else set(llm.eos_token_ids)) | set(params.stop_token_ids or [])
    for item in output.outputs:
        tokens = item.token_ids
        assert 1 <= len(tokens) <= 40 and (item.finish_reason == "length") <= (len(tokens) == 40)
        assert not ends & set(tokens[:-1])
        if params.allowed_token_ids is not None:
            assert set(tokens) <= set(params.allowed_token_ids)
        if params.logprobs is not None:
            assert item.logprobs is not None and all(t in at for t, at in zip(tokens, item.logprobs, strict=True))
            values = [value.logprob for at in item.logprobs for value in at.values()]
            assert max(values) <= 1e-5 and not math.isnan(sum(values))
        if isinstance(item.stop_reason, str):
            assert len(tokens) > params.min_tokens
            # One that was complete before `min_tokens` stays.
            assert params.min_tokens or (item.stop_reason in item.text) == params.include_stop_str_in_output
        obeys_ends(item, params, ends)
        if not params.detokenize:
            assert item.text == ""


def obeys_ends(item: CompletionOutput, params: SamplingParams, ends: set[int]) -> None:
    is_end = item.token_ids[-1] in ends
    assert is_end <= (item.finish_reason == "stop")
    # Where nothing else is allowed, `min_tokens` gives way.
    only_ends = params.allowed_token_ids is not None and set(params.allowed_token_ids) <= ends
    if is_end and not only_ends and params.structured_outputs is None:
        assert len(item.token_ids) > params.min_tokens
    grammar = params.structured_outputs
    if grammar is not None and grammar.choice and item.finish_reason == "stop" and item.stop_reason is None:
        # The end is a special token, which may be asked for.
        assert re.fullmatch(r"(ab|é tiny)(<\|\w+\|>)?|", item.text) and params.detokenize == bool(item.text)


@settings(max_examples=num_examples(8, 50), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(parameters(), st.integers(1, 60)), min_size=1, max_size=5), st.sampled_from([0, 1]))
def test_any_parameters_together(llm: LLM, requests: list[tuple[SamplingParams, int]], depth: int) -> None:
    runner: Any = llm.llm_engine._runner
    runner.pipeline_depth = depth
    prompts = [[100 + (7 * i + length) % 300 for i in range(length)] for _, length in requests]
    outputs = llm.generate(prompts, [params for params, _ in requests], use_tqdm=False)
    for output, (params, _) in zip(outputs, requests, strict=True):
        obeys(output, params, llm)
    assert llm.is_finished() and llm.stats()["num_used_blocks"] == 0
    check_blocks(llm.llm_engine.block_manager)
