"""An engine in another process, behind the protocol `Engine`: the same outputs through the same front ends."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm import LLM, AsyncLLM, RequestOutput, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.async_llm.engine_thread import EngineThread
from nanovllm.outputs import CompletionOutput
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.text.engine_client import EngineClient
from tests.pipe_engine import PipeEngine

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
def engine() -> Iterator[PipeEngine]:
    pytest.importorskip("llguidance")
    engine = PipeEngine(BUNDLED_MODEL, SETTINGS)
    yield engine
    assert engine.is_finished() and engine.stats()["num_used_blocks"] == 0
    engine.exit()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def whole(llm: LLM) -> list[RequestOutput]:
    """What an engine in this process says."""
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


@pytest.fixture
def remote(llm: LLM, engine: PipeEngine, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The same front end with the other engine."""
    monkeypatch.setattr(llm, "engine_client", EngineClient(engine, llm.output_processor))
    return llm


def plain(item: CompletionOutput) -> tuple[Any, ...]:
    """An output, with log-probabilities as far as the batches in which they were computed do not change them."""
    return *(getattr(item, name) for name in ("index", "text", "token_ids", "finish_reason", "stop_reason")), rounded(
        item.logprobs
    )


def rounded(logprobs: Any) -> list[Any]:
    found = [position or {} for position in logprobs or []]
    return [{i: (pytest.approx(p.logprob, abs=1e-3), p.rank, p.decoded_token) for i, p in p_.items()} for p_ in found]


def check(outputs: list[RequestOutput], whole: list[RequestOutput]) -> None:
    """Assert that outputs are the same."""
    for output, want in zip(outputs, whole, strict=True):
        assert (output.prompt, output.prompt_token_ids) == (want.prompt, want.prompt_token_ids)
        assert list(map(plain, output.outputs)) == list(map(plain, want.outputs))
        assert rounded(output.prompt_logprobs) == rounded(want.prompt_logprobs)


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
    factory = pickle.loads(pickle.dumps(llm.input_processor._grammars))
    assert factory(pickle.loads(data)[0]) is not None


def test_generate(remote: LLM, engine: PipeEngine, whole: list[RequestOutput]) -> None:
    before = engine.num_new_tokens
    outputs = remote.generate(PROMPTS, PARAMS, use_tqdm=False)
    check(outputs, whole)
    stopped = [item for output in outputs[1:3] for item in output.outputs]
    assert all(isinstance(item.stop_reason, str) for item in stopped)
    # The engine went on past each of the stop strings, and nobody sees it.
    assert engine.num_new_tokens >= before + sum(len(item.token_ids) for item in stopped) + len(stopped)


def test_stream(remote: LLM, whole: list[RequestOutput]) -> None:
    joined: dict[tuple[int | str, int], CompletionOutput] = {}
    for part in remote.stream(PROMPTS, PARAMS):
        for item in part.outputs:
            before = joined.get((part.request_id, item.index))
            if before is not None:
                item.text, item.token_ids = before.text + item.text, before.token_ids + item.token_ids
                item.logprobs = None if item.logprobs is None else [*(before.logprobs or []), *item.logprobs]
            joined[part.request_id, item.index] = item
    want = [plain(item) for output in whole for item in output.outputs]
    assert [plain(joined[key]) for key in sorted(joined)] == want


def test_a_stream_that_is_closed_aborts(remote: LLM) -> None:
    stream = remote.stream([[1, 2, 3]] * 3, SamplingParams(0, 200, ignore_eos=True))
    next(stream)
    stream.close()
    # The engine goes on, with nothing of it.
    request = remote.add_request("a", SamplingParams(0, 3, ignore_eos=True))
    finished: list[tuple[int, RequestOutput]] = []
    while not remote.is_finished():
        finished += remote.step().finished
    assert [(i, len(output["token_ids"])) for i, output in finished] == [(request, 3)]


def test_the_engine_behind_asyncio(engine: PipeEngine, whole: list[RequestOutput]) -> None:
    async def run() -> None:
        async with AsyncLLM(BUNDLED_MODEL, **SETTINGS) as llm:
            llm._thread.close()
            llm._thread = EngineThread(EngineClient(engine, llm.llm.output_processor))
            outputs = await asyncio.gather(*(llm.generate(*case) for case in CASES))
            check(outputs, whole)
            endless = SamplingParams(1.0, 200, seed=4, ignore_eos=True)
            stream = await llm.begin_stream("a", endless, request_id="x")
            await anext(stream)
            await llm.abort("x")
            parts = [output async for output in stream]
            assert parts[-1].outputs[0].finish_reason == "abort"
            # A task that is cancelled, and a stream that nobody holds.
            task = asyncio.ensure_future(llm.generate("a", endless))
            await anext(stream := await llm.begin_stream("a", endless))
            task.cancel()
            del stream
            assert len((await llm.generate("a", SamplingParams(0, 3, ignore_eos=True))).outputs[0].token_ids) == 3
            while not engine.is_finished():
                await asyncio.sleep(0.01)

    asyncio.run(run())
