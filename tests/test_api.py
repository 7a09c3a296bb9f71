"""The forms of the API: signatures that type checkers read, what prompts and messages may be, mistakes, errors."""

from __future__ import annotations

import asyncio
import doctest
import pickle
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
import pytest
import torch

import nanovllm
from nanovllm import LLM, AsyncLLM, AsyncLLMEngine, SamplingParams, StepError, StructuredOutputsParams, outputs
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.client.model_client import EngineSettings, ModelClient
from nanovllm.config import Config, SpeculativeConfig
from nanovllm.outputs import RequestOutput, ToolCall

GREEDY = SamplingParams(0, 4, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "introduce yourself"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, device="cpu", max_model_len=256, num_kvcache_blocks=40, max_logprobs=3) as llm:
        yield llm


if TYPE_CHECKING:
    # mypy fails where one of these is no error.
    LLM("x", max_modellen=3)  # type: ignore[call-arg]
    LLM("x", dtype="float8")  # type: ignore[arg-type]
    AsyncLLM("x", device=0)  # type: ignore[arg-type]
    LLM("x").chat([], tool=[])  # type: ignore[call-arg]
    LLM("x").generate("a", on_error="ignore")  # type: ignore[arg-type]
    AsyncLLMEngine("x", max_modellen=3)  # type: ignore[call-arg]
    LLM("x").embed("a", pooling="max")  # type: ignore[arg-type]
    LLM("x").generate(5)  # type: ignore[arg-type]
    # These are none.
    LLM("x").generate(("a", "b"), (SamplingParams(), SamplingParams()), priority=(1, 2))
    LLM("x").generate(torch.tensor([[1, 2]]))
    LLM("x").generate([np.array([1, 2]), torch.tensor([1, 2]), (1, 2)])
    LLM("x").score(("a",), ("b",))
    LLM("x").score(((1, 2),), ((3,),))
    SamplingParams(stop=("a",), stop_token_ids=(1, 2), allowed_token_ids=(1,), bad_words=("a",))
    StructuredOutputsParams(choice=("a", "b"))


def test_keywords_of_an_engine_are_the_fields_of_its_config() -> None:
    fields = {name: hint for name, hint in get_type_hints(Config).items() if name != "model"}
    assert get_type_hints(EngineSettings) == fields


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def test_settings_of_speculation() -> None:
    assert Config("x").speculation is None
    given = dict(NGRAM)
    config = Config("x", speculative_config=MappingProxyType(given))
    # It does not follow the caller's mapping, and goes to other processes.
    given["num_speculative_tokens"] = 99
    for same in (config, pickle.loads(pickle.dumps(config)), replace(config, device="cpu"), Config(**vars(config))):
        assert same.speculation == SpeculativeConfig("ngram", 4, prompt_lookup_min=2, prompt_lookup_max=5)
    limits = {"num_speculative_tokens": np.int64(15), "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    # The form shows NumPy's integers.
    assert str(Config("x", speculative_config=NGRAM | limits).speculation) == str(SpeculativeConfig("ngram", 15, 1, 1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ('{"method": "ngram"}', "must be a mapping such as {'method': 'ngram', 'num_speculative_tokens': 4}, not '"),
        ({}, "method of speculative_config must be one of ngram, eagle3, mtp, not None"),
        ({"method": "eagle3"}, "'eagle3' of speculative_config needs model"),
        (NGRAM | {"num_spec_tokens": 4}, "argument num_spec_tokens; SpeculativeConfig takes method, num_speculative_"),
        (NGRAM | {5: 4}, "unknown argument 5; SpeculativeConfig takes method, num_speculative_tokens"),
        ({"method": "ngram"}, "num_speculative_tokens of speculative_config must be an integer in 1 ... 15, not None"),
        (NGRAM | {"num_speculative_tokens": 0}, "must be in 1 ... 15, not 0"),
        (NGRAM | {"num_speculative_tokens": 16}, "must be in 1 ... 15, not 16"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min of speculative_config must be in 1 ... 5, not 0"),
        (NGRAM | {"prompt_lookup_max": 6}, "prompt_lookup_max of speculative_config must be in 1 ... 5, not 6"),
        (NGRAM | {"prompt_lookup_max": 1}, "prompt_lookup_min=2 must be at most prompt_lookup_max=1"),
    ],
)
def test_bad_settings_of_speculation(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Config("x", speculative_config=values)


def test_what_methods_return_can_be_imported() -> None:
    returned = {
        cls for name, cls in vars(outputs).items() if isinstance(cls, type) and cls.__module__ == outputs.__name__
    }
    assert {cls.__name__ for cls in returned if cls.__name__[0] != "_"} <= set(nanovllm.__all__)
    assert all(getattr(nanovllm, name).__name__ == name for name in nanovllm.__all__)


def test_examples_of_docstrings(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some write files.
    monkeypatch.chdir(tmp_path)
    globs = {**vars(nanovllm), **{name: getattr(nanovllm, name) for name in nanovllm.__all__}}
    globs.update(llm=llm, torch=torch, asyncio=asyncio, BUNDLED_MODEL=BUNDLED_MODEL)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(verbose=False)
    found = [test for name in nanovllm.__all__ for test in finder.find(getattr(nanovllm, name), name, globs=globs)]
    # The last one of `ModelClient` reads the weights again.
    for test in [*found, *finder.find(ModelClient, "LLM", globs=globs)]:
        printed: list[str] = []
        assert not runner.run(test, out=printed.append).failed, "".join(printed)
    shown = {test.name for test in found if test.examples}
    assert shown >= {cls.__name__ for cls in (LLM, AsyncLLM, AsyncLLMEngine, SamplingParams, StructuredOutputsParams)}
    assert {f"LLM.{name}" for name in vars(LLM) if name[0] != "_"} <= shown


def test_token_ids_in_any_sequence(llm: LLM) -> None:
    ids = [5, 6, 7]
    (want,) = llm.generate([ids], GREEDY, use_tqdm=False)
    forms: list[Any] = [tuple(ids), np.array(ids), np.array(ids, dtype=np.int32), torch.tensor(ids), array("q", ids)]
    forms += [{"prompt_token_ids": form} for form in forms]
    batches: list[Any] = [forms, tuple(forms), np.array([ids, ids]), torch.tensor([ids, ids])]
    for batch in batches:
        for output in llm.generate(batch, GREEDY, use_tqdm=False):
            assert output == want and all(type(token) is int for token in output.prompt_token_ids)
    for wrong in (np.array([1.5, 2.0]), torch.tensor([[1, 2]]), np.array([True]), {1, 2}):
        with pytest.raises(ValueError, match=r"prompts\[1\]: a prompt is a string or a list of token ids"):
            llm.generate([ids, wrong], GREEDY)
    scores = llm.score((tuple(ids), np.array(ids)), (torch.tensor([8]), (8,)), use_tqdm=False)
    assert [score.token_ids for score in scores] == [[8], [8]]
    for form in forms[:4]:
        params = SamplingParams(stop_token_ids=form, allowed_token_ids=form)
        assert params.stop_token_ids == params.allowed_token_ids == ids
    # A text beside token ids is only shown.
    (shown,) = llm.generate([{"prompt_token_ids": ids, "prompt": "?"}], GREEDY, use_tqdm=False)
    assert (shown.prompt, shown.prompt_token_ids, shown.outputs) == ("?", ids, want.outputs)


def test_chat_takes_what_generate_does(llm: LLM) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("introduce ", "yourself")]}]
    seen: list[RequestOutput] = []
    (want,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    outputs = llm.chat([MESSAGES, parts], GREEDY, use_tqdm=False, priority=[2, 1], on_output=seen.append)
    assert outputs == [want, want] and len(seen) == 2
    text = llm.get_tokenizer().apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert want.prompt == text and want.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    pieces = list(llm.stream_chat(parts, GREEDY, add_generation_prompt=True))
    assert "".join(piece.outputs[0].text for piece in pieces) == want["text"] and pieces[-1].finished
    with pytest.raises(ValueError, match="unknown argument tool; a chat template takes add_generation_prompt"):
        llm.chat(MESSAGES, tool=[])  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="multi_modal_data is not supported: models run on text alone"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": None}})


def test_calls_of_tools_are_in_outputs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    want = [ToolCall("add", {"a": 1})]

    monkeypatch.setattr("nanovllm.text.answers.tool_calls", lambda _: want)
    (output,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, tools=tools)
    assert output.outputs[0].tool_calls == want
    assert llm.chat(MESSAGES, GREEDY, use_tqdm=False)[0].outputs[0].tool_calls == []

    async def answer() -> RequestOutput:
        async with AsyncLLM(BUNDLED_MODEL, device="cpu", num_kvcache_blocks=4) as engine:
            return await engine.chat(MESSAGES, GREEDY, tools=tools)

    assert asyncio.run(answer()).outputs[0].tool_calls == want


def test_errors_can_come_in_their_places(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[Any] = ["a", [10**6], [5, 6], "", "b"]
    first, bad, ids, empty, last = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    assert [output.error for output in (first, ids, last)] == [None] * 3 and len(ids["token_ids"]) == 4
    assert "token id 1000000 is outside" in str(bad.error) and "empty" in str(empty.error) and empty.prompt == ""
    assert (bad["finish_reason"], bad["text"], bad.finished) == ("error", "", True)
    # A step that fails takes its requests along, and the others go on.
    runner: Any = llm.llm_engine._runner
    forward, calls = runner.forward, []

    def failing(batch: Any, *masks: Any) -> Any:
        calls.append(batch)
        if len(calls) == 2:
            raise MemoryError("no room")
        return forward(batch, *masks)

    monkeypatch.setattr(runner, "forward", failing)
    monkeypatch.setattr(llm.llm_engine.scheduler, "max_num_batched_tokens", 2)
    failed, *good = llm.generate([[5, 6], [7, 8], [9, 10]], GREEDY, use_tqdm=False, on_error="return")
    assert "no room" in str(failed.error) and failed.prompt_token_ids == [5, 6]
    assert len(good) == 2 and len(good[-1]["token_ids"]) == 4
    calls.clear()
    with pytest.raises(StepError):
        llm.generate([[5, 6]], GREEDY, use_tqdm=False)
    assert llm.is_finished()


def test_an_output_is_a_mapping(llm: LLM) -> None:
    (output,) = llm.generate(["a"], GREEDY, use_tqdm=False)
    assert isinstance(output, Mapping) and "text" in output and "prompt" not in output and output.get("x", 3) == 3
    assert dict(output) == {**output} == dict(output.items()) and list(output.values())[1] == output["token_ids"]
    with pytest.raises(KeyError):
        output["outputs"]


def test_mistakes_are_value_errors(llm: LLM) -> None:
    calls: list[tuple[Any, str]] = [
        (lambda: llm.beam_search("a", SamplingParams()), "params must be BeamSearchParams"),  # type: ignore[arg-type]
        (lambda: llm.generate([[1], [2], [3]], [GREEDY, GREEDY]), "2 sampling_params for 3 prompts"),
        (lambda: llm.add_request([1], {}), "must be SamplingParams"),  # type: ignore[arg-type]
        (lambda: llm.abort(5), "request ids are given as a list, not 5"),  # type: ignore[arg-type]
        (lambda: llm.generate("a", on_error="ignore"), "on_error must be"),  # type: ignore[arg-type]
        (lambda: llm.generate("a", SamplingParams(logprobs=4)), "logprobs=4 is over max_logprobs=3"),
        (lambda: llm.generate("a", SamplingParams(prompt_logprobs=21)), "prompt_logprobs=21 is over max_logprobs=3"),
        (lambda: Config("x", max_logprobs=-2), "max_logprobs must be"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert llm.max_model_len == 256 and Config("x", max_logprobs=-1).most_logprobs(99) == 99
    assert [Config("x", max_logprobs=20).most_logprobs(size) for size in (9, 99)] == [9, 20]
