"""Signals and exceptions at bad moments: nothing is corrupted, and no request vanishes without a word."""

from __future__ import annotations

import gc
import signal
import time
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams, StepError
from nanovllm.client.engine_client import EngineClient, RequestState
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.request import Grammar, Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.outputs import RequestOutput
from nanovllm.runner.messages import StepOutput
from nanovllm.text.output_processor import OutputProcessor
from nanovllm.utils.interrupt import deferred_signals
from tests.mock_llm import NumberTokenizer, make_mock_engine, order_fault
from tests.mock_runner import MockHandle, check_engine, complete, greedy, make_engine, make_request, make_sequence, run

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def test_a_lost_device_keeps_requests_finished_in_earlier_steps() -> None:
    engine, _ = make_mock_engine(pipeline_depth=1)
    first, second = engine.add_request([1, 2], greedy(2)), engine.add_request([3, 4], greedy(9))
    engine.step()
    engine.step()
    engine.call(order_fault, "loss")
    with pytest.raises(StepError, match="the engine is closed: device lost") as caught:
        engine.step()
    assert caught.value.request_ids == [second]
    assert [request_id for request_id, _ in engine.step().finished] == [first] and engine.is_finished()


def test_signals_that_were_held_back_all_act() -> None:
    seen: list[int] = []

    def leave(number: int, frame: object) -> None:
        seen.append(number)
        raise SystemExit(number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit), deferred_signals():
            for number in before:
                signal.raise_signal(number)
            assert not seen
        assert seen == list(before)
        assert all(signal.getsignal(number) is leave for number in before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Panic(BaseException):
    """An exception like the one that the tokenizers library raises."""


class Tokenizer(NumberTokenizer):
    """Decodes all but some tokens, at which its native code panics."""

    def __init__(self, bad: list[int]) -> None:
        self.bad = bad

    def decode(self, token_ids: list[int], **_: Any) -> str:
        if token_ids[-len(self.bad) :] == self.bad:
            raise Panic
        return super().decode(token_ids)


def add(client: EngineClient, request: Request) -> int:
    """Queue a request whose output `step` returns."""
    state = RequestState(request, client.processor)
    state.awaits_step = True
    client.add(state)
    return state.request_id


@DEPTHS
@pytest.mark.parametrize("stop", [None, "never"])
def test_a_text_that_cannot_be_decoded_fails_alone(depth: int, stop: str | None) -> None:
    prompts = [[1, 2], [3, 4], [5, 6]]
    want = [complete(prompt, 4, frozenset(), 128) for prompt in prompts]
    llm = LLM.__new__(LLM)
    engine, _ = make_engine(pipeline_depth=depth)
    # With a stop string it is decoded as the tokens come.
    bad = want[1] if stop is None else want[1][:2]
    llm.engine_client = EngineClient(engine, OutputProcessor(Tokenizer(bad)))
    params = replace(greedy(4), stop=stop)
    ids = [add(llm.engine_client, make_request(prompt, params)) for prompt in prompts]
    outputs: dict[int, RequestOutput] = {}
    failures: list[StepError] = []
    while not llm.is_finished():
        try:
            outputs.update(llm.step().finished)
        except StepError as error:
            failures.append(error)
    assert {i: output["token_ids"] for i, output in outputs.items()} == {ids[0]: want[0], ids[2]: want[2]}
    if stop is None:
        texts = {ids[i]: NumberTokenizer().decode(want[i]) for i in (0, 2)}
        assert {i: output["text"] for i, output in outputs.items()} == texts
    assert engine.stats()["num_used_blocks"] == 0
    assert [failure.request_ids for failure in failures] == [[ids[1]]]
    assert isinstance(failures[0].__cause__, Panic)


def test_a_preempted_request_counts_its_prompt_and_cached_tokens_once() -> None:
    engine, _ = make_engine(pipeline_depth=0, num_blocks=6, max_num_seqs=2)
    prompts = [[1] * 17, [2] * 17]
    first = engine.add_request(prompts[1], greedy(1))
    run(engine)
    ids = [engine.add_request(prompt, greedy(40)) for prompt in prompts]
    outputs = run(engine)
    stats = engine.stats()
    assert stats["num_preemptions"] > 0
    # The second finds a block of its prompt at its first admission, and more when it comes back.
    assert [outputs[i]["num_cached_tokens"] for i in ids] == [0, 16]
    assert (stats["num_prompt_tokens"], stats["num_cached_tokens"]) == (17 * 3, 16)
    assert first < ids[0]


def test_an_empty_step_leaves_the_books_of_the_steps_under_way_alone() -> None:
    manager = BlockManager(4, 2)
    scheduler = Scheduler(manager, max_num_running=2, max_num_batched_tokens=8)
    scheduler.add(make_sequence(0, [1, 2, 3], greedy(9)))
    batch = scheduler.schedule()
    assert batch is not None
    # Its token is in flight, so it cannot come back yet, and nothing can run.
    scheduler._preempt(scheduler.running[0])
    assert scheduler.schedule() is None
    scheduler.postprocess(batch, StepOutput(np.array([5])))
    assert not manager._unconfirmed
    manager.rollback()
    assert len(manager._cache.blocks) == 1


def test_aborting_many_waiting_requests_takes_no_time_each() -> None:
    engine, _ = make_engine(pipeline_depth=0)
    ids = [engine.add_request([1], greedy(2)) for _ in range(20_000)]
    engine.step()
    # Of this thread, which other processes may keep from the cores.
    started = time.thread_time()
    # In the reverse order of arrival, the worst for a list.
    engine.abort(reversed(ids))
    assert time.thread_time() - started < 0.5
    assert engine.is_finished()


GRAMMAR = Grammar("any", is_choice=False)


class Constraint:
    """Allows everything, and knows what it has seen; takes at most `most` tokens."""

    def __init__(self, most: int = 99) -> None:
        self.seen: list[int] = []
        self.most = most

    def accept(self, token_id: int) -> None:
        self.seen.append(token_id)
        if len(self.seen) > self.most:
            raise Panic("no such token")

    def fill(self, constraints: list[tuple[Any, int]], words: Any) -> None:
        assert len(words) == len(constraints)


@DEPTHS
def test_a_failed_step_also_ends_the_step_that_waits_for_its_tokens(depth: int) -> None:
    made: list[Constraint] = []

    def make_constraint(request: Request) -> Constraint:
        made.append(Constraint())
        return made[-1]

    engine, runner = make_engine(pipeline_depth=depth, make_constraint=make_constraint)
    failing = engine.enqueue(make_request([1, 2], greedy(6), grammar=GRAMMAR))
    engine.step()
    launch = runner.sample

    def fail_later(*args: Any) -> MockHandle:
        # The cache is as it should be, so that the mock can launch the step after it.
        runner.sample = launch  # type: ignore[method-assign]
        launch(*args)
        return MockHandle([], RuntimeError("step failed"))

    runner.sample = fail_later  # type: ignore[method-assign, assignment]
    with pytest.raises(StepError, match="step failed") as caught:
        while True:
            engine.step()
    assert caught.value.request_ids == [failing]
    check_engine(engine)
    assert engine.is_finished() and engine.block_manager.num_used_blocks == 0
    again = engine.enqueue(make_request([1, 2], greedy(6), grammar=GRAMMAR))
    finished = run(engine)
    want = complete([1, 2], 6, frozenset(), 128)
    assert finished[again]["token_ids"] == want == made[-1].seen


@DEPTHS
def test_a_constraint_that_raises_fails_its_request_alone(depth: int) -> None:
    # Of two outputs one fails, and the other ends with it.
    constraints = [Constraint(most) for most in (2, 9)]
    engine, _ = make_engine(pipeline_depth=depth, make_constraint=lambda request: constraints.pop())
    good = [engine.add_request([i, i + 1], greedy(6)) for i in (1, 3)]
    bad = engine.enqueue(make_request([5, 6], SamplingParams(0.5, 6, ignore_eos=True, n=2), grammar=GRAMMAR))
    reported: dict[int, list[int]] = {}
    finished: dict[int, RequestOutput] = {}
    failures = []
    while not engine.is_finished():
        try:
            result = engine.step()
        except StepError as error:
            failures.append(error)
            check_engine(engine)
            assert not [seq for seq in engine.scheduler.sequences if seq.seq_id not in good]
            continue
        finished.update(result.finished)
        # What the step that raised has brought the others comes with the next one.
        for request_id, token_ids in result.new_token_ids.items():
            reported.setdefault(request_id, []).extend(token_ids)
    assert [error.request_ids for error in failures] == [[bad]] and isinstance(failures[0].__cause__, Panic)
    want = {request_id: complete([i, i + 1], 6, frozenset(), 128) for request_id, i in zip(good, (1, 3), strict=True)}
    assert {request_id: output["token_ids"] for request_id, output in finished.items()} == want
    assert {request_id: reported[request_id] for request_id in good} == want
    assert engine.block_manager.num_used_blocks == 0 and not engine.block_manager._unconfirmed


def test_an_aborted_requests_outputs_that_had_ended_keep_their_reasons() -> None:
    eos = complete([1], 3, frozenset(), 128)[2]
    engine, _ = make_engine(pipeline_depth=0, eos=frozenset([eos]), max_num_seqs=1)
    # One at a time: the first ends before the second runs.
    request_id = engine.add_request([1], SamplingParams(0.5, 9, n=2, prompt_logprobs=0))
    for _ in range(4):
        engine.step()
    engine.abort([request_id], keep_outputs=True)
    (output,) = run(engine).values()
    assert [item.finish_reason for item in output.outputs] == ["stop", "abort"]
    assert output.outputs[0].token_ids == complete([1], 3, frozenset(), 128)
    assert output.outputs[1].token_ids == output.outputs[0].token_ids[:1]
    # Aborted before its prompt was computed, a request has no log-probabilities of it.
    request_id = engine.add_request([1], SamplingParams(0.5, 9, prompt_logprobs=0))
    engine.abort([request_id], keep_outputs=True)
    assert run(engine)[request_id].prompt_logprobs is None


def test_finished_requests_do_not_wait_for_the_garbage_collector() -> None:
    engine, _ = make_engine(pipeline_depth=0)
    gc.collect()
    gc.disable()
    try:
        engine.add_request([1], SamplingParams(0.5, 4, n=3))
        engine.add_request([2], SamplingParams(0.5, 4))
        aborted = engine.add_request([3], SamplingParams(0.5, 40, n=2))
        engine.step()
        alive = [weakref.ref(seq) for seq in engine.scheduler.sequences]
        assert len(alive) == 6
        engine.abort([aborted])
        run(engine)
        assert not any(reference() for reference in alive)
    finally:
        gc.enable()
