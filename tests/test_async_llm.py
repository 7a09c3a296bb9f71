"""The engine behind asyncio: the same outputs, cancellation, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import aclosing
from typing import Any
from unittest.mock import Mock

import pytest

from nanovllm import LLM, AsyncLLM, AsyncLLMEngine, QueueFullError, RequestOutput, SamplingParams, StepError
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.client import engine_thread
from nanovllm.client.engine_client import RequestState
from nanovllm.client.engine_thread import Mailbox, RequestStream
from nanovllm.runner.messages import ScheduledBatch
from nanovllm.text.input_processor import LONG_TEXT
from nanovllm.text.output_processor import OutputProcessor
from tests.cache_checks import check_blocks
from tests.mock_runner import make_request
from tests.streams import check_same, joined

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "kvcache_block_size": 16, "seed": 0}
PROMPTS: list[Any] = ["introduce yourself", "The sea", "a", [5, 6, 7]]
PARAMS = [
    SamplingParams(0, 12, logprobs=2),
    SamplingParams(1.3, 20, seed=1, n=3, stop=["a", "e "], ignore_eos=True),
    SamplingParams(2.0, 30, seed=2, prompt_logprobs=1, logprobs=0),
    SamplingParams(1.0, 20, seed=3, detokenize=False),
]
LONG = SamplingParams(1.0, 400, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def module_llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(BUNDLED_MODEL, num_kvcache_blocks=200, max_pending_requests=40, **SETTINGS)
    yield llm
    llm.exit()


@pytest.fixture
def llm(module_llm: AsyncLLM) -> Iterator[AsyncLLM]:
    """An engine in which no test may leave anything."""
    yield module_llm
    assert module_llm.num_pending_requests == 0
    check_empty(module_llm)


def check_empty(llm: AsyncLLM) -> None:
    deadline = time.monotonic() + 240
    while not llm.llm.is_finished() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert llm.llm.is_finished() and llm.llm.stats()["num_used_blocks"] == 0
    check_blocks(llm.llm.llm_engine.block_manager)
    assert not llm.llm.engine_client._states


@pytest.fixture(scope="module")
def want() -> list[RequestOutput]:
    """The outputs of an `LLM`."""
    with LLM(BUNDLED_MODEL, num_kvcache_blocks=200, **SETTINGS) as llm:
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


async def read(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """A stream's outputs as one."""
    (output,) = joined([part async for part in stream])
    return output


def test_outputs_are_those_of_an_llm_and_their_begins_and_ends_are_told(
    llm: AsyncLLM, want: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = list[Any](), list[tuple[RequestState, bool]]()
    monkeypatch.setattr(llm, "on_begin", begun.append)
    monkeypatch.setattr(llm, "on_end", lambda state: ended.append((state, state.is_done)))

    async def run() -> None:
        pairs = list(zip(PROMPTS, PARAMS, strict=True))
        calls: list[Awaitable[RequestOutput]] = [llm.generate(prompt, params) for prompt, params in pairs]
        calls += [read(llm.stream(prompt, params)) for prompt, params in pairs]
        check_same(await asyncio.gather(*calls), want + want)
        task = asyncio.create_task(llm.generate("a", LONG))
        while len(begun) < len(calls) + 1:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert {id(request) for request in begun} == {id(state.request) for state, _ in ended} and len(begun) == len(ended)
    lengths = [max(len(item.token_ids) for item in output.outputs) for output in want + want]
    assert sorted(state.num_tokens for state, is_done in ended if is_done) == sorted(lengths)
    assert [is_done for _, is_done in ended] == [True] * len(lengths) + [False]


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_stream_that_is_closed_or_dropped_is_aborted(llm: AsyncLLM, is_closed: bool) -> None:
    async def run() -> None:
        # One of them was begun and never read.
        streams = [await llm.begin_stream("a", LONG) for _ in range(2)]
        first = await anext(streams[0])
        assert not first.finished and len(first.outputs[0].token_ids) < 50 and llm.num_pending_requests == 2
        for stream in streams if is_closed else []:
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        del streams[:]
        gc.collect()
        assert llm.num_pending_requests == 0
        while llm.llm.stats()["num_running"]:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 240))


@pytest.mark.parametrize("streams", [False, True])
def test_an_aborted_request_ends_with_what_it_has(llm: AsyncLLM, streams: bool) -> None:
    async def run() -> None:
        call: Any = read(llm.stream("a", LONG, request_id="x")) if streams else llm.generate("a", LONG, request_id="x")
        task = asyncio.ensure_future(call)
        while llm.llm.stats()["num_running"] == 0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await llm.abort("x")
        await llm.abort("no such request")
        output = await task
        (item,) = output.outputs
        assert (output.request_id, item.finish_reason) == ("x", "abort") and 0 < len(item.token_ids) < 400
        assert item.text == llm.llm.tokenizer.decode(item.token_ids, skip_special_tokens=True)

    asyncio.run(run())


def test_a_prompt_that_takes_long_can_be_aborted_and_holds_nobody_up(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, may_go_on = llm.llm.input_processor.process, threading.Event()

    def slow_for_long_texts(prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        if len(str(prompts[0])) > LONG_TEXT:
            may_go_on.wait(240)
            prompts = ["a"]
        return process(prompts, *args, **kwargs)

    async def run() -> None:
        long = "a" * (LONG_TEXT + 1)
        aborted = [
            asyncio.ensure_future(llm.generate(long, LONG, request_id="x")),
            asyncio.ensure_future(read(llm.stream({"prompt": long}, LONG, request_id="y"))),
        ]
        await asyncio.sleep(0)
        whole = await asyncio.wait_for(llm.generate("b", SamplingParams(0, 3)), 240)
        assert whole.outputs[0].finish_reason == "length" and not any(task.done() for task in aborted)
        await llm.abort("x")
        llm.abort_all()
        may_go_on.set()
        for output in await asyncio.gather(*aborted):
            assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
        # The names are free, and those who take them are not aborted.
        again = await llm.generate("b", SamplingParams(0, 3), request_id="x")
        assert again.outputs[0].finish_reason == "length"

    monkeypatch.setattr(llm.llm.input_processor, "process", slow_for_long_texts)
    asyncio.run(run())


def test_an_engine_that_is_dropped_frees_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM(BUNDLED_MODEL, num_kvcache_blocks=20, **SETTINGS)
    asyncio.run(llm.generate("a", SamplingParams(0, 3)))
    runner: Any = llm.llm.llm_engine._runner
    closed, thread = threading.Event(), llm._thread._thread
    monkeypatch.setattr(runner, "exit", closed.set)
    del llm, runner
    gc.collect()
    assert closed.wait(240)
    thread.join(240)
    assert not thread.is_alive()


@pytest.mark.parametrize("streams", [False, True])
def test_finished_requests_do_not_wait_for_the_garbage_collector(llm: AsyncLLM, streams: bool) -> None:
    alive: list[weakref.ref[Any]] = []
    client = llm.llm.engine_client
    add = client.add

    def watched(state: RequestState) -> None:
        add(state)
        alive.append(weakref.ref(state))

    async def run() -> None:
        params = SamplingParams(1.0, 5, n=2)
        _ = await (read(llm.stream("a", params)) if streams else llm.generate("a", params))
        # The engine's thread still holds what it delivered last.
        while any(reference() for reference in alive):
            await llm.generate("b", SamplingParams(0, 1))
            del alive[1:]

    client.add = watched  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(run(), 240))
    finally:
        gc.enable()
        client.add = add  # type: ignore[method-assign]


def test_bad_requests_and_a_full_queue_are_refused(llm: AsyncLLM) -> None:
    async def run() -> None:
        # Whatever is wrong concerns the request alone.
        others = [asyncio.ensure_future(llm.generate("a", SamplingParams(0, 30))) for _ in range(5)]
        for priority in ("high", None, 1.5, True):
            with pytest.raises(ValueError, match="priority must be an integer"):
                await llm.generate("a", priority=priority)  # type: ignore[arg-type]
        for wrong in ({"temperature": 0}, 3, ""):
            with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
                await llm.generate("a", wrong)  # type: ignore[arg-type]
        for output in await asyncio.gather(*others):
            assert output.finished
        # None of them is queued.
        with pytest.raises(ValueError, match=r"prompts\[1\]"):
            await llm.generate_all(["a", "\ud800"])
        assert llm.num_pending_requests == 0
        tasks = [asyncio.ensure_future(llm.generate("a", LONG, request_id=i)) for i in range(40)]
        await asyncio.sleep(0.1)
        with pytest.raises(QueueFullError, match="40 requests are pending"):
            await llm.generate("a")
        for task in tasks[1:]:
            task.cancel()
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="request_id=0"):
            await llm.generate("a", request_id=0)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_a_reader_gets_what_came_while_it_did_not_wait() -> None:
    async def run() -> None:
        params = SamplingParams(detokenize=False)
        request = make_request([1], params, is_streamed=True)
        state = RequestState(request, OutputProcessor(None))
        stream = RequestStream(state, "x", Mailbox(asyncio.get_running_loop()), lambda stream: None)
        for position, token_id in enumerate((5, 6)):
            stream.state.outputs[0].append(position, token_id, False, b"")
            # The news arrive before the reader waits for them.
            stream.wake()
            output = await asyncio.wait_for(anext(stream), 240)
            assert output.outputs[0].token_ids == [token_id]

    asyncio.run(run())


def lose_device(llm: AsyncLLM, patch: pytest.MonkeyPatch) -> None:
    """Let the next step fail, and the device with it."""
    runner: Any = llm.llm.llm_engine._runner
    patch.setattr(runner, "forward", Mock(side_effect=MemoryError("out of memory")))
    patch.setattr(runner, "synchronize", Mock(side_effect=OSError("device lost")))


def fail_once(llm: AsyncLLM, patch: pytest.MonkeyPatch, num_sampled: int) -> threading.Event:
    """Make the first step that samples `num_sampled` tokens fail. No step begins before the returned event is set."""
    runner: Any = llm.llm.llm_engine._runner
    forward, may_go_on = runner.forward, threading.Event()

    def failing(batch: ScheduledBatch, *args: Any) -> Any:
        assert may_go_on.wait(240)
        if len(batch.sampled_seq_ids) == num_sampled:
            patch.setattr(runner, "forward", forward)
            raise MemoryError("out of memory")
        return forward(batch, *args)

    patch.setattr(runner, "forward", failing)
    return may_go_on


def test_each_request_of_a_failed_step_raises_an_error_of_its_own(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        may_go_on = fail_once(llm, monkeypatch, num_sampled=3)
        streams = [await llm.begin_stream("a", LONG) for _ in range(3)]
        may_go_on.set()
        results = await asyncio.gather(*map(read, streams), return_exceptions=True)
        errors = [result for result in results if isinstance(result, StepError)]
        assert len({str(error) for error in errors}) == 1 and len({id(error) for error in errors}) == 3
        assert len({id(error.__cause__) for error in errors}) == 1 and isinstance(errors[0].__cause__, MemoryError)
        assert llm.is_running and not llm.errored and (await llm.generate("a", SamplingParams(0, 3))).finished

    asyncio.run(run())


def test_a_stream_that_has_ended_leaves_the_next_of_its_name_alone(llm: AsyncLLM) -> None:
    async def run() -> None:
        ended = await llm.begin_stream("a", SamplingParams(0, 2), request_id="x")
        assert [output async for output in ended][-1].finished
        async with aclosing(await llm.begin_stream("a", LONG, request_id="x")) as running:
            await ended.aclose()
            with pytest.raises(ValueError, match="request_id='x'"):
                await llm.begin_stream("a", LONG, request_id="x")
            await llm.abort("x")
            assert (await read(running)).outputs[0].finish_reason == "abort"

    asyncio.run(run())


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_closed_engine_fails_what_is_pending_and_what_comes(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with AsyncLLM(BUNDLED_MODEL, num_kvcache_blocks=100, **SETTINGS) as llm:
            tasks: list[Awaitable[Any]] = [asyncio.ensure_future(llm.generate("a", LONG)) for _ in range(3)]
            while llm.llm.stats()["num_running"] < 3:
                await asyncio.sleep(0.01)
            if is_lost:
                lose_device(llm, monkeypatch)
            else:
                llm.exit()
            # A reader that has its error sees the state that goes with it, however long the log takes.
            monkeypatch.setattr(engine_thread._logger, "error", lambda *_, **__: time.sleep(0.1))
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, RuntimeError) for result in results), results
            assert not llm.is_running and llm.errored == is_lost
            with pytest.raises(RuntimeError, match="closed: device lost" if is_lost else "the engine is closed"):
                await llm.generate("a")
            assert llm.num_pending_requests == 0
        await llm.shutdown()

    asyncio.run(run())


def test_vllms_method_names() -> None:
    async def run() -> None:
        engine = AsyncLLMEngine(BUNDLED_MODEL, num_kvcache_blocks=100, **SETTINGS)
        try:
            params = SamplingParams(1.0, 20, seed=5, logprobs=1, ignore_eos=True)
            outputs = [output async for output in engine.generate("a", params, "1")]
            lengths = [len(output.outputs[0].token_ids) for output in outputs]
            assert lengths == sorted(lengths) and lengths[-1] == 20 and len(lengths) > 2
            final = outputs[-1].outputs[0]
            assert outputs[-1].finished and outputs[-1].request_id == "1" and len(final.logprobs or []) == 20
            assert final.text == engine.async_llm.llm.tokenizer.decode(final.token_ids, skip_special_tokens=True)
            added = await engine.add_request("2", "a", LONG)
            await anext(added)
            await engine.abort("2")
            assert [output async for output in added][-1].outputs[0].finish_reason == "abort"
            assert engine.is_running and not engine.errored
        finally:
            engine.shutdown()
        assert not engine.is_running and not engine.errored

    asyncio.run(run())


def test_a_request_that_cannot_be_begun_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the engine is closed elsewhere")

    async def run() -> None:
        async with AsyncLLM(BUNDLED_MODEL, num_kvcache_blocks=100, **SETTINGS) as llm:
            monkeypatch.setattr(llm.llm.llm_engine, "enqueue", fail)
            with pytest.raises(RuntimeError, match="closed elsewhere"):
                await asyncio.wait_for(llm.generate("a"), 240)
            assert llm.errored and not llm.is_running

    asyncio.run(run())
