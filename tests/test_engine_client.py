"""A front end's side of an engine, over the mock model: stop strings end outputs, and no token is lost."""

from __future__ import annotations

import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest

from nanovllm.client.engine_client import EngineClient, RequestState
from nanovllm.engine.request import Request
from nanovllm.outputs import RequestOutput, StepError
from nanovllm.text.output_processor import OutputProcessor
from tests.mock_runner import complete, greedy, make_engine, make_request
from tests.test_engine_faults import add
from tests.test_output_processor import WatchedLock


class NumberTokenizer:
    """Tokens are numbers."""

    def decode(self, token_ids: list[int], **_: bool) -> str:
        return "".join(f"{token_id}," for token_id in token_ids)


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


def test_aborted_requests_are_forgotten() -> None:
    engine, _ = make_engine(pipeline_depth=0)
    client = EngineClient(engine, OutputProcessor(NumberTokenizer()))
    params = replace(greedy(30), stop=["x"], temperature=1.0, n=2)
    ids = [add(client, make_request([1, 2], params)) for _ in range(2)]
    client.step()
    engine.abort([ids[0] + 1])
    engine.abort([ids[1]], keep_outputs=True)
    assert [request_id for request_id, _ in client.step().finished] == [ids[1]]
    assert client.is_finished() and not client._states
    done, never = (add(client, make_request([1, 2], params)) for params in (greedy(1), greedy(30)))
    engine.run_step()
    client.abort([done, never])
    # What has finished waits for its caller.
    assert not client._states
    assert [request_id for request_id, _ in client.step().finished] == [done] and not client._states


def test_what_has_finished_is_returned_after_the_device_is_lost() -> None:
    engine, runner = make_engine(pipeline_depth=0)
    client = EngineClient(engine, OutputProcessor(NumberTokenizer()))
    done, failed = (add(client, make_request([1, 2], greedy(count))) for count in (2, 30))
    engine.run_step()
    engine.run_step()
    client.take_news()
    runner.forward = runner.synchronize = Mock(side_effect=RuntimeError("lost"))  # type: ignore[method-assign]
    # Its results stay in the engine, as when an exception comes between.
    engine.run_step()
    with pytest.raises(StepError) as caught:
        client.step()
    assert caught.value.request_ids == [failed]
    assert [request_id for request_id, _ in client.step().finished] == [done]
    with pytest.raises(RuntimeError, match="the engine is closed"):
        client.step()


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
        assert reached.wait(10)
        return request_id

    engine.enqueue = held_enqueue  # type: ignore[method-assign]
    client._lock = WatchedLock(reached.set)  # type: ignore[assignment]
    request_id = add(client, make_request([1, 2], replace(greedy(3), stop=[f"{first},"])))
    thread.join(10)
    while not client.is_finished():
        finished.update(client.step().finished)
    assert finished[request_id]["token_ids"] == want[:1]
