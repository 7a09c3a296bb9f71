"""Engines in other processes, behind the protocol `Engine`: the same outputs through the same front ends."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nanovllm import LLM, AsyncLLM, RequestOutput, SamplingParams, StepError
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.sampling_params import StructuredOutputsParams
from tests.rank_processes import engine_pids
from tests.streams import check_same, joined

SETTINGS: dict[str, Any] = {
    "device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "num_kvcache_blocks": 100, "seed": 0,
}  # fmt: skip
REGEX = StructuredOutputsParams(regex="[a-f]{4}")
CASES: list[tuple[Any, SamplingParams]] = [
    ("introduce yourself", SamplingParams(0, 12, logprobs=2, prompt_logprobs=1, ignore_eos=True)),
    ("The sea", SamplingParams(1.3, 60, seed=1, n=2, stop=["l", "a", "e "], logprobs=1, ignore_eos=True)),
    ([5, 6, 7], SamplingParams(1.0, 20, seed=2, stop="e", include_stop_str_in_output=True, ignore_eos=True)),
    ("a", SamplingParams(1.0, 20, seed=3, n=2, structured_outputs=REGEX)),
    ("a", SamplingParams(1.0, 20, seed=4, bad_words=["the sun"], stop_token_ids=[80, 90, 100])),
    ({"prompt": "b", "cache_salt": "x"}, SamplingParams(1.0, 9, seed=5, detokenize=False)),
]
PROMPTS, PARAMS = [prompt for prompt, _ in CASES], [params for _, params in CASES]


@pytest.fixture(scope="module")
def remote() -> Iterator[LLM]:
    """A front end of three engines."""
    pytest.importorskip("llguidance")
    with LLM(BUNDLED_MODEL, data_parallel_size=3, **SETTINGS) as remote:
        yield remote
    assert not engine_pids()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def whole(llm: LLM) -> list[RequestOutput]:
    """The outputs of an engine in this process."""
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture(autouse=True)
def nothing_is_left(remote: LLM) -> Iterator[None]:
    yield
    stats = remote.stats()
    assert remote.is_finished() and stats["num_used_blocks"] == stats["num_running"] == stats["num_waiting"] == 0


def test_requests_pickle_small_and_whole(llm: LLM) -> None:
    params = SamplingParams(stop=["."], bad_words=["the sun"], structured_outputs=REGEX)
    requests = llm.input_processor.process([[i] * 64 for i in range(100)], [params] * 100, [3] * 100, streams=True)
    data = pickle.dumps(requests)
    # Token ids of four bytes, and little more: parameters are in it once.
    assert len(data) < 100 * (4 * 64 + 80) + 2000
    for request, copy in zip(requests, pickle.loads(data), strict=True):
        assert (copy.token_ids, copy.params, copy.priority) == (request.token_ids, request.params, 3)
        assert copy.bad_sequences == request.bad_sequences != [] and copy.is_streamed
        assert request.grammar is not None and request.grammar.compiled is not None
        assert copy.grammar.text == request.grammar.text and copy.grammar.compiled is None
    # What makes their constraints goes along, too.
    factory = pickle.loads(pickle.dumps(llm.input_processor.constraints))
    assert factory(pickle.loads(data)[0]) is not None


def test_calls_give_what_one_engine_gives(remote: LLM, llm: LLM, whole: list[RequestOutput]) -> None:
    check_same(remote.generate(PROMPTS, PARAMS, use_tqdm=False), whole)
    message = [{"role": "user", "content": "2 + 3"}]
    assert remote.chat(message, use_tqdm=False)[0]["text"] == llm.chat(message, use_tqdm=False)[0]["text"] == "5"
    scores = [each.score(["two plus two is"] * 2, [" four", " five"], use_tqdm=False) for each in (remote, llm)]
    assert [s.logprob for s in scores[0]] == pytest.approx([s.logprob for s in scores[1]], abs=1e-3)
    texts = ["Monday", "Tuesday", "prime"]
    embedded = [each.embed(texts, "mean", use_tqdm=False) for each in (remote, llm)]
    assert embedded[0].allclose(embedded[1], atol=1e-4)
    usage = remote.block_usage(6)
    assert usage.num_blocks == 300 and len(usage.used) == 6 and sum(usage.cached) > 0
    assert remote.stats_history()[-1].num_output_tokens == remote.stats()["num_output_tokens"] > 0
    assert remote.engine_client.engine.call(LLMEngine.is_finished) == [True] * 3
    with pytest.raises(ValueError, match="300 tokens, over max_model_len=256"):
        remote.generate([[1], [1] * 300], use_tqdm=False)
    with pytest.raises(ValueError, match="the prompt is empty"):
        remote.engine_client.engine.call(LLMEngine.add_request, [], None, 0)


def test_requests_by_hand(remote: LLM, llm: LLM) -> None:
    prompts, params = [[1, 2, 3], [4] * 30], SamplingParams(1.0, 8, n=2, logprobs=1, seed=7, ignore_eos=True)
    want = llm.generate(prompts, params, use_tqdm=False)
    ids = [remote.add_request(prompt, params) for prompt in prompts]
    new: dict[int, list[int]] = {}
    finished: dict[int, RequestOutput] = {}
    counts = [0, 0]
    while not remote.is_finished():
        result = remote.step()
        finished.update(result.finished)
        counts[0] += result.num_prefill_tokens
        counts[1] += result.num_output_tokens
        for request_id, token_ids in result.new_token_ids.items():
            new.setdefault(request_id, []).extend(token_ids)
    check_same([finished[request_id] for request_id in ids], want)
    expected = {i + item.index: item.token_ids for i, output in zip(ids, want, strict=True) for item in output.outputs}
    assert new == expected and counts[1] == 32
    # Blocks of a prompt's second output may be shared, or computed again.
    assert 33 <= counts[0] <= 66


def test_the_engines_behind_asyncio(remote: LLM, whole: list[RequestOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    # Its end would close the engines.
    monkeypatch.setattr(AsyncLLM, "__del__", lambda llm: None)

    async def run() -> None:
        llm = AsyncLLM.over(remote)
        check_same(await asyncio.gather(*(llm.generate(*case) for case in CASES)), whole)
        llm._thread.close()

    asyncio.run(run())


def test_weights_come_through_files(remote: LLM, llm: LLM) -> None:
    stored: dict[str, torch.Tensor] = load_file(Path(BUNDLED_MODEL, "model.safetensors"))
    # A name may come twice, and tensors may share memory.
    norm = "model.norm.weight"
    given = [(norm, stored[norm] * 0), *((name, -values) for name, values in stored.items())]
    params = SamplingParams(0, 8, ignore_eos=True)

    def answers(each: LLM) -> list[Any]:
        assert each.reset_prefix_cache()
        return [output["token_ids"] for output in each.generate([[i, 9, 2] for i in range(6)], params, use_tqdm=False)]

    before = answers(llm)
    assert remote.load_weights(given, strict=True) == llm.load_weights(given) == len(given)
    assert answers(remote) == answers(llm) != before
    for weights, message in (
        ({"model.norm.weight": torch.zeros(3)}, r"'model.norm.weight' has shape \[3\]"),
        ([("model.norm.weight", [0.0])], "'model.norm.weight' is a list; 0 tensors were written"),
        ("nowhere", "'nowhere' is no folder"),
    ):
        with pytest.raises(ValueError, match=message):
            remote.load_weights(weights)
    with pytest.warns(UserWarning, match="^1 tensors that were loaded have NaN, such as 'model.norm.weight'"):
        remote.load_weights({norm: torch.full_like(stored[norm], torch.nan)})
    for each in (remote, llm):
        assert each.load_weights(BUNDLED_MODEL, strict=True) == len(stored)
    assert answers(remote) == answers(llm) == before and not remote.unload_adapter()


def test_what_a_dead_replica_had_runs_again(remote: LLM, llm: LLM, whole: list[RequestOutput]) -> None:
    prompts = [[i, 5, 6] for i in range(24)]
    # One is done long before the others.
    params = [SamplingParams(1.0, 40 if i else 2, seed=i, ignore_eos=True) for i in range(24)]
    want = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
    victim = engine_pids()[0]

    def kill(output: RequestOutput) -> None:
        if len(output["token_ids"]) == 2:
            os.kill(victim, signal.SIGKILL)

    with pytest.warns(UserWarning, match=r"replica 0 of 3 was killed by SIGKILL; its \d+ requests run again"):
        outputs = remote.generate(prompts, params, use_tqdm=False, on_output=kill)
    assert [output["token_ids"] for output in outputs] == want
    # Streams go on where they were.
    stream = remote.stream(PROMPTS, PARAMS)
    first = [next(stream) for _ in range(6)]
    os.kill(engine_pids()[1], signal.SIGKILL)
    with pytest.warns(UserWarning, match=r"replica 1 of 3 was killed by SIGKILL"):
        check_same(joined([*first, *stream]), whole)
    assert remote.stats()["num_free_blocks"] == 100


def test_the_death_of_the_last_ends_the_call_with_its_cause(remote: LLM) -> None:
    stream = remote.stream(["a"] * 3, SamplingParams(1.0, 200, ignore_eos=True))
    next(stream)
    os.kill(engine_pids()[2], signal.SIGTERM)
    with pytest.raises(StepError, match="replica 2 of 3 was killed by SIGTERM"):
        list(stream)
    for call in (remote.generate, remote.add_request):
        with pytest.raises(RuntimeError, match="the engine is closed: replica 2 of 3 was killed by SIGTERM"):
            call("a")
