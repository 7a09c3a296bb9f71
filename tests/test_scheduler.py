"""Scheduler, block manager and engine against a mock model: no GPU, no weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine import sequence
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.prefix_cache import SPARE, SPENT, USUAL, Block
from nanovllm.engine.sequence import SteadyRows
from nanovllm.outputs import Logprob, RequestMetrics, RequestOutput, StepError
from nanovllm.runner.messages import DraftCosts, StateCache
from tests.cache_checks import check_blocks
from tests.examples import num_examples
from tests.mock_runner import (
    VOCAB_SIZE,
    MockRunner,
    check_engine,
    complete,
    greedy,
    make_engine,
    make_request,
    make_sequence,
    mock_hidden_states,
    num_cached,
    run,
)

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@pytest.fixture(autouse=True)
def _all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take in the tokens of a few rows like the tokens of many."""
    monkeypatch.setattr(sequence, "_FEW_ROWS", 0)


# Built once: strategies made inside a composite are made anew for each example, which takes most of the test's time.
SIZES = st.fixed_dictionaries(
    {
        "pipeline_depth": st.sampled_from([0, 1, 1]),
        "block_size": st.sampled_from([2, 3, 4]),
        "num_blocks": st.integers(2, 10),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 16),
        "max_model_len": st.integers(4, 24),
        "eos": st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=8),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "num_drafts": st.sampled_from([0, 0, 1, 3]),
        # Drafts pay always, or while most are right.
        "draft_ratio": st.sampled_from([1.0, 1.5, 2.0]),
        "copy_seed": st.integers(0, 99),
        # Groups with states: blocks of each, and block ends at which they are kept.
        "states": st.sampled_from([[], [], [StateCache(1, 1)], [StateCache(2, 2)], [StateCache(3, 1)]]),
        "windows": st.sampled_from(
            [[None], [None], [None], [1], [2], [5], [7], [None, 3], [None, None, 6], [None, 2, 5], [4, 4], [3, 7]]
        ),
    }
)
PROMPT = st.tuples(
    st.sampled_from([[], [1] * 4, [1] * 8, [1, 2, 3, 4, 5, 6, 7, 8, 9]]),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
PRIORITY = st.sampled_from([0, 0, 1, -1])
ADD = st.tuples(st.just("add"), PROMPT, st.integers(1, 12), PRIORITY, st.sampled_from([1, 1, 1, 2, 3]))
STEP = st.tuples(st.just("step"), st.integers(1, 6))
ABORT = st.tuples(st.just("abort"), st.integers(0, 20))
FAIL = st.tuples(st.sampled_from(["fail_launch", "fail_result"]))
EVENT = st.one_of(ADD, ADD, ADD, STEP, STEP, ABORT, FAIL)
# Requests (often of equal prefixes), steps, aborts, failures; with fewer of them hardly a sequence is preempted.
EVENTS = st.lists(EVENT, min_size=8, max_size=25)


def num_needed(
    num_tokens: int, *, windows: list[int | None], block_size: int, states: list[StateCache], **_: Any
) -> int:
    """The blocks that a sequence with `num_tokens` stored tokens cannot do without, in all groups."""
    filled = -(-num_tokens // block_size)
    num_states = sum(state.num_blocks for state in states)
    # A window begins with the last token of a block, if there is no worse place.
    return num_states + sum(min(filled, 1 + -(-(max(2, window or num_tokens) - 1) // block_size)) for window in windows)


@settings(max_examples=num_examples(80, 1000), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SIZES, EVENTS)
def test_no_block_lost_no_token_wrong(sizes: dict[str, Any], events: list[tuple[Any, ...]]) -> None:
    engine, runner = make_engine(**sizes)
    wanted: dict[int, list[int]] = {}
    outputs: dict[int, Any] = {}
    owners: dict[int, int] = {}

    @contextmanager
    def failing() -> Iterator[None]:
        try:
            yield
        except StepError as error:
            # Whatever else went wrong in a step, an assertion of the mock's too, is no failure that was asked for.
            if str(error.__cause__) not in ("launch failed", "step failed"):
                raise
            for request_id in error.request_ids:
                del wanted[request_id]
        check_engine(engine)

    def step() -> None:
        with failing():
            outputs.update(engine.step().finished)

    for kind, *arguments in events:
        if kind == "add":
            (prefix, tail), max_tokens, priority, num_outputs = arguments
            prompt = (prefix + tail)[: sizes["max_model_len"]]
            try:
                request_id = engine.add_request(prompt, SamplingParams(0.5, max_tokens, n=num_outputs), priority)
            except ValueError:
                assert num_needed(len(prompt) + max_tokens - 1, **sizes) > runner.num_kvcache_blocks
                continue
            owners |= dict.fromkeys(range(request_id, request_id + num_outputs), request_id)
            num_blocks = [kind.num_blocks for kind in runner.cache_kinds if isinstance(kind, StateCache)]
            wanted[request_id] = complete(
                prompt, max_tokens, sizes["eos"], sizes["max_model_len"], *sizes["windows"], states=num_blocks
            )
        elif kind == "step":
            for _ in range(arguments[0]):
                step()
        elif kind == "abort":
            with failing():
                engine.abort(arguments)
            # An output's id stands for its request.
            aborted = owners.get(arguments[0], arguments[0])
            unclaimed = dict(engine._results.finished), *(error.request_ids for error in engine._results.failures)
            if not any(aborted in ids for ids in (outputs, *unclaimed)):
                wanted.pop(aborted, None)
        else:
            setattr(runner, kind, True)
    runner.fail_launch = runner.fail_result = False
    for _ in range(10_000):
        if engine.is_finished():
            break
        step()
    assert engine.is_finished(), "some request never finishes"
    assert outputs.keys() == wanted.keys()
    for request_id, output in outputs.items():
        assert all(list(item.token_ids) == wanted[request_id] for item in output.outputs)
    assert engine.block_manager.num_used_blocks == 0
    for batch in runner.batches:
        assert batch.rows.num_new.sum() + batch.num_chunk_tokens <= sizes["max_num_batched_tokens"]
    for output in outputs.values():
        stopped = output["token_ids"][-1] in sizes["eos"]
        assert output["finish_reason"] == ("stop" if stopped else "length")


def test_a_prefix_is_found_by_the_window_before_its_end_alone() -> None:
    engine, _ = make_engine(pipeline_depth=0, windows=[6], block_size=4, num_blocks=12, max_num_batched_tokens=64)
    manager, prompt = engine.block_manager, list(range(32))
    assert num_cached(engine, prompt) == 0
    blocks = [manager.blocks[block_id] for block_id in range(8)]
    for index in (0, 5, 3):
        manager._cache.remove(blocks[index])
        # Last, so that what the prompts take is nothing of this one's.
        manager._free.move(manager.blocks[index])
    # What follows sees two blocks. They are here, and those in front of them are remembered.
    assert num_cached(engine, [*prompt, 1]) == 32
    # Neither blocks 4 and 5, nor 3 and 4, nor 2 and 3 are both here.
    assert num_cached(engine, prompt[:24]) == 12
    # What was missing has been computed, as the same blocks.
    assert num_cached(engine, prompt[:25]) == 24
    assert num_cached(engine, [*prompt, 2]) == 32


def test_outputs_share_a_prompt_if_the_first_holds_enough_in_every_group() -> None:
    engine, _ = make_engine(
        pipeline_depth=0, windows=[None, 7, 3], block_size=4, max_num_seqs=1, max_num_batched_tokens=4
    )
    engine.add_request(list(range(14)), SamplingParams(0.5, 9, ignore_eos=True, n=2))
    while not engine.scheduler.steady.seqs:
        engine.step()
    first, second = engine.scheduler.sequences
    assert [table.num_released for table in first.block_tables] == [0, 1, 2]
    assert engine.block_manager._can_fork(first, second)
    # What the token before sees, which the second output computes again, is no more than this.
    first.block_tables[2].num_released += 1
    assert not engine.block_manager._can_fork(first, second)


@DEPTHS
def test_full_hit_recomputes_one_token_and_stores_nothing(depth: int) -> None:
    engine, runner = make_engine(pipeline_depth=depth)
    assert [num_cached(engine, list(range(32)), 4) for _ in range(2)] == [0, 31]
    *_, chunk = [chunk for batch in runner.batches for chunk in batch.chunks]
    assert (chunk.start, list(chunk.token_ids), chunk.store) == (31, [31], False)


@DEPTHS
def test_a_generated_block_is_shared_while_its_sequence_goes_on(depth: int) -> None:
    engine, _ = make_engine(pipeline_depth=depth)
    engine.add_request([1, 2], greedy(60))
    (seq,) = engine.scheduler.sequences if engine.step() else ()
    while len(seq.token_ids) < 18:
        engine.step()
    # Its last token is known, and its keys are stored or planned.
    assert seq.num_registered_blocks == 1 and len(engine.block_manager._cache.blocks) == 1


@DEPTHS
def test_a_long_prompt_stalls_nobody(depth: int) -> None:
    engine, runner = make_engine(pipeline_depth=depth, max_num_batched_tokens=16)
    short = engine.add_request([1, 2, 3], greedy(12))
    engine.step()
    engine.add_request(list(range(50)) * 2, greedy(2))
    outputs = run(engine)
    mixed = [batch for batch in runner.batches if len(batch.rows) and batch.chunks]
    assert len(mixed) >= 6
    assert all(len(batch.rows) + batch.num_chunk_tokens <= 16 for batch in runner.batches)
    assert len(outputs[short]["token_ids"]) == 12


@DEPTHS
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_rows_with_drafts_return_several_tokens(depth: int, num_drafts: int) -> None:
    """Stops in the middle of a row, limits, block borders, and generated blocks that are found again."""
    prompt = [3, 1, 4]
    free = complete(prompt, 40, frozenset(), 128)
    eos = frozenset([free[17]])
    engine, runner = make_engine(pipeline_depth=depth, num_drafts=num_drafts, block_size=4, num_blocks=64, eos=eos)
    ids = [
        engine.add_request(prompt, params)
        for params in (
            SamplingParams(0, 40, ignore_eos=True, logprobs=0),
            SamplingParams(0, 40, logprobs=0),
            *(SamplingParams(0, n, ignore_eos=True) for n in (1, 2, 9)),
        )
    ]
    outputs = run(engine)
    wanted = [free, complete(prompt, 40, eos, 128), free[:1], free[:2], free[:9]]
    assert [outputs[request_id]["token_ids"] for request_id in ids] == wanted
    assert [outputs[request_id]["finish_reason"] for request_id in ids] == ["length", "stop", *["length"] * 3]
    for request_id, want in zip(ids[:2], wanted, strict=False):
        assert outputs[request_id].outputs[0].logprobs == mock_dicts(want, 0)
    num_new = [int(n) for batch in runner.batches for n in batch.rows.num_new]
    assert max(num_new) == 1 + num_drafts and engine.stats()["num_output_tokens"] == sum(map(len, wanted))
    # A step returns fewer tokens than it computes, and more than rows.
    assert len(free) > sum(len(batch.rows) > 0 for batch in runner.batches)
    assert num_cached(engine, [*prompt, *free]) == 40
    # Drafts get no place that is not there.
    engine, _ = make_engine(pipeline_depth=depth, num_drafts=num_drafts, block_size=4, num_blocks=12)
    ids = [engine.add_request(prompt, SamplingParams(0, 40, ignore_eos=True)) for _ in range(3)]
    outputs = run(engine)
    assert [outputs[request_id]["token_ids"] for request_id in ids] == [free] * 3


@DEPTHS
def test_prompts_do_not_wait_for_drafts(depth: int) -> None:
    """A row may fill a step with its drafts; a prompt that comes gets a part of each."""
    engine, runner = make_engine(
        pipeline_depth=depth, num_drafts=15, block_size=4, num_blocks=64, max_num_batched_tokens=17
    )
    engine.add_request(list(range(20)), SamplingParams(0, 90, ignore_eos=True))
    while len(runner.batches) < 6:
        engine.step()
    assert runner.batches[-1].rows.num_new.max() > 12
    engine.add_request(list(range(9, 0, -1)), greedy(1))
    while len(runner.batches) < 10:
        engine.step()
    assert any(chunk.samples for batch in runner.batches[6:] for chunk in batch.chunks)
    # Half of what the row's own token leaves.
    assert {int(batch.rows.num_new.max()) for batch in runner.batches[6:] if batch.chunks} == {9}


def test_drafts_are_made_where_they_pay_at_this_number_of_rows() -> None:
    """One draft in four rows was right; twice the rows need a gain between the measured ones."""
    steady = SteadyRows(16, 16, 3, DraftCosts((1, 4, 8), (1.1, 1.3, 1.9)))
    for slot in range(9):
        seq = make_sequence(slot, [1] * 9)
        seq.slot, seq.most_tokens = slot, 99
        steady.add(seq, 99, 1)
        # A mean of 1, of 1 and 0, and so on: 1 / n.
        steady._gain[slot] = slot == 0
        assert steady.should_draft(0) == (slot + 1 in {1, 2, 3})
        assert not steady.should_draft(9)
    # All had one right draft: only more rows than are measured have none.
    steady._gain[:] = 1.0
    assert not steady.should_draft(0)
    steady.discard(steady.seqs[-1])
    assert steady.should_draft(0)
    steady._most_new[:4] = 1
    assert not steady.should_draft(0), "half the rows take no drafts"


def test_drafts_are_counted_by_their_position() -> None:
    steady, seq = SteadyRows(1, 16, 4), make_sequence(0, [1] * 9)
    seq.slot, seq.most_tokens = 0, 99
    # Preempted: what it had is not known.
    steady.settle(seq, 5, 3)
    steady.add(seq, 99, 1)
    steady.note_drafts(np.array([0]), np.array([3]), 1)
    steady.settle(seq, 5, 2)
    assert steady.num_verified.tolist() == [2, 2, 1, 0]
    assert steady.num_accepted.tolist() == [2, 1, 0, 0]


def test_a_row_whose_last_tokens_are_in_flight_needs_no_block() -> None:
    """Its prompt's last block may be another output's as well."""
    steady, seq = SteadyRows(1, 16, 4), make_sequence(0, [1] * 9)
    seq.slot, seq.siblings = 0, (seq,)
    for most_tokens, num_new in ((seq.num_tokens + 2, [2]), (seq.num_tokens, [])):
        seq.most_tokens = most_tokens
        steady.add(seq, 99, 1)
        assert [count for _, count in steady.without_room()] == num_new
        steady.discard(seq)


@DEPTHS
@pytest.mark.parametrize("are_free", [False, True])
def test_drafts_that_are_wrong_are_tried_again_now_and_then(depth: int, are_free: bool) -> None:
    engine, runner = make_engine(
        pipeline_depth=depth, num_drafts=1, draft_ratio=1.125, num_blocks=64, max_model_len=900
    )
    steady = engine.scheduler.steady
    steady.costs = replace(steady.costs, are_free=are_free)
    runner.share_right = 0.0
    engine.add_request([1, 2, 3], greedy(890))
    while len(runner.batches) < 400:
        engine.step()
    # At once, until eight were wrong; then a trial of an eighth of a step after 50.
    verified = [number for number, batch in enumerate(runner.batches) if (batch.rows.num_new > 1).any()]
    first, last = 1, 8 + depth
    assert verified == [*range(first, last + 1), *range(last + 51, 400, 50)]
    drafted = [number for number, batch in enumerate(runner.batches) if batch.drafts]
    # When the last ones at first are made, it is not known yet that they do not pay.
    assert len(drafted) == 400 if are_free else drafted == sorted({last, *(number - 1 for number in verified)})
    runner.share_right = 1.0
    while not engine.is_finished():
        engine.step()
    # One trial is enough to go on.
    assert len(runner.batches) < 400 + 52 + 2 + (490 - 52) / 2


def hybrid_engine(depth: int, *states: StateCache, num_blocks: int = 80, **sizes: Any) -> tuple[LLMEngine, MockRunner]:
    """An engine whose blocks of four tokens are many, and whose steps take whole prompts."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 128} | sizes
    return make_engine(pipeline_depth=depth, block_size=4, num_blocks=num_blocks, states=states, **sizes)


@DEPTHS
def test_a_prefix_with_a_state_begins_where_one_is_kept(depth: int) -> None:
    # Three numbers take two blocks; every second block end is kept, and a prompt's last.
    engine, runner = hybrid_engine(depth, StateCache(2, 2))
    prompt = list(range(30))
    assert num_cached(engine, prompt) == 0
    # A chunk keeps states on its way.
    (chunk,) = [chunk for batch in runner.batches for chunk in batch.chunks]
    assert [state.num_tokens for state in chunk.kept_states] == [8, 16, 24, 28] and not runner.batches[0].transfers
    # Keys match up to 20, 28 and 28 tokens; of a whole hit one block is computed again.
    assert [num_cached(engine, tokens) for tokens in (prompt[:23], [*prompt, 1], prompt[:28])] == [16, 28, 24]
    # In decoding as well.
    tokens = [*prompt, *complete(prompt, 20, frozenset(), 128, None, states=[2])]
    assert num_cached(engine, prompt, 20) == 28 and num_cached(engine, [*tokens[:49], 0]) == 48
    # Without its key block, no state is found.
    engine.reset_prefix_cache()
    assert num_cached(engine, prompt) == 0


@DEPTHS
def test_a_state_is_kept_where_prompts_branch(depth: int) -> None:
    engine, runner = hybrid_engine(depth, StateCache(2, 99))
    head = list(range(14))
    prompts = [[*head, *[20 + i] * 12] for i in range(6)]
    ids = [engine.add_request(prompt, greedy(2)) for prompt in prompts]
    outputs = run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert outputs[request_id]["token_ids"] == complete(prompt, 2, frozenset(), 128, None, states=[2])
    # The second finds keys of the first, and no state: it keeps one there, for which the others wait a step.
    assert [outputs[request_id]["num_cached_tokens"] for request_id in ids] == [0, 0, 12, 12, 12, 12]
    kept = [[[state.num_tokens for state in chunk.kept_states] for chunk in batch.chunks] for batch in runner.batches]
    assert kept[:2] == [[[24], [12, 24]], [[24]] * 4]


@DEPTHS
def test_a_state_of_a_failed_step_is_not_found(depth: int) -> None:
    engine, runner = hybrid_engine(depth, StateCache(2, 99))
    head = list(range(14))
    num_cached(engine, [*head, *[20] * 12], 2)
    # Its keys match where it was to keep a state.
    engine.add_request([*head, *[21] * 12], greedy(2))
    runner.fail_result = True
    with pytest.raises(StepError):
        run(engine)
    assert num_cached(engine, [*head, *[22] * 12], 2) == 0


@DEPTHS
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_prompt_gets_the_blocks_of_kept_states_one_step_later(depth: int, max_tokens: int) -> None:
    """After the first prompt four blocks are free, its kept state's among them, and the second needs all but one."""
    engine, runner = hybrid_engine(depth, StateCache(1, 99), num_blocks=8)
    # It frees its own at once, or nothing for three steps. The runner compares.
    engine.add_request([1] * 9, greedy(max_tokens))
    engine.add_request([2] * 12, greedy(1))
    run(engine)
    assert [len(batch.chunks) for batch in runner.batches[:2]] == [1, 1] and runner.batches[0].chunks[0].kept_states


@DEPTHS
def test_an_abort_that_leaves_no_request_leaves_no_step(depth: int) -> None:
    engine, _ = make_engine(pipeline_depth=depth)
    request_id = engine.add_request([1, 2, 3], greedy(20))
    engine.step()
    engine.step()
    engine.abort([request_id], keep_outputs=True)
    assert [output.outputs[0].finish_reason for _, output in engine.take_results().finished] == ["abort"]
    assert engine.is_finished()


@DEPTHS
def test_an_abort_before_the_prompt_is_computed_returns_none_of_its_states(depth: int) -> None:
    engine, _ = make_engine(pipeline_depth=depth, max_num_batched_tokens=16)
    request_id = engine.add_request(list(range(40)), SamplingParams(prompt_logprobs=0, hidden_states=[0]))
    engine.step()
    engine.step()
    engine.abort([request_id], keep_outputs=True)
    ((_, output),) = engine.take_results().finished
    assert output.hidden_states == [] and output.prompt_logprobs is None
    # One that is preempted in its middle is computed again from its start.
    request_id = engine.add_request(list(range(40)), SamplingParams(max_tokens=1, hidden_states=[0]))
    engine.step()
    engine.step()
    engine.scheduler.preempt_all()
    assert run(engine)[request_id].hidden_states[0].flatten().tolist() == list(range(40))


@DEPTHS
def test_windows_release_their_blocks_after_a_reset(depth: int) -> None:
    engine, _ = make_engine(pipeline_depth=depth, block_size=4, windows=[None, 8])
    engine.add_request([1] * 9, greedy(40))
    while not engine.is_finished():
        engine.step()
        check_engine(engine)
        if engine.stats()["num_steps"] == 3:
            assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache()


@DEPTHS
def test_a_state_is_evicted_as_a_whole_and_before_the_keys_at_its_end(depth: int) -> None:
    engine, _ = hybrid_engine(depth, StateCache(2, 99))
    manager, prompt = engine.block_manager, list(range(14))

    def states() -> list[Block]:
        return [block for block in manager.blocks if block.is_state]

    assert [num_cached(engine, prompt) for _ in range(2)] == [0, 12]
    manager._evict(states()[0])
    assert not states()
    check_blocks(manager)
    assert [num_cached(engine, prompt) for _ in range(2)] == [0, 12]
    # Without the last block of its keys it is of no use.
    last = next(key for key, *_ in manager._cache.blocks if (key, "state", 0) in manager._cache.blocks)
    manager._evict(manager._cache.blocks[last, "keys", 0])
    assert {block.rank for block in states()} == {SPENT}


@DEPTHS
def test_what_many_start_from_outlives_what_comes_once(depth: int) -> None:
    engine, _ = hybrid_engine(depth, StateCache(2, 99), num_blocks=40)
    head = [1] * 8
    # The second keeps a state of the head, where it branches off.
    assert [num_cached(engine, [*head, *[i] * 5]) for i in range(2, 5)] == [0, 0, 8]
    # Each leaves three blocks of keys and two of a state. The cache holds six of these, and the head.
    for number in range(20):
        num_cached(engine, [10 + number] * 13)
    assert num_cached(engine, [*head, *[5] * 5]) == 8
    # It does not stay for ever.
    for number in range(40):
        num_cached(engine, [number, 49] * 7)
    assert num_cached(engine, [*head, *[6] * 5]) == 0


@DEPTHS
def test_the_state_of_a_chats_turn_makes_room_once_the_next_one_has_another(depth: int) -> None:
    engine, _ = hybrid_engine(depth, StateCache(4, 99), num_blocks=42)
    # States of what is decoded are kept too, and left out in the next turn.
    chats = [[1] * 9, [2] * 9]
    assert [num_cached(engine, chat, 9) for chat in chats] == [0, 0]
    for turn in range(5):
        chats[1] += [3 + turn] * 4
        assert num_cached(engine, chats[1], 9) == 8 + 4 * turn
    assert num_cached(engine, [*chats[0], 3]) == 8


@DEPTHS
def test_states_of_decoding_make_room_where_prompts_leave_out_what_was_decoded(depth: int) -> None:
    engine, _ = hybrid_engine(depth, StateCache(4, 99), num_blocks=120)

    def ask(prompt: list[int]) -> list[int]:
        request_id = engine.add_request(prompt, greedy(9))
        return list(run(engine)[request_id]["token_ids"])

    def ranks() -> set[int]:
        return {block.rank for block in engine.block_manager._cache.blocks.values() if block.is_decoded}

    # Nothing is known yet; then two prompts repeat an output, and three leave one out.
    answers = [ask([i] * 9) for i in range(5)]
    assert USUAL in ranks() and SPARE not in ranks()
    for i in (3, 4):
        ask([*[i] * 9, *answers[i], 5])
    assert SPARE not in ranks()
    for i in range(3):
        ask([*[i] * 9, 6])
    assert SPARE in ranks()
    # What was long ago counts no more.
    for is_repeat in [False] * 99 + [True] * 32:
        engine.block_manager._note_repeat(is_repeat)
    assert engine.block_manager._num_repeats == 0


@DEPTHS
def test_who_waits_for_a_state_holds_up_no_other(depth: int) -> None:
    engine, runner = hybrid_engine(depth, StateCache(1, 99))
    head = list(range(8))
    for tail in (20, 21, 22):
        engine.add_request([*head, *[tail] * 6], greedy(2))
    engine.add_request([30] * 9, greedy(2))
    engine.step()
    assert [chunk.token_ids[0] for chunk in runner.batches[0].chunks] == [0, 0, 30]
    run(engine)
    assert [chunk.start for chunk in runner.batches[1].chunks] == [8]


@DEPTHS
def test_decoding_keeps_the_newest_block_end_where_there_is_room(depth: int) -> None:
    engine, _ = hybrid_engine(depth, StateCache(2, 99), num_blocks=30, max_model_len=64)
    prompt, tokens = [1, 2, 3], complete([1, 2, 3], 38, frozenset(), 64, None, states=[2])
    num_cached(engine, prompt, 38)
    # Earlier ones are there until something needs their blocks.
    assert sum(block.is_state and block.rank != SPENT for block in engine.block_manager.blocks) == 2
    # Of the last block, a value is not known in time if a step is planned ahead.
    assert num_cached(engine, [*prompt, *tokens]) == 40 - 4 * depth


@DEPTHS
@pytest.mark.parametrize("length", [2, 5, 8, 9, 11])
def test_outputs_continue_from_the_state_before_the_last_prompt_token(depth: int, length: int) -> None:
    engine, runner = hybrid_engine(depth, StateCache(2, 99))
    prompt = list(range(length))
    request_id = engine.add_request(prompt, SamplingParams(0.5, 9, n=3))
    output = run(engine)[request_id]
    want = complete(prompt, 9, frozenset(), 128, None, states=[2])
    assert [list(item.token_ids) for item in output.outputs] == [want] * 3
    # The other outputs compute one token of the prompt each.
    assert sum(len(chunk.token_ids) for batch in runner.batches for chunk in batch.chunks) == length + 2
    # A chunk of the last token alone keeps no state on its way.
    engine, _ = hybrid_engine(depth, StateCache(2, 99), max_num_batched_tokens=length - 1)
    request_id = engine.add_request(prompt, SamplingParams(0.5, 9, n=3))
    assert [list(item.token_ids) for item in run(engine)[request_id].outputs] == [want] * 3


@DEPTHS
def test_decoding_keeps_no_state_where_all_free_blocks_hold_something(depth: int) -> None:
    engine, _ = hybrid_engine(depth, StateCache(2, 99), num_blocks=30, max_model_len=64)
    # Each leaves three blocks of keys, and two of a state.
    for number in range(12):
        num_cached(engine, [number] * 13)
    prompt, tokens = [21, 22, 23], complete([21, 22, 23], 12, frozenset(), 64, None, states=[2])
    assert [num_cached(engine, prompt, 12), num_cached(engine, [*prompt, *tokens])] == [0, 0]


@DEPTHS
def test_states_are_forgotten_where_no_block_is_free_for_a_copy(depth: int) -> None:
    # The sequence needs four blocks for keys and one for its state.
    engine, runner = hybrid_engine(depth, StateCache(1, 1), num_blocks=5, max_num_batched_tokens=8)
    assert num_cached(engine, list(range(9)), 8) == 0
    assert not engine.stats()["num_preemptions"] and sum(len(batch.transfers) for batch in runner.batches) < 3
    assert engine.limits.max_stored_tokens == 16


@DEPTHS
def test_decode_steps_with_the_same_members_send_nothing_new(depth: int) -> None:
    engine, runner = make_engine(pipeline_depth=depth)
    engine.add_request([1] * 4, greedy(10))
    run(engine)
    for batch in runner.batches[1:]:
        assert not batch.new_requests and not batch.new_blocks and not batch.chunks


@DEPTHS
def test_abort_frees_at_once(depth: int) -> None:
    engine, _ = make_engine(pipeline_depth=depth)
    ids = [engine.add_request([i] * 20, greedy(50)) for i in range(6)]
    for _ in range(4):
        engine.step()
    assert (engine.stats()["num_running"], engine.stats()["num_waiting"]) == (4, 2)
    engine.abort(ids[1:])
    assert engine.block_manager.num_used_blocks == engine.block_manager.num_blocks_for(20 + 4)
    assert (engine.stats()["num_running"], engine.stats()["num_waiting"]) == (1, 0)
    assert list(run(engine)) == ids[:1]


def test_stats_count_what_happened() -> None:
    engine, _ = make_engine(pipeline_depth=0)
    engine.add_request(list(range(20)), greedy(5))
    steps = [engine.step() for _ in range(5)]
    assert [(step.num_prefill_tokens, step.num_output_tokens) for step in steps] == [(20, 1), *[(0, 1)] * 4]
    engine.add_request(list(range(20)), greedy(5))
    run(engine)
    assert engine.stats() == {
        "num_steps": 10,
        "num_prompt_tokens": 40,
        "num_output_tokens": 10,
        "num_cached_tokens": 16,
        "num_preemptions": 0,
        "num_running": 0,
        "num_waiting": 0,
        "num_used_blocks": 0,
        "num_free_blocks": 16,
        "num_clipped_kv": 0,
    }


def test_outputs_do_not_go_on_from_a_state_past_their_prompt() -> None:
    # The first output is preempted before the second begins, and computes a block past the prompt again.
    engine, _ = make_engine(
        pipeline_depth=0, block_size=2, num_blocks=8, max_num_seqs=2, max_num_batched_tokens=3,
        states=[StateCache(3, 1)],
    )  # fmt: skip
    for prompt, max_tokens, n in [([0], 1, 1)] * 5 + [([0], 3, 1), ([0, 0], 3, 2)]:
        last = engine.add_request(prompt, SamplingParams(0.5, max_tokens, n=n))
    want = complete([0, 0], 3, frozenset(), 128, None, states=[3])
    assert [list(output.token_ids) for output in run(engine)[last].outputs] == [want] * 2


def test_stats_count_states() -> None:
    engine, _ = hybrid_engine(0, StateCache(2, 99))

    def counted(prompt: list[int]) -> list[int]:
        engine.add_request(prompt, greedy(2))
        engine.step()
        used = engine.stats()["num_used_states"]
        run(engine)
        stats = engine.stats()
        names = ("num_used_states", "num_kept_states", "num_matched_tokens", "num_cached_tokens")
        return [used, *(stats[name] for name in names)]

    head = list(range(10))
    assert counted([*head, *[20] * 4]) == [1, 0, 1, 0, 0]
    # Two of its blocks are cached, without a state after them: it keeps one, and its last.
    assert counted([*head, *[21] * 4]) == [1, 0, 3, 8, 0]
    assert counted([*head, *[22] * 4]) == [1, 0, 4, 16, 8]
    # Of three blocks one is computed again.
    assert counted([*head, *[22] * 2]) == [1, 0, 4, 24, 16]
    engine.reset_prefix_cache()
    assert engine.stats()["num_kept_states"] == 0


def test_metrics_time_the_first_token_and_the_last_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine, _ = make_engine(pipeline_depth=0)
    # The output that takes longest is neither the first nor the last.
    num_left = [2, 3, 1]
    request = engine.enqueue(make_request([1, 2], SamplingParams(n=3), is_streamed=True))
    while any(num_left):
        now[0] += 1
        engine.run_step()
        new = [index for _, index, *_ in engine.take_results().new_tokens]
        assert new == [index for index in range(3) if num_left[index]]
        num_left = [max(0, left - 1) for left in num_left]
        engine.stop([(request, index) for index in new if not num_left[index]])
    ((_, output),) = engine.take_results().finished
    assert engine.is_finished()
    assert [len(item.token_ids) for item in output.outputs] == [2, 3, 1]
    assert output.metrics == RequestMetrics(0.0, queue_time=1.0, time_to_first_token=1.0, total_time=3.0)


@DEPTHS
def test_a_higher_priority_takes_a_slot_from_the_last_of_lower_priority(depth: int) -> None:
    engine, _ = make_engine(pipeline_depth=depth, num_blocks=200, max_num_seqs=6, max_num_batched_tokens=32)
    low = [engine.add_request([i] * 5, greedy(40), 1) for i in range(6)]
    equal = [engine.add_request([20 + i] * 5, greedy(40), 0) for i in range(2)]
    for _ in range(5):
        engine.step()
    assert [seq.seq_id for seq in engine.scheduler.running] == [*equal, *low[:4]]

    def step(num_preemptions: int, *running: int) -> None:
        engine.step()
        assert [seq.seq_id for seq in engine.scheduler.running] == [*equal, *running]
        assert engine.stats()["num_preemptions"] == num_preemptions

    # Only the first of the queue has a higher priority than what runs.
    first = engine.add_request([30] * 5, greedy(40), 0)
    step(1, first, *low[:3])
    # The step has tokens to begin two of these prompts; no row of their own priority ever makes way.
    high = [engine.add_request([31 + i] * 15, greedy(40), 0) for i in range(4)]
    step(3, first, *high[:2], low[0])
    begun = {request_id for _ in range(depth + 1) for request_id in engine.step().new_token_ids}
    assert {first, high[0]} <= begun
    step(4, first, *high[:3])
    outputs = run(engine)
    assert engine.stats()["num_preemptions"] == 4
    assert [outputs[request_id]["token_ids"] for request_id in low] == [
        complete([i] * 5, 40, frozenset(), engine.limits.max_model_len) for i in range(6)
    ]


def test_a_priority_takes_a_slot_only_if_it_can_start() -> None:
    # The rows take all tokens of a step: a row that makes way leaves its own.
    engine, _ = make_engine(pipeline_depth=0, num_blocks=200, max_num_seqs=4, max_num_batched_tokens=4)
    for i in range(4):
        engine.add_request([i] * 2, greedy(40), 1)
    for _ in range(8):
        engine.step()
    assert len(engine.scheduler.steady) == 4
    high = engine.add_request([9] * 3, greedy(2))
    engine.step()
    assert engine.scheduler.running[0].seq_id == high and engine.stats()["num_preemptions"] == 1
    # A prompt of its own priority that is begun comes first, and nothing makes way before it ends.
    engine, _ = make_engine(pipeline_depth=0, num_blocks=200, max_num_seqs=2, max_num_batched_tokens=16)
    low = engine.add_request([1], greedy(60), 1)
    engine.step()
    engine.add_request([2] * 100, greedy(60))
    engine.step()
    engine.add_request([3] * 5, greedy(2))
    engine.step()
    assert low in [seq.seq_id for seq in engine.scheduler.running] and not engine.stats()["num_preemptions"]
    run(engine)
    assert engine.stats()["num_preemptions"] == 1
    # One of lower priority makes way itself.
    engine, _ = make_engine(pipeline_depth=0, num_blocks=200, max_num_seqs=1, max_num_batched_tokens=16)
    engine.add_request([1] * 100, greedy(2), 1)
    engine.step()
    high = engine.add_request([2] * 5, greedy(2))
    engine.step()
    assert [seq.seq_id for seq in engine.scheduler.running] == [high]


@DEPTHS
def test_a_priority_preempts_one_sequence_a_step(depth: int) -> None:
    engine, _ = make_engine(pipeline_depth=depth, block_size=4, num_blocks=12, max_num_seqs=8)
    low = [engine.add_request([i] * 9, greedy(8 + i), 1) for i in range(4)]
    engine.step()
    assert len(engine.scheduler.running) == 4 and not engine.block_manager.num_free_blocks
    high = engine.add_request([9] * 17, greedy(2))
    counts = []
    while not any(seq.seq_id == high for seq in engine.scheduler.running):
        engine.step()
        counts.append(engine.stats()["num_preemptions"])
        check_engine(engine)
    assert counts == [1, 2]
    outputs = run(engine)
    assert [len(outputs[request_id]["token_ids"]) for request_id in low] == [8, 9, 10, 11]


@settings(max_examples=num_examples(30, 200), deadline=None)
@given(data=st.data())
def test_outputs_share_a_prompt_and_copy_on_write(data: st.DataObject) -> None:
    depth = data.draw(st.sampled_from([0, 1]))
    windows: list[int | None] = data.draw(st.sampled_from([[None], [2], [5], [None, 2], [None, 5, 5], [3, 5]]))
    engine, _ = make_engine(
        pipeline_depth=depth,
        # In three groups, 25 tokens need 9, 3 and 3 blocks of the smallest size.
        num_blocks=data.draw(st.integers(15, 30)),
        block_size=data.draw(st.sampled_from([3, 4, 16])),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_num_batched_tokens=data.draw(st.sampled_from([6, 8, 32])),
        max_model_len=30,
        enable_prefix_caching=data.draw(st.booleans()),
        windows=windows,
    )
    wanted: dict[int, tuple[list[int], SamplingParams]] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        prompt = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=14))
        params = SamplingParams(
            temperature=0.5,
            max_tokens=data.draw(st.integers(1, 12)),
            ignore_eos=True,
            n=data.draw(st.integers(1, 4)),
            logprobs=data.draw(st.sampled_from([None, 0, 2])),
            prompt_logprobs=data.draw(st.sampled_from([None, 1])),
            prompt_logprobs_start=data.draw(st.integers(0, len(prompt))),
            hidden_states=data.draw(st.sampled_from([None, None, [3], [0, 2]])),
        )
        wanted[engine.add_request(prompt, params, data.draw(PRIORITY))] = prompt, params
    reset_at = data.draw(st.integers(0, 20))
    while not engine.is_finished():
        if engine.stats()["num_steps"] == reset_at:
            engine.reset_prefix_cache()
        result = engine.step()
        check_engine(engine)
        for request_id, output in result.finished:
            check_outputs(output, *wanted.pop(request_id), windows)
    assert not wanted and engine.block_manager.num_used_blocks == 0


def check_outputs(output: RequestOutput, prompt: list[int], params: SamplingParams, windows: list[int | None]) -> None:
    """Compare a request's outputs with what the mock model says."""
    want = complete(prompt, params.max_tokens or 0, frozenset(), 30, *windows)
    assert [item.token_ids for item in output.outputs] == [want] * params.n
    for item in output.outputs:
        assert item.logprobs == mock_dicts(want, params.logprobs)
    start = max(1, params.prompt_logprobs_start)
    scored = mock_dicts(prompt[start:], params.prompt_logprobs)
    assert output.prompt_logprobs == (None if scored is None else [None] * min(start, len(prompt)) + scored)
    layers = params.hidden_states or []
    assert np.array_equal(np.array(output.hidden_states), mock_hidden_states(prompt, layers)) or not layers


def mock_dicts(token_ids: list[int], num_logprobs: int | None) -> list[dict[int, Logprob]] | None:
    """The log-probabilities of `mock_logprobs` as users get them."""
    if num_logprobs is None:
        return None
    return [{t + i: Logprob(-(t + i + 1) / 64, i if i else t + 1) for i in range(num_logprobs + 1)} for t in token_ids]


def test_a_shared_prompt_is_computed_once_and_copied_on_write() -> None:
    engine, runner = make_engine(pipeline_depth=0, enable_prefix_caching=False)
    for _ in range(2):
        # Nothing is found of the first one.
        runner.batches.clear()
        engine.add_request(list(range(20)), SamplingParams(temperature=0.5, max_tokens=3, ignore_eos=True, n=3))
        assert [output.num_cached_tokens for output in run(engine).values()] == [0]
    assert [(chunk.start, len(chunk.token_ids), chunk.store) for chunk in runner.batches[0].chunks] == [
        (0, 20, True), (19, 1, False), (19, 1, False),
    ]  # fmt: skip
    # The last one to write keeps the block.
    assert [len(batch.transfers) for batch in runner.batches] == [0, 2, 0]
