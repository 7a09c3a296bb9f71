"""Evicted blocks in the host's memory: no block is lost or read early, and tokens stay the same."""

from __future__ import annotations

import os
import random
import signal
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams, StepError
from nanovllm.engine.host_cache import _STEP_BYTES, HostCache
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.prefix_cache import Block, BlockKey, next_hash
from nanovllm.runner import host_blocks
from nanovllm.runner.host_blocks import BlockCopies, HostBlocks
from nanovllm.runner.messages import BlockTransfer, HostMemory, ScheduledBatch, StateCache
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.utils.host import available_memory
from tests.cache_checks import check_blocks, check_host
from tests.conftest import MakeCheckpoint
from tests.mock_runner import MockRunner, check_engine, complete, greedy, make_engine, run
from tests.rank_processes import rank_pids

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def random_engine(rng: random.Random, depth: int, states: Sequence[StateCache]) -> Any:
    return make_engine(
        states=states,
        pipeline_depth=depth,
        block_size=rng.choice([2, 3, 4]),
        num_blocks=rng.randint(8, 16) + 3 * sum(state.num_blocks for state in states),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.randint(5, 32),
        max_model_len=48,
        eos=frozenset({1, 2}) if rng.random() < 0.3 else frozenset(),
        num_host_slots=rng.choice([1, 4, 16, 64]),
        copy_seed=rng.randrange(2**32),
    )


def run_random(rng: random.Random, depth: int, states: Sequence[StateCache], counts: dict[str, int]) -> None:
    """Documents asked about again and again, in a cache that is too small for them, with failures and aborts."""
    engine, runner = random_engine(rng, depth, states)
    sizes = [state.num_blocks for state in states]
    eos = engine.scheduler.eos_token_ids
    documents = [[rng.randrange(50) for _ in range(rng.randint(4, 20))] for _ in range(6)]
    wanted: dict[int, tuple[list[int], int]] = {}
    for step in range(1000):
        if step > 40 and engine.is_finished():
            break
        if step < 40 and rng.random() < 0.5:
            prompt = rng.choice(documents) + [rng.randrange(50) for _ in range(rng.randint(1, 3))]
            count = rng.randint(1, 10)
            if len(prompt) + count - 1 <= (runner.num_kvcache_blocks - sum(sizes)) * runner.block_size:
                params = SamplingParams(0.5, count, n=rng.choice([1, 1, 1, 2]))
                wanted[engine.add_request(prompt, params)] = prompt, count
        runner.fail_launch, runner.fail_result = (step < 40 and rng.random() < 0.02 for _ in range(2))
        if wanted and rng.random() < 0.03:
            engine.abort([gone := rng.choice(list(wanted))])
            del wanted[gone]
        runner.interrupt = step < 40 and rng.random() < 0.02
        if rng.random() < 0.02:
            engine.reset_prefix_cache()
        try:
            finished = engine.step().finished
        except KeyboardInterrupt:
            # What a call does that is interrupted; the step goes on.
            for gone in list(wanted)[:1]:
                engine.abort([gone])
                del wanted[gone]
            counts["interrupted"] += 1
            finished = []
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
                assert completion.token_ids == complete(prompt, count, eos, 48, None, states=sizes)
    assert not wanted and not engine.block_manager.num_used_blocks
    stats = engine.stats()
    counts["saved"] += stats["num_saved_blocks"]
    counts["loaded"] += stats["num_loaded_blocks"]
    counts["lost"] += stats["num_lost_blocks"]
    counts["preempted"] += stats["num_preemptions"]
    counts["waited"] += sum(batch.waits_for_loads for batch in runner.batches)
    counts["late"] += sum(delayed(runner))
    for batch in runner.batches:
        loaded = {move.destination for move in batch.transfers if move.kind == "load"}
        for request in batch.new_requests:
            keys, *others = (len(loaded.intersection(table)) for table in request.block_tables)
            counts["states"] += any(others)
            counts["mixed"] += bool(keys) != any(others)


def delayed(runner: MockRunner) -> list[bool]:
    """Return for each batch whether a part of it waits for the next one."""
    return [
        not batch.waits_for_loads and any(move.kind == "load" for move in batch.transfers) for batch in runner.batches
    ]


@pytest.mark.parametrize(("depth", "states"), [(1, []), (0, [StateCache(1, 2)]), (1, [StateCache(2, 99)])])
def test_no_block_is_lost_and_none_read_early(depth: int, states: list[StateCache]) -> None:
    names = "saved", "loaded", "lost", "preempted", "failed", "interrupted", "waited", "late", "states", "mixed"
    counts = dict.fromkeys(names, 0)
    rng = random.Random(depth)
    for _ in range(48):
        run_random(rng, depth, states, counts)
    if not states:
        assert not counts.pop("states")
    assert min(counts.values()) > (10 if states else 20), counts


def test_the_next_to_be_preempted_is_saved_and_loaded_again() -> None:
    # Four need a block each in the same step, and there is none: the last one's six go at once, or in the next steps.
    engine, runner = make_engine(pipeline_depth=1, block_size=4, num_blocks=24, num_host_slots=60, max_model_len=64)
    runner.num_ready_slots = 60
    prompts = [[i] * 8 for i in range(4)]
    wanted = {engine.add_request(prompt, greedy(24)): complete(prompt, 24, frozenset(), 64) for prompt in prompts}
    assert {request_id: output["token_ids"] for request_id, output in run(engine).items()} == wanted
    stats = engine.stats()
    # Even the newest, which was not computed yet when the sequence lost its blocks: it is overwritten last.
    assert (stats["num_preemptions"], stats["num_loaded_blocks"]) == (1, 6), stats


def test_a_prefix_that_many_share_stays_on_the_device() -> None:
    engine, runner = make_engine(pipeline_depth=0, block_size=4, num_blocks=16, num_host_slots=60, max_model_len=64)
    runner.num_ready_slots = 60
    manager, head = engine.block_manager, [1] * 16

    def ask(prompt: list[int]) -> None:
        engine.add_request(prompt, greedy(1))
        run(engine)

    # The head has a copy when the last of these ends, and what follows it has none.
    for tail in (2, 3, 4):
        ask(head + [tail] * 9)
    assert engine.stats()["num_saved_blocks"] == 8 and engine.stats()["num_cached_tokens"] == 32
    # All other blocks are taken.
    ask([5] * (4 * (manager.num_free_blocks - 4) - 1))
    ask([*head, 6])
    assert engine.stats()["num_cached_tokens"] == 48 and not engine.stats()["num_loaded_blocks"]


def test_a_full_host_cache_evicts_the_least_recently_used() -> None:
    engine, runner = make_engine(pipeline_depth=0, block_size=4, num_blocks=12, num_host_slots=60, max_model_len=64)
    runner.num_ready_slots = runner.most_ready_slots = 10
    prompts = [[i] * 33 for i in range(6)]
    for prompt in prompts:
        engine.add_request(prompt, greedy(4))
        run(engine)
    stats = engine.stats()
    assert stats["num_host_blocks"] == 10 and stats["num_saved_blocks"] > 30, stats


def test_what_ends_and_is_overwritten_in_the_same_step_is_saved_before() -> None:
    # Two fill the cache, and two more wait for their blocks.
    engine, runner = make_engine(
        pipeline_depth=1, block_size=4, num_blocks=12, max_num_batched_tokens=8, num_host_slots=60, max_model_len=64
    )
    runner.num_ready_slots = 60
    for i in range(4):
        engine.add_request([i] * 16, greedy(4))
    run(engine)
    stats = engine.stats()
    assert stats["num_lost_blocks"] == 0 and stats["num_saved_blocks"] > 10, stats


@DEPTHS
def test_nothing_is_saved_that_nobody_finds_after_a_reset(depth: int) -> None:
    engine, runner = make_engine(pipeline_depth=depth, block_size=4, num_blocks=13, num_host_slots=60, max_model_len=64)
    runner.num_ready_slots = 60
    engine.add_request([0] * 16, greedy(24))
    while engine.block_manager.num_free_blocks > 5:
        engine.step()
    assert not engine.block_manager.reset()
    saved = engine.stats()["num_saved_blocks"]
    # Few blocks are free, while it runs and after; later sequences get all the saves.
    run(engine)
    assert engine.block_manager.reset(), "its blocks are forgotten"
    for i in range(1, 5):
        engine.add_request([i] * 8, greedy(4))
    run(engine)
    assert engine.stats()["num_saved_blocks"] - saved <= 4 * 2


PROMPTS = [[i, *range(10, 26)] for i in range(4)]


@dataclass
class Saved:
    """An engine whose host has `PROMPTS`; a step may load any number of blocks."""

    engine: LLMEngine
    runner: MockRunner
    host: HostCache

    def run(self, *prompts: list[int]) -> None:
        for prompt in prompts:
            self.engine.add_request(prompt, greedy(1))
        run(self.engine)

    def limit_loads(self, num_blocks: int) -> None:
        """Let a step that loads this number of blocks admit no other prompt that loads."""
        self.host._memory = replace(self.host._memory, block_bytes=-(-_STEP_BYTES // num_blocks))

    def run_beside_decoding(self, *prompts: list[int]) -> list[ScheduledBatch]:
        """Run prompts beside one that decodes, and return the steps that load something."""
        self.engine.add_request([8], greedy(12))
        self.engine.step()
        begun = len(self.runner.batches)
        self.run(*prompts)
        return [batch for batch in self.runner.batches[begun:] if num_loads(batch)]


def num_loads(batch: ScheduledBatch) -> int:
    return sum(move.kind == "load" for move in batch.transfers)


@pytest.fixture
def saved() -> Saved:
    return make_saved()


def make_saved(*states: StateCache) -> Saved:
    engine, runner = make_engine(
        pipeline_depth=1,
        block_size=4,
        num_blocks=30,
        max_num_seqs=8,
        num_host_slots=60,
        max_model_len=64,
        states=states,
    )
    runner.num_ready_slots = 60
    assert engine.block_manager.host is not None
    made = Saved(engine, runner, engine.block_manager.host)
    # The last one overwrites what the others have computed.
    assert engine.block_manager.reset()
    for prompt in (*PROMPTS, [9] * 60, [8] * 60):
        made.run(prompt)
    return made


@pytest.mark.parametrize(("limit", "most"), [(99, 4), (5, 2), (4, 1)])
def test_a_step_admits_prompts_that_load_until_it_loads_enough(limit: int, most: int, saved: Saved) -> None:
    saved.limit_loads(limit)
    loads = [num_loads(batch) // 4 for batch in saved.run_beside_decoding(*PROMPTS)]
    assert sum(loads) == 4 and max(loads) == most, loads


def test_a_step_that_waits_for_what_it_loads_loads_no_more(saved: Saved) -> None:
    saved.limit_loads(1)
    begun = len(saved.runner.batches)
    saved.run(*PROMPTS[:2])
    first, second = saved.runner.batches[begun : begun + 2]
    assert first.waits_for_loads and (num_loads(first), num_loads(second)) == (4, 4)


def test_a_prompt_waits_to_load_what_follows_its_blocks_on_the_device(saved: Saved) -> None:
    saved.run(PROMPTS[1][:9])
    saved.limit_loads(1)
    loads = saved.run_beside_decoding(*PROMPTS[:2])
    assert [num_loads(batch) for batch in loads] == [4, 2]


def test_a_prompt_that_loads_is_computed_before_those_that_came_later(saved: Saved) -> None:
    engine, runner = saved.engine, saved.runner
    saved.limit_loads(1)
    engine.add_request([8], greedy(12))
    engine.step()
    engine.scheduler.max_num_batched_tokens, begun = 8, len(runner.batches)
    saved.run(PROMPTS[0], [5] * 60)
    later = [len(chunk.token_ids) for batch in runner.batches[begun + 1 :] for chunk in batch.chunks]
    # One token decodes, one of the first prompt is not loaded.
    assert later[:3] == [1, 6, 7]


def test_a_prompt_that_loads_nothing_is_computed_beside_what_is_loaded(saved: Saved) -> None:
    saved.limit_loads(1)
    loading = saved.run_beside_decoding(PROMPTS[0], [5] * 16, PROMPTS[1])
    assert [num_loads(batch) for batch in loading] == [4, 4]
    assert [len(chunk.token_ids) for chunk in loading[0].chunks] == [16]


@DEPTHS
def test_documents_that_only_load_save_what_they_overwrite(depth: int) -> None:
    engine, runner = make_engine(pipeline_depth=depth, block_size=4, num_blocks=40, num_host_slots=99, max_model_len=64)
    runner.num_ready_slots, host = 99, engine.block_manager.host
    assert host is not None
    # A step saves a block, or two for each one that it takes.
    host._memory = replace(host._memory, block_bytes=_STEP_BYTES)
    documents = [[i] * 33 for i in range(10)]
    for number in range(3):
        for document in documents:
            engine.add_request(document, greedy(2))
        run(engine)
        assert host.num_lost == 0 and host.num_loaded == 80 * number


def test_a_step_saves_two_blocks_for_each_one_that_it_takes_or_one() -> None:
    engine, runner = make_engine(pipeline_depth=0, block_size=4, num_blocks=16, num_host_slots=60, max_model_len=64)
    host = engine.block_manager.host
    assert host is not None
    host._memory = replace(host._memory, block_bytes=_STEP_BYTES)
    engine.add_request([1] * 48, greedy(1))
    run(engine)
    runner.num_ready_slots, begun = 60, len(runner.batches)
    engine.add_request([2] * 9, greedy(4))
    run(engine)
    saves = [sum(move.kind == "save" for move in batch.transfers) for batch in runner.batches[begun:]]
    assert saves == [6, 1, 1, 1]


def hybrid_engine(*states: StateCache) -> tuple[LLMEngine, MockRunner, HostCache]:
    """An engine whose steps take whole prompts, beside a host with memory for all."""
    engine, runner = make_engine(
        pipeline_depth=0, block_size=4, num_blocks=30, max_num_batched_tokens=128, num_host_slots=99, states=states
    )
    runner.num_ready_slots = 99
    assert engine.block_manager.host is not None
    return engine, runner, engine.block_manager.host


@pytest.mark.parametrize(
    ("interval", "num_others", "num_lost"),
    # Six blocks, then the state: others overwrite the state; and three blocks; all. The last has another state before.
    [(99, 20, 2), (99, 23, 5), (99, 26, 8), (2, 10, 4)],
)
def test_what_the_device_has_lost_of_a_prefix_with_a_state_is_loaded(
    interval: int, num_others: int, num_lost: int
) -> None:
    engine, runner, _ = hybrid_engine(StateCache(2, interval))
    prompt = list(range(25))
    for others, count in ((prompt, 2), ([9] * 4 * num_others, 1)):
        engine.add_request(others, greedy(count))
        run(engine)
    begun = len(runner.batches)
    request_id = engine.add_request([*prompt, 7], greedy(2))
    output = run(engine)[request_id]
    assert output["token_ids"] == complete([*prompt, 7], 2, frozenset(), 128, None, states=[2])
    assert output["num_cached_tokens"] == 24
    assert sum(map(num_loads, runner.batches[begun:])) == num_lost


def test_a_prompt_loads_the_state_that_another_one_computes_in_the_same_step() -> None:
    engine, runner, _ = hybrid_engine(StateCache(2, 99))
    prompt = list(range(25))
    for others in (prompt, [9] * 104):
        ask(engine, others)
    begun = len(runner.batches)
    prompts = [[*prompt, 7], [*prompt, 8]]
    # The first one starts from nothing.
    params = replace(greedy(2), prompt_logprobs=0), greedy(2)
    ids = [engine.add_request(*request) for request in zip(prompts, params, strict=True)]
    outputs = run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert outputs[request_id]["token_ids"] == complete(prompt, 2, frozenset(), 128, None, states=[2])
    assert [outputs[request_id]["num_cached_tokens"] for request_id in ids] == [0, 24]
    assert num_loads(runner.batches[begun]) == 2


def ask(engine: LLMEngine, prompt: list[int]) -> list[int]:
    """Return a prompt and two tokens."""
    request_id = engine.add_request(prompt, greedy(2))
    return [*prompt, *run(engine)[request_id]["token_ids"]]


def saved_states(host: HostCache) -> set[BlockKey]:
    return {key for key in host._copies if key[1] == "state"}


def test_states_that_a_later_one_replaces_leave_the_host_first() -> None:
    engine, _, host = hybrid_engine(StateCache(2, 99))
    ask(engine, [4] * 25)
    others = saved_states(host)
    said = ask(engine, list(range(25)))
    first = saved_states(host) - others
    # The next turn starts from the copy.
    ask(engine, [9] * 104)
    ask(engine, [*said, *range(20)])
    assert host.num_loaded == 8 and len(first) == 2 and {*list(host._copies)[:2]} == first


def test_states_that_a_later_one_has_replaced_are_not_saved() -> None:
    engine, runner, host = hybrid_engine(StateCache(2, 99))
    runner.num_ready_slots = runner.most_ready_slots = 0
    ask(engine, [*ask(engine, [1] * 25), *range(8)])
    runner.num_ready_slots = runner.most_ready_slots = 99
    ask(engine, [2] * 30)
    assert len(saved_states(host)) == 2 * 2
    # Nor is their end a loss.
    ask(engine, [3] * 101)
    assert host.num_lost == 0


def test_prompts_that_load_states_wait_for_their_turn() -> None:
    saved = make_saved(StateCache(2, 99))
    saved.limit_loads(1)
    loading = saved.run_beside_decoding(*PROMPTS[:2])
    assert [num_loads(batch) for batch in loading] == [6, 6]
    # The keys are on the device now, and the states are not.
    assert [num_loads(batch) for batch in saved.run_beside_decoding(PROMPTS[2], PROMPTS[1])] == [6, 2]
    # Who starts from a state on the device does not wait.
    saved = make_saved(StateCache(2, 99))
    saved.run([7] * 12)
    saved.limit_loads(1)
    loading = saved.run_beside_decoding(PROMPTS[0], [7] * 12, PROMPTS[1])
    assert [len(chunk.token_ids) for chunk in loading[0].chunks] == [4] and len(loading) == 2


def test_a_state_outlives_the_keys_before_it_where_they_have_copies() -> None:
    engine, _, host = hybrid_engine(StateCache(2, 99))
    prompt = list(range(25))
    # Of a single output token, keys are free before the state. The second prompt's step saves both.
    for others in (prompt, [3] * 5, [9] * 4 * 17, [*prompt, 7]):
        engine.add_request(others, greedy(1))
        run(engine)
    assert host.num_loaded == 2 and engine.stats()["num_cached_tokens"] == 24


def test_states_of_decoding_that_come_from_the_host_show_that_outputs_come_again() -> None:
    engine, _, host = hybrid_engine(StateCache(2, 99))
    said = list(range(10))
    for count in (8, 2):
        engine.add_request(said, greedy(count))
        said = [*said, *run(engine).popitem()[1]["token_ids"]]
        # All else on the device goes, and a step saves the state.
        engine.add_request([9] * 104, greedy(2))
        run(engine)
    assert host.num_loaded and engine.block_manager._num_repeats == 1
    engine.add_request(said[:18], greedy(1))
    run(engine)
    assert engine.block_manager._num_repeats == 1, "a later use does not count"


def cached_blocks(token_ids: list[int]) -> list[Block]:
    """Blocks of four tokens, as they are cached."""
    blocks, prefix = list[Block](), b""
    for start in range(0, len(token_ids) - 3, 4):
        block = Block(start)
        prefix = next_hash(prefix, array("i", token_ids[start : start + 4]))
        block.key = prefix, "keys", 0
        blocks.append(block)
    return blocks


def host_cache(
    num_slots: int, num_ready_slots: Callable[[], int], block_bytes: int = 2**40, *, has_all_slots: bool = True
) -> HostCache:
    return HostCache(HostMemory(num_slots, num_ready_slots, lambda: has_all_slots, block_bytes))


def test_a_step_saves_a_quarter_of_a_gib_or_twice_what_it_takes() -> None:
    cache, tokens = host_cache(20, lambda: 20, 2**26), list(range(400))
    blocks = cached_blocks(tokens)
    # Blocks that are not computed yet are not saved.
    assert [save.source for save in cache.plan_saves(blocks, {0}, 0)] == [4, 8, 12, 16]
    for num_taken, count in ((1, 4), (3, 6), (99, 20)):
        assert len(cache.plan_saves(blocks, set(), num_taken)) == count
    assert len(host_cache(20, lambda: 20).plan_saves(blocks, set(), 0)) == 1


def test_slots_have_no_memory_after_a_sleep_until_they_have_some_again() -> None:
    num_ready = 8
    cache, blocks = host_cache(8, lambda: num_ready, 1, has_all_slots=False), cached_blocks(list(range(20)))
    assert len(cache.plan_saves(blocks, set(), 0)) == 5
    cache.clear()
    num_ready = 2
    assert [save.destination for save in cache.plan_saves(blocks, set(), 0)] == [0, 1]
    check_host(cache)
    cache.drop(block.key for block in blocks[:2] if block.key is not None)
    assert len(cache.plan_saves(blocks, set(), 0)) == 2
    check_host(cache)


def test_the_tail_of_a_prefix_is_dropped_before_its_head() -> None:
    cache = host_cache(5, lambda: 5, 1)
    blocks = cached_blocks(list(range(20)))
    saves = cache.plan_saves(blocks, set(), 0)
    assert [save.source for save in saves] == [0, 4, 8, 12, 16] and sorted(save.destination for save in saves) == [
        *range(5)
    ]
    keys = [block.key for block in blocks if block.key is not None]
    cache.note_loads(cache.find_all(keys))
    cache.plan_saves(cached_blocks([7] * 8), set(), 0)
    assert [cache.find(key) is not None for key in keys] == [True] * 3 + [False] * 2


SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "num_kvcache_blocks": 20}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SWAP = 2**-7


def documents() -> list[list[int]]:
    """Prompts, some with common beginnings; the device's cache holds two."""
    rng = random.Random(0)
    whole = [[rng.randrange(3, 300) for _ in range(100)] for _ in range(4)]
    return [document[: rng.choice([70, 100])] + [rng.randrange(3, 300)] * 3 for document in whole * 2]


def answers(llm: LLM) -> list[list[int]]:
    outputs = [output["token_ids"] for output in llm.generate(documents(), GREEDY, use_tqdm=False, schedule="arrival")]
    check_blocks(llm.llm_engine.block_manager)
    return outputs


def save_all_blocks(llm: LLM) -> None:
    """Let steps save all blocks, not only the next to be evicted."""
    manager = llm.llm_engine.block_manager
    manager._num_clean_blocks = manager.num_blocks


def test_inputs_do_not_wait_on_the_link_for_what_a_step_loads(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(make_checkpoint(), swap_space=SWAP, **SETTINGS) as llm:
        save_all_blocks(llm)
        runner = llm.llm_engine.require_open()
        assert isinstance(runner, ModelRunner) and runner.kv_cache.copies is not None
        done = list[str]()

        def note(owner: object, name: str) -> None:
            call = getattr(owner, name)

            def noted(*args: Any, **kwargs: Any) -> Any:
                done.append(name)
                return call(*args, **kwargs)

            monkeypatch.setattr(owner, name, noted)

        note(runner, "forward")
        note(runner.batch_builder, "send")
        note(runner.kv_cache.copies, "queue")
        note(runner.kv_cache.copies, "wait_for_loads")
        for prompt in documents():
            llm.generate([prompt], replace(GREEDY, max_tokens=8), use_tqdm=False)
        assert llm.stats()["num_loaded_blocks"] and {"queue", "wait_for_loads"} <= {*done}
        assert all(before == "send" for before, after in pairwise(done) if after == "queue")
        # Alone, a prompt is computed in the step that loads its blocks.
        assert all(before == "queue" for before, after in pairwise(done) if after == "wait_for_loads")


@pytest.fixture(scope="module")
def model(make_checkpoint: MakeCheckpoint) -> Path:
    """A model for one rank, or for two with different numbers of heads."""
    return make_checkpoint(num_attention_heads=6, num_key_value_heads=3)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """The answers without a host cache."""
    with LLM(model, **SETTINGS) as llm:
        return answers(llm)


def check_answers(llm: LLM, expected: list[list[int]], depths: tuple[int, ...]) -> None:
    """Assert that nothing but the counters tells of the host's memory, at some pipeline depths."""
    runner: Any = llm.llm_engine._runner
    counts = llm.stats()
    for depth in depths:
        runner.pipeline_depth = depth
        assert answers(llm) == expected, depth
        before, counts = counts, llm.stats()
        for name in ("num_preemptions", "num_saved_blocks", "num_loaded_blocks"):
            assert counts[name] > before[name], name
    assert counts["num_loaded_blocks"] > 20 * len(depths) and counts["num_lost_blocks"] < 50


def pinning_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pinning"]


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.compat)])
def test_swap_space_changes_no_tokens_and_ends_within_a_step(
    model: Path, expected: list[list[int]], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several chunks.
    monkeypatch.setattr(host_blocks, "_CHUNK_BYTES", 2**20)
    with LLM(model, swap_space=SWAP, tensor_parallel_size=size, max_num_batched_tokens=64, **SETTINGS) as llm:
        save_all_blocks(llm)
        # The ranks of several take the same orders, whenever they come.
        check_answers(llm, expected, (1, 0) if size == 1 else (1,))
        for document in documents():
            llm.add_request(document, GREEDY)
        num_loaded = llm.stats()["num_loaded_blocks"]
        while llm.stats()["num_loaded_blocks"] == num_loaded:
            llm.step()
        if size > 1:
            os.kill(rank_pids()[1], signal.SIGKILL)
            with pytest.raises(StepError, match="rank 1"):
                for _ in range(1000):
                    llm.step()
    assert not pinning_threads()


def pins_at_most(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pinning fail after `num_bytes` in all."""
    allocate, left = host_blocks._allocate, num_bytes

    def limited(size: int, device: torch.device) -> torch.Tensor:
        nonlocal left
        left -= size
        if left < 0:
            raise RuntimeError("no more may be pinned")
        return allocate(size, device)

    monkeypatch.setattr(host_blocks, "_allocate", limited)


@pytest.mark.filterwarnings("ignore:pinned memory of swap_space ends at 2 blocks:UserWarning")
def test_a_rank_that_can_pin_less_than_the_first_has_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blocks, "_CHUNK_BYTES", 64)
    pins_at_most(100, monkeypatch)
    stack = torch.arange(40.0).view(1, 5, 8)
    host = HostBlocks(5, 32, stack.device)
    host._thread.join(240)
    assert host.has_all_slots and host.num_ready_slots == 2
    copies, before = BlockCopies([stack.view(1, 5, 8, 1)], host), stack.clone()
    copies.queue([BlockTransfer("save", block, block) for block in (4, 1)])
    copies.queue([BlockTransfer("load", slot, block) for slot, block in ((4, 1), (1, 4))])
    assert torch.equal(stack, before[:, [0, 4, 2, 3, 1]])
    copies.close()
    assert not host.num_ready_slots


def test_a_slot_is_loaded_before_another_block_is_saved_there() -> None:
    stack = torch.arange(24.0).view(1, 3, 8)
    copies = BlockCopies([stack.view(1, 3, 8, 1)], HostBlocks(1, 32, stack.device))
    copies.queue([BlockTransfer("save", 0, 0)])
    copies.queue([BlockTransfer("save", 1, 0), BlockTransfer("load", 0, 2)])
    copies.queue([BlockTransfer("load", 0, 0)])
    copies.close()
    assert stack[0, :, 0].tolist() == [8, 8, 0]


def test_mistakes_are_named(model: Path, make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ValueError, match=r"swap_space=1000000.0 GiB is more than the \d+\.\d\d GiB of memory that are"):
        LLM(model, swap_space=1e6, **SETTINGS)
    # Enough for one.
    most = available_memory() / 2**30 * 0.7
    with pytest.raises(ValueError, match=rf"swap_space={most} GiB for each of 2 engines is more than the \d+\.\d\d "):
        LLM(model, swap_space=most, data_parallel_size=2, **SETTINGS)
    with pytest.raises(ValueError, match="swap_space must be a finite number >= 0, not -1"):
        LLM(model, swap_space=-1, **SETTINGS)
    with pytest.raises(ValueError, match=r"swap_space=1.0 needs enable_prefix_caching=True"):
        LLM(model, swap_space=1.0, enable_prefix_caching=False, **SETTINGS)
    with pytest.raises(ValueError, match=r"swap_space=1e-06 GiB holds no block: one has 0.0000"):
        LLM(model, swap_space=1e-6, **SETTINGS)
    windows = make_checkpoint("mistral", sliding_window=24, head_dim=32)
    with pytest.raises(ValueError, match=r"swap_space=0.01: .* sliding windows \(of 24 tokens\)"):
        LLM(windows, swap_space=0.01, **SETTINGS)


def test_new_weights_and_a_sleep_leave_nothing_behind(model: Path, make_checkpoint: MakeCheckpoint) -> None:
    other = make_checkpoint(num_attention_heads=6, num_key_value_heads=3, seed=1)
    with LLM(other, **SETTINGS) as llm:
        expected = answers(llm)
    with LLM(model, swap_space=SWAP, max_num_batched_tokens=64, **SETTINGS) as llm:
        save_all_blocks(llm)
        answers(llm)
        assert llm.stats()["num_host_blocks"]
        llm.load_weights(other)
        llm.reset_prefix_cache()
        assert answers(llm) == expected and answers(llm) == expected
        llm.sleep()
        assert not llm.stats()["num_host_blocks"] and not pinning_threads()
        llm.wake_up()
        loaded = llm.stats()["num_loaded_blocks"]
        assert answers(llm) == expected and answers(llm) == expected
        assert llm.stats()["num_loaded_blocks"] > loaded
