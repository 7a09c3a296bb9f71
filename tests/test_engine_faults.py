"""Threads, signals and exceptions at bad moments: nothing is corrupted, and no request vanishes without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, StepError
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.messages import StepOutput
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import RequestOutput
from nanovllm.utils.interrupt import deferred_signals
from tests.mock_runner import check_engine, complete, make_engine
from tests.test_scheduler import run

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, device="cpu", max_model_len=128, kvcache_block_size=16, num_kvcache_blocks=40) as llm:
        yield llm


class Background:
    """A `generate` in a thread of its own, held in the middle of its third step until `go_on`."""

    def __init__(self, llm: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
        self.outputs: list[RequestOutput] = []
        self.error: BaseException | None = None
        self._go_on = threading.Event()
        in_step = threading.Event()
        runner: Any = llm._runner
        launch, calls = runner.launch, []

        def held_launch(batch: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                in_step.set()
                assert self._go_on.wait(30)
            return launch(batch)

        def work() -> None:
            try:
                self.outputs = llm.generate(prompts, params, use_tqdm=False)
            except BaseException as error:
                self.error = error

        runner.launch = held_launch
        self._thread = threading.Thread(target=work)
        self._thread.start()
        assert in_step.wait(30)

    def go_on(self) -> None:
        self._go_on.set()

    def join(self) -> None:
        self.go_on()
        self._thread.join(30)
        assert not self._thread.is_alive()


def test_a_second_thread_does_not_disturb_the_one_that_generates(llm: LLM) -> None:
    prompts = [[1, 2, 3], [4] * 40]
    want = [output["token_ids"] for output in llm.generate(prompts, greedy(12), use_tqdm=False)]
    first = Background(llm, prompts, greedy(12))
    queued = len(llm._inbox)
    with pytest.raises(RuntimeError, match="already running"):
        llm.generate([[5, 6]], greedy(4), use_tqdm=False)
    with pytest.raises(RuntimeError, match="already running"):
        llm.step()
    assert len(llm._inbox) == queued, "nothing is queued"
    kept, dropped = llm.add_request([7, 8], greedy(5)), llm.add_request([9], greedy(5))
    llm.abort([dropped])
    first.join()
    assert first.error is None
    assert [output["token_ids"] for output in first.outputs] == want
    assert [len(output["token_ids"]) for output in run(llm).values()] == [5]
    assert llm.stats()["num_used_blocks"] == 0
    assert kept < dropped


def test_two_threads_at_once_are_right_or_refused(llm: LLM) -> None:
    prompts = [[i] * (5 + i) for i in range(6)]
    want = [output["token_ids"] for output in llm.generate(prompts, greedy(6), use_tqdm=False)]
    results: list[Any] = []

    def work() -> None:
        try:
            results.append([output["token_ids"] for output in llm.generate(prompts, greedy(6), use_tqdm=False)])
        except RuntimeError as error:
            results.append(str(error))

    for _ in range(10):
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    refused = [result for result in results if isinstance(result, str)]
    assert all("already running" in message for message in refused) and len(refused) <= 10
    assert [result for result in results if not isinstance(result, str)] == [want] * (20 - len(refused))


@DEPTHS
def test_aborts_from_another_thread_do_not_get_in_the_way_of_steps(depth: int) -> None:
    engine, runner = make_engine(pipeline_depth=depth, max_num_batched_tokens=64)
    launch = runner.launch

    def slow_launch(batch: Any) -> Any:
        handle = launch(batch)
        result = handle.result

        def slow_result() -> StepOutput:
            time.sleep(0.002)
            return result()

        handle.result = slow_result  # type: ignore[method-assign]
        return handle

    runner.launch = slow_launch  # type: ignore[method-assign]
    kept = engine.add_request([1, 2, 3], greedy(100))
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            engine.abort([engine.add_request([4], greedy(50))])

    thread = threading.Thread(target=work)
    thread.start()
    outputs: dict[int, RequestOutput] = {}
    try:
        while kept not in outputs:
            outputs.update(engine.step().finished)
    finally:
        over.set()
        thread.join()
    assert outputs[kept]["token_ids"] == complete([1, 2, 3], 100, frozenset(), 128)
    engine.abort([kept])
    run(engine)
    with pytest.raises(ValueError, match=r"request id must be an integer >= 0, not \{\}"):
        engine.abort([{}])  # type: ignore[list-item]
    assert engine.is_finished()


def test_a_generate_ends_whose_requests_are_gone(llm: LLM) -> None:
    runner: Any = llm._runner
    launch = runner.launch
    other = llm.add_request([9, 8, 7], greedy(1))

    def aborting_launch(batch: Any) -> Any:
        handle = launch(batch)
        llm.scheduler.abort([seq_id for seq_id in batch.sampled_seq_ids if seq_id != other])
        return handle

    runner.launch = aborting_launch
    # Another caller's result is still to be claimed.
    with pytest.raises(RuntimeError, match="aborted by somebody else"):
        llm.generate([[1, 2, 3]], greedy(9), use_tqdm=False)
    runner.launch = launch
    assert list(run(llm)) == [other]


def test_a_generate_ends_with_the_error_of_a_plan_that_fails(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_schedule() -> None:
        raise MemoryError("no plan")

    monkeypatch.setattr(llm.scheduler, "schedule", failing_schedule)
    with pytest.raises(StepError, match="no plan"):
        llm.generate([[1, 2, 3]], greedy(9), use_tqdm=False)
    assert llm.is_finished()


def test_what_finished_before_the_device_was_lost_can_be_had() -> None:
    engine, runner = make_engine(pipeline_depth=1)
    first, second = engine.add_request([1, 2], greedy(2)), engine.add_request([3, 4], greedy(9))
    launch = runner.launch

    def lost() -> None:
        raise RuntimeError("device lost")

    def failing_launch(batch: Any) -> Any:
        if len(runner.batches) == 2:
            runner.synchronize = lost  # type: ignore[method-assign]
            raise RuntimeError("launch failed")
        return launch(batch)

    runner.launch = failing_launch  # type: ignore[method-assign]
    with pytest.raises(StepError, match="the engine is closed: device lost") as caught:
        for _ in range(3):
            engine.step()
    assert caught.value.request_ids == [second]
    assert [request_id for request_id, _ in engine.step().finished] == [first]
    assert engine.is_finished()
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()


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


def test_exit_from_another_thread_ends_a_generate(llm: LLM) -> None:
    first = Background(llm, [[1, 2, 3]], greedy(100))
    threading.Timer(0.2, first.go_on).start()
    started = time.monotonic()
    llm.exit()
    assert time.monotonic() - started < 10
    llm.exit()
    first.join()
    assert isinstance(first.error, RuntimeError) and "closed" in str(first.error)
    assert llm._runner is None


def test_exit_does_not_wait_for_a_step_without_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.engine.driver._EXIT_SECONDS", 0.1)
    first = Background(llm, [[1, 2, 3]], greedy(100))
    llm.exit()
    assert llm._runner is not None
    first.join()
    assert llm._runner is None, "the step that was waited for closes the engine"


def test_exit_in_a_signal_handler_does_not_wait_for_its_own_step(llm: LLM) -> None:
    runner: Any = llm._runner
    launch = runner.launch
    previous = signal.signal(signal.SIGUSR1, lambda *_: llm.exit())

    def launch_and_signal(batch: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return launch(batch)

    runner.launch = launch_and_signal
    started = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate([[1, 2]], greedy(9), use_tqdm=False)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert time.monotonic() - started < 5
    assert llm._runner is None


def test_the_process_of_a_daemon_thread_that_generates_ends_with_its_own_code() -> None:
    script = f"""
import sys, threading, time
from nanovllm import LLM, SamplingParams
llm = LLM({BUNDLED_MODEL!r}, device="cpu", max_model_len=512)
work = lambda: llm.generate([[1, 2, 3]] * 64, SamplingParams(max_tokens=500, ignore_eos=True), use_tqdm=False)
# A daemon thread that prints while the interpreter ends can end it by itself.
threading.excepthook = lambda hook: None
threading.Thread(target=work, daemon=True).start()
while llm.stats()["num_output_tokens"] < 100:
    time.sleep(0.01)
sys.exit(3)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "terminate called" not in done.stderr


@DEPTHS
def test_ctrl_c_with_a_failing_step_tells_the_other_caller(checkpoint: Path, depth: int) -> None:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with LLM(checkpoint, device="cpu", max_model_len=128, num_kvcache_blocks=2) as llm:
            runner: Any = llm._runner
            runner.pipeline_depth = depth
            launch = runner.launch

            def failing_launch(batch: Any) -> Any:
                if llm.scheduler.stats.num_steps == 3:
                    signal.raise_signal(signal.SIGINT)
                    raise MemoryError("no room")
                return launch(batch)

            runner.launch = failing_launch
            other = llm.add_request([3, 2, 1], greedy(9))
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[1, 2]], greedy(9), use_tqdm=False)
            assert not llm.is_finished()
            runner.launch = launch
            with pytest.raises(StepError, match="no room") as caught:
                llm.step()
            assert caught.value.request_ids == [other] and isinstance(caught.value.__cause__, MemoryError)
            assert llm.is_finished() and llm.stats()["num_used_blocks"] == 0
            assert len(llm.generate([[1, 2]], greedy(4), use_tqdm=False)[0]["token_ids"]) == 4
    finally:
        signal.signal(signal.SIGINT, previous)


def test_ctrl_c_while_requests_are_queued_leaves_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = LLM._queue

    def interrupted_queue(self: LLM, *args: Any) -> int:
        request_id = queue(self, *args)
        if request_id == 2:
            signal.raise_signal(signal.SIGINT)
        return request_id

    monkeypatch.setattr(LLM, "_queue", interrupted_queue)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[i] for i in range(5)], greedy(4), use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert llm.is_finished()
    assert llm.step() == ([], 0, 0)


class Panic(BaseException):
    """As the tokenizers library raises it."""


class Tokenizer:
    """Decodes token ids, but not these."""

    def __init__(self, bad: list[int]) -> None:
        self.bad = bad

    def decode(self, token_ids: list[int], **_: Any) -> str:
        if token_ids == self.bad:
            raise Panic("no such text")
        return str(token_ids)


@DEPTHS
def test_a_text_that_cannot_be_decoded_fails_alone(depth: int) -> None:
    prompts = [[1, 2], [3, 4], [5, 6]]
    want = [complete(prompt, 4, frozenset(), 128) for prompt in prompts]
    engine, _ = make_engine(pipeline_depth=depth)
    engine.tokenizer = Tokenizer(want[1])
    ids = [engine.add_request(prompt, greedy(4)) for prompt in prompts]
    outputs: dict[int, RequestOutput] = {}
    failures: list[StepError] = []
    while not engine.is_finished():
        try:
            outputs.update(engine.step().finished)
        except StepError as error:
            failures.append(error)
    assert {i: output["text"] for i, output in outputs.items()} == {ids[0]: str(want[0]), ids[2]: str(want[2])}
    assert [failure.request_ids for failure in failures] == [[ids[1]]]
    assert isinstance(failures[0].__cause__, Panic)


@DEPTHS
@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_system_exit_within_a_step_loses_no_request(depth: int, where: str) -> None:
    engine, runner = make_engine(pipeline_depth=depth, max_num_seqs=2)
    ids = [engine.add_request([i] * 20, greedy(6)) for i in range(3)]
    engine.step()
    launch = runner.launch

    def leaving(batch: Any) -> Any:
        handle = launch(batch)
        if where == "launch":
            raise SystemExit(7)
        handle.error = SystemExit(7)
        return handle

    runner.launch = leaving  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        for _ in range(2):
            engine.step()
    runner.launch = launch  # type: ignore[method-assign]
    check_engine(engine)
    with pytest.raises(StepError) as caught:
        engine.step()
    assert caught.value.request_ids == ids[:2] and isinstance(caught.value.__cause__, SystemExit)
    assert run(engine)[ids[2]]["token_ids"] == complete([2] * 20, 6, frozenset(), 128)


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


def test_a_preempted_request_whose_token_is_in_flight_fails_with_that_step() -> None:
    def steps_until_preemption(failing: int | None) -> int:
        engine, runner = make_engine(pipeline_depth=1, num_blocks=3, max_num_seqs=2)
        ids = [engine.add_request([i] * 14, greedy(30)) for i in (1, 2)]
        for step in range(100):
            runner.fail_result = step == failing
            try:
                engine.step()
            except StepError as error:
                assert error.request_ids == ids
                assert engine.stats()["num_preemptions"] == 1 and engine.is_finished()
                check_engine(engine)
                return step
            if engine.stats()["num_preemptions"] and failing is None:
                return step
        raise AssertionError("nothing is preempted, or nothing fails")

    # The result of the step before the one that preempts is taken in after that one has been planned.
    preempting = steps_until_preemption(None)
    assert steps_until_preemption(preempting - 1) == preempting


def test_an_empty_step_leaves_the_books_of_the_steps_under_way_alone() -> None:
    manager = BlockManager(4, 2)
    scheduler = Scheduler(manager, max_num_running=2, max_num_batched_tokens=8, max_model_len=16)
    scheduler.add(Sequence(0, [1, 2, 3], greedy(9), 0))
    batch = scheduler.schedule()
    assert batch is not None
    # Its token is in flight, so it cannot come back yet, and nothing can run.
    scheduler._preempt(scheduler.running[0])
    assert scheduler.schedule() is None
    scheduler.postprocess(batch, StepOutput([5]))
    assert not manager._unconfirmed
    manager.rollback()
    assert len(manager._cached) == 1


def test_aborting_many_waiting_requests_takes_no_time_each() -> None:
    engine, _ = make_engine(pipeline_depth=0)
    ids = [engine.add_request([1], greedy(2)) for _ in range(20_000)]
    engine.step()
    started = time.perf_counter()
    # In the reverse order of arrival, the worst for a list.
    engine.abort(reversed(ids))
    assert time.perf_counter() - started < 0.5
    assert engine.is_finished()
