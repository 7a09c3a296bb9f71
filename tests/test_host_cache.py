"""Evicted blocks in the host's memory: no block is lost or read early, and tokens are those of an engine without."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, StepError
from nanovllm.runner import host_blocks
from tests.conftest import MakeCheckpoint
from tests.mock_runner import MockRunner, check_engine, complete, make_engine
from tests.rank_processes import rank_pids

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def random_engine(rng: random.Random, depth: int) -> Any:
    return make_engine(
        pipeline_depth=depth,
        block_size=rng.choice([2, 3, 4]),
        num_blocks=rng.randint(8, 16),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.randint(5, 32),
        max_model_len=48,
        eos=frozenset({1, 2}) if rng.random() < 0.3 else frozenset(),
        num_host_slots=rng.choice([1, 4, 16, 64]),
        copy_seed=rng.randrange(2**32),
    )


def run_random(rng: random.Random, depth: int, counts: dict[str, int]) -> None:
    """Documents asked about again and again, in a cache that is too small for them, with failures and aborts."""
    engine, runner = random_engine(rng, depth)
    eos = engine.scheduler.eos_token_ids
    documents = [[rng.randrange(50) for _ in range(rng.randint(4, 20))] for _ in range(6)]
    wanted: dict[int, tuple[list[int], int]] = {}
    for step in range(1000):
        if step > 40 and engine.is_finished():
            break
        if step < 40 and rng.random() < 0.5:
            prompt = rng.choice(documents) + [rng.randrange(50) for _ in range(rng.randint(1, 3))]
            count = rng.randint(1, 10)
            if len(prompt) + count - 1 <= runner.num_kvcache_blocks * runner.block_size:
                params = SamplingParams(0.5, count, n=rng.choice([1, 1, 1, 2]))
                wanted[engine.add_request(prompt, params)] = prompt, count
        runner.fail_launch, runner.fail_result = (step < 40 and rng.random() < 0.02 for _ in range(2))
        if wanted and rng.random() < 0.03:
            engine.abort([gone := rng.choice(list(wanted))])
            del wanted[gone]
        try:
            finished = engine.step().finished
        except StepError as error:
            assert str(error.__cause__) in ("launch failed", "step failed"), error
            for request_id in error.request_ids:
                wanted.pop(request_id, None)
            counts["failed"] += 1
            finished = []
        check_engine(engine)
        for request_id, output in finished:
            prompt, count = wanted.pop(request_id, ([], 0))
            for completion in output.outputs if count else ():
                assert completion.token_ids == complete(prompt, count, eos, 48)
    assert not wanted and not engine.block_manager.num_used_blocks
    stats = engine.stats()
    counts["saved"] += stats["num_saved_blocks"]
    counts["loaded"] += stats["num_loaded_blocks"]
    counts["lost"] += stats["num_lost_blocks"]
    counts["preempted"] += stats["num_preemptions"]
    counts["waited"] += sum(batch.waits_for_loads for batch in runner.batches)
    counts["late"] += sum(delayed(runner))


def delayed(runner: MockRunner) -> list[bool]:
    """Of each batch, whether something of it waits for the next one."""
    return [
        not batch.waits_for_loads and any(move.kind == "load" for move in batch.transfers) for batch in runner.batches
    ]


@DEPTHS
def test_no_block_is_lost_and_none_read_early(depth: int) -> None:
    counts = dict.fromkeys(("saved", "loaded", "lost", "preempted", "failed", "waited", "late"), 0)
    rng = random.Random(depth)
    for _ in range(40):
        run_random(rng, depth, counts)
    assert min(counts.values()) > 20, counts


SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "num_kvcache_blocks": 20}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SWAP = 2**-7


def documents() -> list[list[int]]:
    """Prompts of which the device's cache holds two, some with common beginnings."""
    rng = random.Random(0)
    whole = [[rng.randrange(3, 300) for _ in range(100)] for _ in range(4)]
    return [document[: rng.choice([70, 100])] + [rng.randrange(3, 300)] * 3 for document in whole * 2]


def answers(llm: LLM) -> list[list[int]]:
    outputs = [output["token_ids"] for output in llm.generate(documents(), GREEDY, use_tqdm=False, schedule="arrival")]
    llm.llm_engine.block_manager.check_integrity([])
    return outputs


def saves_every_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save what can be, however long a step takes, and load what is there."""
    manager = llm.llm_engine.block_manager
    assert manager.host is not None
    monkeypatch.setattr(manager.host, "_most_saves", lambda num_prompt_tokens: 1000)
    monkeypatch.setattr(manager.host, "_pays", lambda num_blocks: True)
    manager._num_clean_blocks = manager.num_blocks


@pytest.fixture(scope="module")
def model(make_checkpoint: MakeCheckpoint) -> Path:
    """A model that one rank holds, or two or three, of which one may have more heads."""
    return make_checkpoint(num_attention_heads=6, num_key_value_heads=3)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What follows the documents where nothing is kept."""
    with LLM(model, **SETTINGS) as llm:
        return answers(llm)


def check_answers(llm: LLM, expected: list[list[int]]) -> None:
    """Assert that nothing but the counters tells of the host's memory, at both pipeline depths."""
    runner: Any = llm.llm_engine._runner
    counts = llm.stats()
    for depth in (1, 0):
        runner.pipeline_depth = depth
        assert answers(llm) == expected
        before, counts = counts, llm.stats()
        for name in ("num_preemptions", "num_saved_blocks", "num_loaded_blocks"):
            assert counts[name] > before[name], name
    assert counts["num_loaded_blocks"] > 50 > counts["num_lost_blocks"]


@pytest.mark.parametrize("size", [1, 3])
def test_tokens_are_those_of_an_engine_without(
    model: Path, expected: list[list[int]], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(model, swap_space=SWAP, tensor_parallel_size=size, max_num_batched_tokens=64, **SETTINGS) as llm:
        saves_every_step(llm, monkeypatch)
        check_answers(llm, expected)


def pinning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pinning"]


def test_an_exit_or_a_killed_rank_leaves_nothing_behind(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The thread has more to do for as long as the engine lives.
    monkeypatch.setattr(host_blocks, "_CHUNK_BYTES", 2**20)
    settings: dict[str, Any] = {"swap_space": SWAP, "tensor_parallel_size": 2, **SETTINGS}
    with LLM(model, **settings) as llm:
        saves_every_step(llm, monkeypatch)
        assert pinning_threads()
        check_answers(llm, expected)
        # It ends in the middle of a step.
        llm.add_request(documents()[0], GREEDY)
        llm.step()
    assert not pinning_threads()
    with LLM(model, **settings) as llm:
        saves_every_step(llm, monkeypatch)
        for document in documents():
            llm.add_request(document, GREEDY)
        while not llm.stats()["num_loaded_blocks"]:
            llm.step()
        os.kill(rank_pids()[1], signal.SIGKILL)
        with pytest.raises(StepError, match="rank 1"):
            for _ in range(1000):
                llm.step()
    assert not pinning_threads()


def test_mistakes_are_named(model: Path, make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ValueError, match=r"swap_space=1000000.0 GiB is more than the \d+\.\d\d GiB of memory that are"):
        LLM(model, swap_space=1e6, **SETTINGS)
    with pytest.raises(ValueError, match="swap_space must be a finite number >= 0, not -1"):
        LLM(model, swap_space=-1, **SETTINGS)
    with pytest.raises(ValueError, match=r"swap_space=1.0 needs enable_prefix_caching=True"):
        LLM(model, swap_space=1.0, enable_prefix_caching=False, **SETTINGS)
    with pytest.raises(ValueError, match=r"swap_space=1e-06 GiB holds no block: one has 0.0000"):
        LLM(model, swap_space=1e-6, **SETTINGS)
    windows = make_checkpoint("mistral", sliding_window=24, head_dim=32)
    with pytest.raises(ValueError, match=r"swap_space=0.01: .* sliding windows \(of 24 tokens\)"):
        LLM(windows, swap_space=0.01, **SETTINGS)
