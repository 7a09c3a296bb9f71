"""Jobs: the order in which their prompts run, what they hold, and how they end."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.client import jobs
from nanovllm.client.jobs import ReadAhead
from tests.cache_checks import check_blocks
from tests.mock_runner import run
from tests.null_runner import NullRunner

SETTINGS: dict[str, Any] = {
    "device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "seed": 0, "max_num_seqs": 4,
}  # fmt: skip
NUM_DOCUMENTS, NUM_QUESTIONS, DOCUMENT_BLOCKS = 8, 4, 4


def documents_asked_about() -> list[list[int]]:
    """Questions about documents, shuffled."""
    rng = Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(4, 256) for _ in range(count)]

    documents = [tokens(DOCUMENT_BLOCKS * 16) for _ in range(NUM_DOCUMENTS)]
    prompts = [document + tokens(8) for document in documents for _ in range(NUM_QUESTIONS)]
    rng.shuffle(prompts)
    return prompts


def test_prompts_that_begin_alike_follow_each_other() -> None:
    prompts = documents_asked_about()
    params = SamplingParams(1.0, 4, ignore_eos=True)
    num_computed, results = {}, []
    for schedule, num_blocks in ("arrival", 200), ("arrival", 14), ("prefix", 14):
        with LLM(BUNDLED_MODEL, num_kvcache_blocks=num_blocks, **SETTINGS) as llm:
            given = [llm.tokenizer.decode(prompt) for prompt in prompts]
            outputs = llm.generate(given, params, use_tqdm=False, schedule=schedule)  # type: ignore[arg-type]
            stats = llm.stats()
            num_computed[schedule, num_blocks] = stats["num_prompt_tokens"] - stats["num_cached_tokens"]
        results.append([(output.prompt, output.prompt_token_ids, output.outputs) for output in outputs])
    # The noise follows from the place in the list.
    assert results[0] == results[1] == results[2]
    assert num_computed["prefix", 14] == num_computed["arrival", 200] < num_computed["arrival", 14] / 2


ONE = SamplingParams(0, 1, ignore_eos=True)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """An engine without a model, and jobs of chunks of ten; each test must leave nothing behind."""
    monkeypatch.setattr("nanovllm.runner.model_runner.ModelRunner", NullRunner)
    monkeypatch.setattr(jobs, "CHUNK_SIZE", 10)
    with LLM(BUNDLED_MODEL, **SETTINGS) as llm:
        yield llm
        assert llm.is_finished() and llm.stats()["num_used_blocks"] == 0
        check_blocks(llm.llm_engine.block_manager)
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join(240)
            assert not thread.is_alive()


def texts(count: int) -> list[str]:
    return [f"{(i * 37) % count} is a number" for i in range(count)]


def test_prompts_may_come_one_by_one(llm: LLM) -> None:
    prompts, params = texts(95), SamplingParams(1.0, 2, n=2, ignore_eos=True)
    seeds, enqueue = dict[str, int](), llm.llm_engine.enqueue

    def recorded(request: Any) -> int:
        seeds[request.prompt] = request.seed
        return enqueue(request)

    llm.llm_engine.enqueue = recorded  # type: ignore[method-assign, assignment]
    outputs: list[RequestOutput] = []
    assert llm.generate(iter(prompts), params, False, keep=False, on_output=outputs.append) == []
    assert {output.prompt for output in outputs} == set(prompts)
    from_generator = [seeds.pop(prompt) for prompt in prompts]
    again = llm.generate(prompts, params, False)
    assert [output.prompt for output in again] == prompts
    from_list = [seeds[prompt] for prompt in prompts]
    step = (from_generator[1] - from_generator[0]) % 2**64
    # The next numbers, in the same order.
    assert [(new - old) % 2**64 for old, new in zip(from_generator, from_list, strict=True)] == [95 * step % 2**64] * 95


def test_what_is_given_is_passed_on_as_it_comes(llm: LLM) -> None:
    done = threading.Semaphore(0)

    def given() -> Iterator[str]:
        yield "a"
        yield "b"
        # It goes on once it has both answers.
        assert done.acquire(timeout=240) and done.acquire(timeout=240)
        yield "c"

    outputs = llm.generate(given(), ONE, False, on_output=lambda output: done.release())
    assert [output.prompt for output in outputs] == ["a", "b", "c"]


@pytest.mark.parametrize("as_list", [False, True])
def test_mistakes_are_found_when_they_are_met(llm: LLM, as_list: bool) -> None:
    prompts: list[Any] = [*texts(60), "x " * 300, *texts(30), [10**6]]
    with pytest.raises(ValueError, match=r"^prompts\[(60|91)\]: "):
        llm.generate(prompts if as_list else iter(prompts), ONE, False)
    assert llm.is_finished()
    finished: list[RequestOutput] = []
    outputs = llm.generate(
        prompts if as_list else iter(prompts), ONE, False, on_error="return", on_output=finished.append
    )
    assert [output.error is None for output in outputs] == [isinstance(p, str) and len(p) < 600 for p in prompts]
    assert "600 tokens, over max_model_len=256" in str(outputs[60].error) or "characters" in str(outputs[60].error)
    assert outputs[60].prompt == prompts[60] and "token id 1000000" in str(outputs[91].error)
    assert len(finished) == len(prompts)


def test_conversations_are_rendered_ahead(llm: LLM) -> None:
    talks: list[Any] = [[{"role": "user", "content": text}] for text in texts(35)]
    one_by_one = [llm.chat(talk, ONE, False)[0] for talk in talks]
    assert llm.chat(talks, ONE, False) == one_by_one == llm.chat(iter(talks), ONE, False)
    assert llm.chat([*talks, []], ONE, False, on_error="return")[-1].error
    with pytest.raises(ValueError, match=r"prompts\[35\]: messages must be"):
        llm.chat(iter([*talks, talks]), ONE, False)


class Stop(Exception):
    """Raised by a user's code."""


def failing(after: int, error: BaseException) -> Iterator[str]:
    yield from texts(after)
    raise error


def raise_stop(output: RequestOutput) -> None:
    raise Stop


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate(failing(35, Stop()), ONE, False),
        lambda llm: llm.generate(failing(0, Stop()), ONE, False, on_error="return"),
        lambda llm: llm.generate(texts(100), ONE, False, on_output=raise_stop),
        lambda llm: llm.generate(iter(texts(100)), ONE, False, on_output=raise_stop, on_error="return"),
    ],
)
def test_what_users_raise_ends_a_job(llm: LLM, call: Callable[[LLM], Any]) -> None:
    other = llm.add_request([1, 2, 3], ONE)
    with pytest.raises(Stop):
        call(llm)
    # The others' request is still there.
    results = [llm.step().finished for _ in range(3)]
    assert [request_id for finished in results for request_id, _ in finished] == [other]
    assert len(llm.generate(texts(25), ONE, False)) == 25


def test_ctrl_c_while_a_source_is_waited_for(llm: LLM) -> None:
    released = threading.Event()

    def given() -> Iterator[str]:
        yield from texts(12)
        signal.raise_signal(signal.SIGINT)
        assert released.wait(240)
        yield "late"

    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(given(), ONE, False)
    finally:
        released.set()


def test_an_engine_closed_within_a_job(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(iter(texts(100)), ONE, False, on_output=lambda output: llm.exit())


def test_small_jobs_start_no_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", None)
    assert len(llm.generate(texts(10), ONE, False)) == 10


def test_arguments_of_jobs(llm: LLM) -> None:
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"keep": False}, "keep=False needs on_output"),
        ({"schedule": "random"}, "schedule must be 'prefix' or 'arrival'"),
        ({"priority": [1]}, "need prompts in a list"),
        ({"sampling_params": [ONE]}, "need prompts in a list"),
        ({"prompts": None}, "prompts must be a string or a list"),
    ]
    for options, message in mistakes:
        with pytest.raises(ValueError, match=message):
            llm.generate(**{"prompts": iter("a"), **options})


def test_token_ids_are_made_when_they_are_asked_for(llm: LLM) -> None:
    (output,), (again,) = llm.generate([[5, 6, 7]], ONE, False), llm.generate([[5, 6, 7]], ONE, False)
    copy = pickle.loads(pickle.dumps(output))
    assert copy == output == again == replace(output) and "prompt_token_ids=[5, 6, 7]" in repr(again)
    assert output.prompt_token_ids is output.prompt_token_ids and type(copy.prompt_token_ids) is list
    assert replace(output, prompt_token_ids=[5]) != output


def test_a_jobs_noise_is_that_of_its_prompts_one_by_one() -> None:
    params, prompts = SamplingParams(5.0, 6, ignore_eos=True, n=2), [[9, 8, 7]] * 3
    with LLM(BUNDLED_MODEL, **SETTINGS) as together, LLM(BUNDLED_MODEL, **SETTINGS) as apart:
        outputs = [
            *together.generate(prompts, params, use_tqdm=False),
            *together.generate([[5], [6]], params, use_tqdm=False),
        ]
        ids = [apart.add_request(prompt, params) for prompt in [*prompts, [5], [6]]]
        found = run(apart)
        expected = [found[request_id] for request_id in ids]
    texts = [[item.token_ids for item in output.outputs] for output in outputs]
    assert texts == [[item.token_ids for item in output.outputs] for output in expected]
    # All of equal prompts are other draws.
    assert len({tuple(ids) for output in texts[:3] for ids in output}) == 6


def test_an_error_is_not_its_own_cause() -> None:
    bad = SamplingParams(stop_token_ids=[10**6])
    with LLM(BUNDLED_MODEL, **SETTINGS) as llm:
        calls: list[Callable[[], Any]] = [
            lambda: llm.generate("a", bad, use_tqdm=False),
            lambda: llm.generate(["a", "b"], [SamplingParams(), bad], use_tqdm=False),
            lambda: llm.add_request("a", bad),
            lambda: llm.stream(["a", "b"], [SamplingParams(), bad]),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="token id 1000000 is outside") as caught:
                call()
            causes: list[BaseException] = []
            error: BaseException | None = caught.value
            while error is not None:
                assert error not in causes
                causes.append(error)
                error = error.__cause__


def test_the_first_chunk_is_small_so_that_the_device_begins_early() -> None:
    sizes = []
    with closing(ReadAhead(iter(range(2500)), len, 1000)) as chunks:
        while (size := chunks.take(wait=True)) is not None:
            sizes.append(size)
    assert sizes == [128, 1000, 1000, 372]
