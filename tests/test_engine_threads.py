"""An engine and several threads: one drives it, and any may queue, abort, or end it."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nanovllm import SamplingParams
from tests.mock_llm import make_mock_engine, mock_llm
from tests.mock_runner import complete, greedy, make_engine, make_request, run

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@DEPTHS
def test_aborts_from_another_thread_do_not_get_in_the_way_of_steps(depth: int) -> None:
    engine, _ = make_mock_engine(step_seconds=0.002, pipeline_depth=depth, max_num_batched_tokens=64)
    kept = engine.add_request([1, 2, 3], greedy(100))
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            engine.abort([engine.add_request([4], greedy(50))])

    thread = threading.Thread(target=work)
    thread.start()
    outputs: dict[int, Any] = {}
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


def test_a_step_waits_for_the_abort_of_another_thread() -> None:
    engine, _ = make_engine(pipeline_depth=0)
    request = engine.add_request([1, 2, 3], greedy(2))
    empty_inbox, within, go_on = engine._empty_inbox, threading.Event(), threading.Event()

    def held_empty_inbox() -> None:
        if threading.current_thread() is thread:
            within.set()
            assert go_on.wait(240)
        empty_inbox()

    engine._empty_inbox = held_empty_inbox  # type: ignore[method-assign]
    thread = threading.Thread(target=engine.abort, args=([7],))
    thread.start()
    assert within.wait(240)
    threading.Timer(0.1, go_on.set).start()
    assert list(run(engine)) == [request]
    thread.join()


def test_requests_with_ids_of_front_ends_run_in_the_order_of_arrival() -> None:
    engine, _ = make_engine(pipeline_depth=0, max_num_seqs=1)
    ids = [5 << 40, 9 << 40, 0]
    requests = [make_request([i, 7], SamplingParams(0.5, 2, n=2, ignore_eos=True)) for i in range(3)]
    assert [engine.enqueue(request, i) for request, i in zip(requests, ids, strict=True)] == ids
    # The id of any output stands for the request.
    engine.abort([(9 << 40) + 1])
    assert list(run(engine)) == [5 << 40, 0]


def test_exit_does_not_wait_for_a_step_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.engine.engine._EXIT_SECONDS", 0.1)
    engine, runner = make_engine(pipeline_depth=0)
    forward, within, go_on = runner.forward, threading.Event(), threading.Event()

    def held(batch: Any) -> Any:
        within.set()
        assert go_on.wait(240)
        return forward(batch)

    runner.forward = held  # type: ignore[method-assign]
    engine.add_request([1, 2, 3], greedy(9))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, engine)
        assert within.wait(240)
        engine.exit()
        assert not runner.closed
        go_on.set()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            running.result(60)
    assert runner.closed == 1, "the step that was waited for closes the engine"


def test_exit_in_a_signal_handler_does_not_wait_for_its_own_step() -> None:
    engine, runner = make_engine(pipeline_depth=0)
    forward = runner.forward
    # Other signals than this one wait for the step's end.
    runner.forward = lambda batch: signal.raise_signal(signal.SIGUSR1) or forward(batch)  # type: ignore
    previous = signal.signal(signal.SIGUSR1, lambda *_: engine.exit())
    engine.add_request([1, 2], greedy(9))
    try:
        with pytest.raises(RuntimeError, match="closed"):
            run(engine)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert runner.closed == 1


@pytest.mark.timeout(30)
def test_a_signal_handler_may_call_the_engine_within_an_abort() -> None:
    engine, _ = make_engine(pipeline_depth=0)
    first, second = (engine.add_request([i], greedy(5)) for i in (1, 2))
    empty_inbox, refused = engine._empty_inbox, list[str]()

    def call_engine(number: int, frame: object) -> None:
        engine.abort([second])
        try:
            engine.step()
        except RuntimeError as error:
            refused.append(str(error))

    def interrupted_empty_inbox() -> None:
        engine._empty_inbox = empty_inbox  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGUSR1)
        empty_inbox()

    engine._empty_inbox = interrupted_empty_inbox  # type: ignore[method-assign]
    previous = signal.signal(signal.SIGUSR1, call_engine)
    try:
        engine.abort([first])
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert len(refused) == 1 and "already running" in refused[0]
    assert engine.is_finished()


def test_an_abort_between_a_requests_ids_and_its_sequences_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine(pipeline_depth=0)

    class Inbox(deque[Any]):
        """Another thread aborts all while a request is put in."""

        def extend(self, messages: Iterable[Any]) -> None:
            engine.abort(engine.request_ids)
            super().extend(messages)

    monkeypatch.setattr(engine, "_inbox", Inbox())
    engine.add_request([1, 2, 3], greedy(8))
    engine.step()
    assert engine.is_finished() and not engine.stats()["num_prompt_tokens"]


def test_a_pause_waits_for_one_step_and_comes_before_the_next() -> None:
    engine, runner = make_engine(pipeline_depth=0)
    request = engine.add_request([1, 2, 3], greedy(9))
    launch, thread = runner.forward, threading.Thread(target=engine.pause, args=("keep",))

    def launch_while_another_waits(batch: Any) -> Any:
        thread.start()
        while engine._turn.acquire(blocking=False):
            engine._turn.release()
            time.sleep(0.001)
        runner.forward = launch  # type: ignore[method-assign]
        return launch(batch)

    runner.forward = launch_while_another_waits  # type: ignore[method-assign]
    for _ in range(5):
        engine.step()
    thread.join()
    assert engine.stats()["num_steps"] == 1, "the step that was under way"
    engine.resume()
    assert list(run(engine)) == [request]


def test_a_pause_that_waits_runs_nothing_that_comes_later() -> None:
    engine, _ = make_mock_engine(pipeline_depth=0)
    llm = mock_llm(engine)
    first = llm.add_request([1, 2], greedy(9))
    llm.step()
    llm.pause("wait")
    late = llm.add_request([3], greedy(2), priority=-1)
    dropped = llm.add_request([4], greedy(2))
    assert [request_id for _ in range(12) for request_id, _ in llm.step().finished] == [first]
    llm.abort([dropped])
    llm.resume()
    assert list(run(llm)) == [late]
