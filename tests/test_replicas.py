"""Placement of requests on replicas, and their end when a caller ends: nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from itertools import count
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nanovllm import SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.client.engine_process import replica_devices
from nanovllm.client.engine_server import EngineServer
from nanovllm.client.messages import Enqueue, StepReport
from nanovllm.client.placement import Placement
from nanovllm.client.replicated_engine import Replica
from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Abort, Request
from tests.mock_llm import MockReplicas, mock_llm
from tests.mock_runner import complete, make_engine, make_request
from tests.rank_processes import engine_pids
from tests.server_process import wait_until

BLOCK = 16


def request(tokens: list[int], priority: int = 0, n: int = 1) -> Request:
    return make_request(tokens, SamplingParams(1.0, 4, n=n, ignore_eos=True), priority=priority)


def sent(placement: Placement) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {index: [] for index in placement.shares}
    for request_id, index in placement.take():
        found[index].append(request_id)
    return found


def test_an_idle_replica_steals_the_far_half_of_a_stretch() -> None:
    placement = Placement([4, 4], BLOCK)
    placement.spread({i: request([i]) for i in range(40)})
    # What they can run, and four more.
    assert sent(placement) == {0: list(range(8)), 1: list(range(20, 28))}
    for i in range(8):
        placement.end(i)
    assert sent(placement) == {0: list(range(8, 16)), 1: []}
    for i in range(8, 16):
        placement.end(i)
    # Four are left of its own; then the far half of the other twelve.
    assert sent(placement) == {0: [16, 17, 18, 19, 34, 35, 36, 37], 1: []}
    # What comes later is at the end.
    placement.spread({i: request([i]) for i in range(40, 44)})
    assert [list(share.stretch) for share in placement.shares.values()] == [[38, 39], [*range(28, 34), *range(40, 44)]]
    # What was dropped is not sent.
    placement.end(28)
    for i in range(20, 24):
        placement.end(i)
    assert sent(placement) == {0: [], 1: [29, 30, 31, 32]}


def test_no_replica_takes_what_another_has_room_for() -> None:
    placement = Placement([64, 64], BLOCK)
    placement.spread({i: request([i]) for i in range(40)})
    assert [len(ids) for ids in sent(placement).values()] == [20, 20]


def test_lower_priorities_are_first_on_each() -> None:
    placement = Placement([4, 4], BLOCK)
    placement.spread({i: request([i], priority=i // 8) for i in range(24)})
    assert sent(placement) == {0: [0, 1, 2, 3, 8, 9, 10, 11], 1: [4, 5, 6, 7, 12, 13, 14, 15]}
    # Several outputs take several places.
    placement = Placement([4], BLOCK)
    placement.spread({i: request([i], n=3) for i in range(4)})
    assert sent(placement) == {0: [0, 1, 2]}


def test_what_a_lost_replica_was_to_do_is_done_by_the_others() -> None:
    placement = Placement([4, 4, 4], BLOCK)
    placement.spread({i: request([i]) for i in range(60)})
    sent(placement)
    assert placement.lose(1) == list(range(20, 28))
    for i in (*range(8), *range(40, 48)):
        placement.end(i)
    found: list[int] = []
    for _ in range(99):
        taken = [i for ids in sent(placement).values() for i in ids]
        found += taken
        for share in placement.shares.values():
            for i in list(share.sent):
                placement.end(i)
    assert sorted(found) == [*range(8, 40), *range(48, 60)]
    placement.spread({99: request([1])})
    assert placement.lose(0) == placement.lose(2) == []


def test_a_request_goes_to_its_first_block_unless_overloaded() -> None:
    placement, ids = Placement([8, 8], BLOCK), count()

    def route(document: int) -> int:
        return placement.route(next(ids), request([document] * BLOCK + [next(ids)]))

    first, second = route(1), route(2)
    assert {first, second} == {0, 1}
    assert [route(1), route(2)] == [first, second]
    # Each has two; up to five are not over twice the least load before they come.
    assert [route(1) for _ in range(3)] == [first] * 3
    # From then on the other one has the block.
    assert [route(1), route(1)] == [second, second]
    # Another salt has blocks of its own, and a prompt without a full block goes where least is to do.
    salted = request([1] * BLOCK + [5])
    salted.cache_salt = "x"
    least = min(placement.shares, key=lambda index: placement.shares[index].load)
    assert placement.route(next(ids), salted) == least


def test_gpus_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.client.engine_process.num_gpus", lambda: 4)

    def devices(size: int, ranks: int = 1, device: str = "auto") -> list[str]:
        settings = {"data_parallel_size": size, "tensor_parallel_size": ranks, "device": device}
        return replica_devices(Config("m", **settings))  # type: ignore[arg-type]

    assert devices(1) == ["auto"] and devices(2, device="cpu") == ["cpu", "cpu"]
    assert devices(4) == [f"cuda:{i}" for i in range(4)] and devices(2, 2) == ["cuda:0", "cuda:2"]
    assert devices(2, device="cuda:2") == ["cuda:2", "cuda:3"]
    with pytest.raises(ValueError, match=r"data_parallel_size=3 with tensor_parallel_size=2 needs 6 GPUs.* are 4"):
        devices(3, 2)
    with pytest.raises(ValueError, match=r"needs 2 GPUs from cuda:3 on, but there are 1$"):
        devices(2, device="cuda:3")
    monkeypatch.setattr("nanovllm.client.engine_process.num_gpus", lambda: 0)
    with pytest.raises(ValueError, match=r"needs 2 GPUs, but there are 0"):
        devices(2, device="cuda")


CALLER = f"""
import sys, threading
from nanovllm import LLM, SamplingParams
endless = SamplingParams(1.0, 100_000, ignore_eos=True)
llm = LLM({str(BUNDLED_MODEL)!r}, data_parallel_size=2, device="cpu", max_model_len=1024, kvcache_block_size=16)
for turn in range(2):
    try:
        for i, _ in enumerate(llm.stream(["a", "b"], endless)):
            if i == 3:
                print("running", flush=True)
    except KeyboardInterrupt:
        assert len(llm.generate("a", SamplingParams(0, 3, ignore_eos=True), use_tqdm=False)[0]["token_ids"]) == 3
        assert llm.is_finished() and llm.stats()["num_used_blocks"] == 0
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize("with_its_token", [False, True])
def test_a_stop_string_holds_after_moving_to_another_replica(with_its_token: bool) -> None:
    replicas = MockReplicas(2, pipeline_depth=0, step_seconds=0.002)
    engine = replicas.engine
    want, name = complete([1, 2], 120, frozenset(), 128), "_take_in" if with_its_token else "stop"
    call = getattr(engine, name)

    def kill_and_call(*args: Any) -> None:
        if with_its_token and all(token[3] != want[4] for token in args[1].new_tokens):
            call(*args)
            return
        vars(engine).pop(name)
        index: Any = args[0].index if with_its_token else engine._placement.holder(args[0][0][0])
        replicas.kill(index)
        # More tokens may have come by now.
        wait_until(lambda: engine._replicas[index].has_ended and engine._inbox[-1][1] is None)
        call(*args)

    vars(engine)[name] = kill_and_call
    with mock_llm(engine) as llm, pytest.warns(UserWarning, match="its 1 requests run again"):
        params = SamplingParams(0.5, 120, stop=f"{want[4]},", ignore_eos=True)
        found = llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs[0]
        end = 1 + next(i for i in range(5) if f"{want[4]}," in f"{want[i]},")
        assert (found.token_ids, found.stop_reason) == (want[:end], f"{want[4]},")
        assert llm.stats()["num_output_tokens"] < 100


def test_a_death_is_told_before_the_replica_counts_as_ended() -> None:
    """Otherwise an engine whose last replica has died is closed, open for a moment, and closed again."""
    own, others = Pipe()
    others.send((None, None))
    told: list[tuple[Any, bool]] = []
    replica = Replica(0, own, lambda replica, report: told.append((report, replica.has_ended)), lambda: "")
    others.close()
    wait_until(lambda: replica.has_ended)
    assert told == [(None, False)]


def test_an_abort_reaches_a_request_whose_grammar_is_being_compiled() -> None:
    is_compiled = threading.Event()

    def compile_slowly(request: Request) -> None:
        assert is_compiled.wait(60)

    device: Any = None
    server = EngineServer(make_engine(pipeline_depth=0, make_constraint=Mock())[0], device, compile_slowly)
    driver = threading.Thread(target=server.run, daemon=True)
    driver.start()
    own, others = Pipe()
    server.connect(others)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    own.send([Enqueue(5, make_request([1], params, bad_sequences=[[2, 3]]))])
    wait_until(lambda: 5 in server._preparing)
    own.send([Abort([5], True)])
    wait_until(lambda: server._preparing[5] is not None)
    is_compiled.set()
    own.recv()
    reports = list[Any]()
    while not any(isinstance(report, StepReport) for report in reports):
        reports = own.recv()
    server.close()
    driver.join(60)
    finished = [item for report in reports if isinstance(report, StepReport) for item in report.finished]
    assert [(i, output.outputs[0].token_ids) for i, output in finished] == [(5, [])]


def test_accepted_drafts_of_replicas_add_up_by_position() -> None:
    replicas = MockReplicas(2, pipeline_depth=0, num_drafts=3)
    engine = replicas.engine
    with mock_llm(engine) as llm:
        assert llm.stats()["num_accepted_per_position"] == [0, 0, 0]
        for replica, accepted in zip(engine._replicas, ([5, 2, 0], [7, 4, 1]), strict=True):
            replica.stats |= {"num_drafts": 9, "num_accepted_per_position": accepted}
        for _ in range(2):
            stats = engine.stats()
            assert (stats["num_drafts"], stats["num_accepted_per_position"]) == (18, [12, 6, 1])
        # What a dead one has counted stays.
        with pytest.warns(UserWarning, match="its 0 requests run again"):
            engine._lose(engine._replicas[0])
        assert engine.stats()["num_accepted_per_position"] == [12, 6, 1]


def test_calls_after_an_interrupted_one_have_their_own_results(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MockReplicas(2, pipeline_depth=0).engine
    with mock_llm(engine):
        with monkeypatch.context() as patched:
            patched.setattr(engine._replicas[0], "flush", Mock(side_effect=KeyboardInterrupt))
            patched.setattr(engine._replicas[0], "add", Mock())
            with pytest.raises(KeyboardInterrupt):
                engine.call(LLMEngine.reset_prefix_cache)
        assert [stats.keys() >= {"num_steps"} for stats in engine.call(LLMEngine.stats)] == [True, True]
        assert engine.call(LLMEngine.reset_prefix_cache) == [True, True]


@pytest.mark.deaths
def test_ctrl_c_and_a_caller_that_is_killed() -> None:
    shared = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    # A group of its own, to which a terminal sends Ctrl-C: the engines get it as well.
    with subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True,
                          start_new_session=True) as caller:  # fmt: skip
        try:
            assert caller.stdout is not None and caller.stdout.readline() == "running\n"
            pids = engine_pids(caller.pid)
            os.killpg(caller.pid, signal.SIGINT)
            assert caller.stdout.readline() == "interrupted\n" and engine_pids(caller.pid) == pids
            assert caller.stdout.readline() == "running\n"
        finally:
            caller.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()))
    if shared:
        assert {path for path in Path("/dev/shm").iterdir() if path.owner() == Path.home().owner()} <= shared
