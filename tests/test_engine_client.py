"""A front end's side of an engine, over the mock model: stop strings end outputs, and no token is lost."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from nanovllm.client.engine_client import EngineClient, RequestState
from nanovllm.engine.request import Request
from nanovllm.outputs import RequestOutput
from nanovllm.text.output_processor import OutputProcessor
from tests.mock_llm import NumberTokenizer
from tests.mock_runner import complete, greedy, make_engine, make_request
from tests.test_engine_faults import add
from tests.test_output_processor import WatchedLock


@pytest.mark.parametrize("depth", [0, 1])
def test_an_output_ends_at_the_token_that_completes_its_stop_string(depth: int) -> None:
    engine, runner = make_engine(pipeline_depth=depth)
    client = EngineClient(engine, OutputProcessor(NumberTokenizer()))
    want = complete([1, 2], 6, frozenset(), 128)
    stop = f"{want[4]},{want[5]},"
    state = RequestState(make_request([1, 2], replace(greedy(30), stop=[stop])), client.processor)
    left = [state]
    for news in client.run(lambda pending: client.add_pending([left.pop()], pending) if left else None):
        assert list(news.values()) == [state]
    (output,) = state.result().outputs
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (want, "stop", stop)
    assert output.text == NumberTokenizer().decode(want[:4])
    # It is known before the next step is planned, and the step under way, if there is one, is over.
    assert len(runner.batches) == 6 + depth and engine.stats()["num_output_tokens"] == 6
    assert client.is_finished() and not engine.block_manager.num_used_blocks


def test_no_token_is_lost_that_comes_before_its_request_is_known() -> None:
    engine, _ = make_engine(pipeline_depth=0)
    client = EngineClient(engine, OutputProcessor(NumberTokenizer()))
    first, *_ = want = complete([1, 2], 3, frozenset(), 128)
    enqueue, reached = engine.enqueue, threading.Event()
    finished: dict[int, RequestOutput] = {}

    def drive() -> None:
        finished.update(client.step().finished)
        reached.set()

    thread = threading.Thread(target=drive)

    def held_enqueue(request: Request) -> int:
        request_id = enqueue(request)
        thread.start()
        # The thread that drives the engine waits, or has gone past the first token.
        assert reached.wait(240)
        return request_id

    engine.enqueue = held_enqueue  # type: ignore[method-assign, assignment]
    client._lock = WatchedLock(reached.set)  # type: ignore[assignment]
    request_id = add(client, make_request([1, 2], replace(greedy(3), stop=[f"{first},"])))
    thread.join(240)
    while not client.is_finished():
        finished.update(client.step().finished)
    assert finished[request_id]["token_ids"] == want[:1]
