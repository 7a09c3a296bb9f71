"""Text as it comes: stop strings, streams, special tokens; and calls that end early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.client.engine_client import RequestState
from nanovllm.outputs import RequestOutput
from nanovllm.sampling.sampler import Sampled
from nanovllm.text.output_processor import OutputState
from tests.cache_checks import check_blocks
from tests.examples import num_examples
from tests.streams import joined
from tests.test_requests import encode

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "seed": 0}
TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
EOS = TOKENIZER.eos_token_id
PROMPT = "introduce yourself"


@pytest.fixture(scope="module")
def module_llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, num_kvcache_blocks=100, **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(module_llm: LLM) -> Iterator[LLM]:
    """An engine from which each test must take all that it has queued."""
    yield module_llm
    assert module_llm.is_finished() and module_llm.stats()["num_used_blocks"] == 0
    check_blocks(module_llm.llm_engine.block_manager)
    assert not module_llm.engine_client._states


Script = Callable[[list[int]], None]


@pytest.fixture
def script(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Make the model say given tokens."""
    runner: Any = llm.llm_engine._runner

    def set_script(token_ids: list[int]) -> None:
        tokens = torch.tensor([*token_ids, EOS])
        monkeypatch.setattr(runner.sampler, "sample", lambda _, inputs, *__: Sampled(tokens[inputs.output_index]))

    return set_script


def first_stop(token_ids: list[int], params: SamplingParams) -> tuple[int, str, str | None]:
    """Return how many tokens come, the text, and the stop string, all by decoding every prefix as a whole."""
    before = ""
    for count in range(1, len(token_ids) + 1):
        # A character that is not complete yet does not count, unless no token follows.
        text = TOKENIZER.decode(token_ids[:count], skip_special_tokens=True)
        if text.endswith("\ufffd") and text != TOKENIZER.decode(token_ids, skip_special_tokens=True):
            continue
        if count > params.min_tokens:
            ends = range(len(before) + 1, len(text) + 1)
            found = [(end, -len(stop), stop) for end in ends for stop in params.stop or [] if text[:end].endswith(stop)]
            if found:
                end, negative_len, stop = min(found)
                return count, text[: end if params.include_stop_str_in_output else end + negative_len], stop
        before = text
    return len(token_ids), TOKENIZER.decode(token_ids, skip_special_tokens=True), None


@st.composite
def texts_with_stops(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    """Tokens, many of them bytes of characters, and stop strings, some of them in their text."""
    pieces = st.sampled_from([*TOKENIZER.encode("aé😀 ab abba é", add_special_tokens=False), 100, 300, EOS])
    token_ids = draw(st.lists(pieces | st.integers(0, 511), min_size=1, max_size=14))
    text = TOKENIZER.decode(token_ids, skip_special_tokens=True) or "x"
    parts = st.integers(0, len(text) - 1).flatmap(lambda i: st.integers(i + 1, i + 5).map(lambda j: text[i:j]))
    # Bytes that are no character show when no other can complete them, which is not when they come.
    parts = parts.filter(lambda part: "\ufffd" not in part)
    stop = draw(st.lists(parts | st.text("ab ", min_size=1, max_size=3), min_size=1, max_size=3))
    given: dict[str, Any] = {"min_tokens": draw(st.integers(0, 5)), "include_stop_str_in_output": draw(st.booleans())}
    return token_ids, SamplingParams(0, 64, stop=stop, **given)


@settings(max_examples=num_examples(50, 300), deadline=None)
@given(texts_with_stops())
def test_any_text_ends_at_its_first_stop_string_and_streams_whole(case: tuple[list[int], SamplingParams]) -> None:
    token_ids, params = case
    state, shown = OutputState(TOKENIZER, params, []), ""
    count, want, stop = first_stop(token_ids, params)
    taken, found = list[int](), False
    while len(taken) < len(token_ids) and not found:
        taken.append(token_ids[len(taken)])
        found = state.append(len(taken) - 1, taken[-1], False, b"")
        shown += state.take(False).text
        assert want.startswith(shown)
    assert shown + state.take(True).text == want
    assert (len(taken), state.stop_string) == (count, stop)


STREAMED: list[SamplingParams] = [
    SamplingParams(0, 12, logprobs=2, prompt_logprobs=1),
    SamplingParams(1.3, 20, seed=1, n=3, stop=["a", "e "], logprobs=0),
    SamplingParams(1.0, 20, seed=2, stop=["e"], include_stop_str_in_output=True, ignore_eos=True),
    SamplingParams(1.0, 20, seed=3, detokenize=False),
    SamplingParams(2.0, 30, seed=4, n=2, skip_special_tokens=False, ignore_eos=True),
    SamplingParams(1.0, 20, seed=5, stop_token_ids=list(range(80, 400))),
    SamplingParams(0, 9, skip_special_tokens=False, logit_bias={EOS: 20}),
    SamplingParams(0, 9, stop_token_ids=[EOS], logit_bias={EOS: 20}, skip_special_tokens=False, ignore_eos=True),
]


def test_a_stream_joined_is_what_generate_returns(llm: LLM) -> None:
    prompts: Any = [PROMPT, "The sea", [5, 6, 7], PROMPT, "a", "b", "c", "d"]
    whole = llm.generate(prompts, STREAMED, use_tqdm=False)
    found = joined(llm.stream(prompts, STREAMED))
    for output, want in zip(found, whole, strict=True):
        assert (output.outputs, output.prompt_token_ids) == (want.outputs, want.prompt_token_ids)
        assert output.prompt_logprobs == want.prompt_logprobs
    assert whole[3].outputs[0].text == ""
    # EOS and stop tokens do not show, though special tokens do.
    assert [whole[i].outputs[0].text for i in (6, 7)] == ["", ""]
    assert [whole[i].outputs[0].stop_reason for i in (6, 7)] == [None, EOS]
    assert whole[5].outputs[0].stop_reason in range(80, 400)
    assert {item.stop_reason for item in whole[1].outputs} <= {"a", "e ", None}


def test_special_tokens_show_on_request(llm: LLM, script: Script) -> None:
    token_ids = [*encode("a"), 1, *encode("b")]
    script(token_ids)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "a<|im_start|>b"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<|im_start|>b<|im_end|>"),
    ]
    for options, text in cases:
        params = SamplingParams(0, 9, **options)
        assert llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text == text
        parts = list(llm.stream(PROMPT, params))
        assert "".join(item.text for part in parts for item in part.outputs) == text


def test_a_step_of_a_stream_looks_at_requests_with_new_tokens_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    news, looked_at = RequestState.news, list[int]()

    def counted(self: RequestState) -> RequestOutput | None:
        looked_at.append(self.request_id)
        return news(self)

    monkeypatch.setattr(RequestState, "news", counted)
    # A budget of one prompt: the others wait.
    monkeypatch.setattr(llm.llm_engine.scheduler, "max_num_batched_tokens", 3)
    outputs = list(llm.stream([[1, 2, 3]] * 40, SamplingParams(0, 2, ignore_eos=True)))
    assert len(outputs) == len(looked_at) == 80
    assert [output.request_id for output in outputs if output.finished] == sorted(set(looked_at))
