"""Models with sliding windows in some layers: how layers are grouped, and what that saves."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention.kv_cache_groups import make_groups
from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.parallel.communicator import Communicator
from nanovllm.runner.model_runner import ModelRunner
from tests.cache_checks import check_blocks
from tests.conftest import MakeCheckpoint
from tests.mock_runner import greedy, make_engine, num_cached, run, window_kinds
from tests.reference import GREEDY, check, check_tokens, complete, make_llm, prompts, set_depth

WINDOW, FULL = "sliding_attention", "full_attention"
# Two groups of three layers with a window, one of them padded, beside one of three without.
SHAPE = {
    "num_hidden_layers": 8,
    "head_dim": 16,
    "sliding_window": 20,
    "layer_types": [WINDOW, WINDOW, FULL, WINDOW, FULL, WINDOW, FULL, WINDOW],
}


@pytest.fixture(scope="module")
def mixed(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("Ministral", seed=3, **SHAPE)


def sizes(pattern: list[int | None], max_blocks: int = 64) -> list[tuple[int | None, int]]:
    """Each group's window and number of layers; what they have must be all layers, once."""
    specs = [Paged(2, 16, 16, window, torch.float32) for window in pattern]
    groups = make_groups(specs, 16, max_blocks)
    assert sorted(i for group in groups for i in group.layers) == list(range(len(pattern)))
    if len(groups) > 1:
        assert all(pattern[i] == group.window for group in groups for i in group.layers)
    return [(group.window, len(group.layers)) for group in groups]


def test_groups_are_of_one_size_and_little_of_them_is_padding() -> None:
    # gpt-oss; Gemma 3 of 4, 12 and 27 billion parameters; Cohere 2.
    assert sizes([128, None] * 12) == [(None, 12), (128, 12)]
    assert sizes([*[*[64] * 5, None] * 5, *[64] * 4]) == [(None, 5), *[(64, 5)] * 5, (64, 4)]
    assert sizes([*[64] * 5, None] * 8) == [(None, 8), *[(64, 8)] * 5]
    assert sizes([*[*[64] * 5, None] * 10, 64, 64]) == [(None, 10), *[(64, 10)] * 5, (64, 2)]
    assert sizes([64, 64, 64, None] * 8) == [(None, 8), *[(64, 8)] * 3]
    # Mostly without a window; two windows.
    assert sizes([*[None] * 21, *[64] * 7]) == [*[(None, 7)] * 3, (64, 7)]
    assert sizes([None, 32, 64, 32, 64, None]) == [(None, 2), (32, 2), (64, 2)]
    # Kinds of nearly one number; one layer of its kind among many.
    assert sizes([*[64] * 10, *[None] * 9]) == [(None, 9), (64, 10)]
    assert sizes([*[64] * 39, None]) == [(None, 1), *[(64, 3)] * 13]


def test_one_group_where_several_would_save_nothing() -> None:
    assert sizes([None] * 4) == [(None, 4)] and sizes([64] * 4) == [(64, 4)]
    # The longest sequence fits into a window.
    assert sizes([64, None] * 2, max_blocks=5) == [(None, 4)]
    assert sizes([64, None] * 2, max_blocks=6) == [(None, 2), (64, 2)]


def test_tokens_are_transformers_where_windows_are_released(mixed: Path) -> None:
    batch = prompts((1, 16, 33, 150, 257), seed=5)
    # A longest sequence takes 18 blocks of one group, and three of each of the others, which is all.
    with make_llm(mixed, max_num_batched_tokens=48, max_num_seqs=4, num_kvcache_blocks=8) as small:
        set_depth(small, 1)
        assert small.llm_engine.block_manager.num_blocks == 24
        check(small, mixed, batch)
        assert small.stats()["num_preemptions"] > 0
        with pytest.raises(ValueError, match="need 289 KV slots, over the cache's 288 for one request"):
            small.generate([[7] * 257], SamplingParams(max_tokens=33))
        small.generate([[7] * 257], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), use_tqdm=False)
    with make_llm(mixed, max_num_batched_tokens=48, num_kvcache_blocks=10) as llm:
        set_depth(llm, 1)
        assert check(llm, mixed, batch[-1:]) == [0] and check(llm, mixed, batch[-1:]) == [256]
        # A prefix is found if the window before its end is in the cache.
        longer = [*batch[-1], *complete(mixed, tuple(batch[-1]))]
        assert check(llm, mixed, [longer[:273]]) == [272] and check(llm, mixed, [batch[-1][:160]]) == [0]


def test_outputs_salts_resets_and_sleep(mixed: Path) -> None:
    (prompt,) = prompts((90,), seed=6)
    want = complete(mixed, tuple(prompt))
    # So cold that only the likeliest tokens are drawn.
    twice = SamplingParams(temperature=1e-6, max_tokens=24, ignore_eos=True, n=2)
    with make_llm(mixed, max_num_batched_tokens=48, max_num_seqs=4) as llm:

        def cached(salt: str | None = None) -> int:
            given = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
            (output,) = llm.generate([given], twice, use_tqdm=False)
            assert [item.token_ids for item in output.outputs] == [want, want]
            assert llm.stats()["num_used_blocks"] == 0
            return int(output.num_cached_tokens)

        assert [cached(salt) for salt in (None, None, "a", "b", "a", None)] == [0, 80, 0, 0, 80, 80]
        assert llm.reset_prefix_cache() and [cached(), cached(), cached("a")] == [0, 80, 0]
        llm.sleep()
        llm.wake_up()
        assert cached() == 0
        check_blocks(llm.llm_engine.block_manager)


def test_one_memory_holds_more_sequences(mixed: Path) -> None:
    batch = prompts((170,) * 6, seed=7)

    def most_running(llm: LLM) -> int:
        ids = {llm.add_request(prompt, GREEDY): prompt for prompt in batch}
        most = 0
        while not llm.is_finished():
            for request_id, output in llm.step().finished:
                check_tokens(mixed, ids.pop(request_id), output["token_ids"])
            most = max(most, len(llm.llm_engine.scheduler.steady))
        return most

    sizes = {"max_num_batched_tokens": 64, "num_kvcache_blocks": 20}
    with make_llm(mixed, **sizes) as llm:
        assert most_running(llm) >= 3
    # Blocks in the host's memory are of all layers: of 13 that a sequence takes, 20 are not enough for two.
    with make_llm(mixed, swap_space=2**-7, **sizes) as llm:
        assert llm.llm_engine.block_manager.num_blocks == 20 and most_running(llm) == 1


def test_ranks_whose_pages_differ_have_one_group(mixed: Path) -> None:
    with make_llm(mixed) as llm:
        runner = cast("ModelRunner", llm.llm_engine._runner)
        assert runner.cache_kinds == window_kinds(None, 20, 20)
        keys = {layer.layer.pages.k_cache.data_ptr() for layer in runner.model.attention_layers}
        assert len(keys) == 3, "the i-th layers of all groups have one tensor"
        assert runner.kv_cache.block_bytes == 3 * 2 * 16 * 2 * 16 * 4
        runner.communicator = Differing()
        assert [group.window for group in runner._make_groups()] == [None]


class Differing(Communicator):
    """Another rank's minimum is lower."""

    def all_reduce_min(self, value: int) -> int:
        return min(value, 0)


@pytest.mark.parametrize("depth", [0, 1])
def test_groups_with_windows_hold_a_bounded_number_of_blocks(depth: int) -> None:
    engine, _ = make_engine(
        pipeline_depth=depth, windows=[None, 9, 5], block_size=4, num_blocks=160, max_num_batched_tokens=8,
        max_model_len=300,
    )  # fmt: skip
    for i in range(2):
        engine.add_request([i] * 150, greedy(80))
    most = [0, 0, 0]
    while not engine.is_finished():
        engine.step()
        for seq in engine.scheduler.steady.seqs:
            held = [len(table.held) for table in seq.block_tables]
            # Nothing waits for the next block's border before it is released.
            assert held[1] <= 3 and held[2] <= 2
            most = [max(pair) for pair in zip(most, held, strict=True)]
        for seq in engine.scheduler.running:
            assert len(seq.block_tables[1].held) <= 5 and len(seq.block_tables[2].held) <= 4
    assert most == [57, 3, 2] and not engine.stats()["num_preemptions"]


@pytest.mark.parametrize(("num_blocks", "lens"), [(16, [12, 4, 4, 4, 4, 4, 4, 1]), (22, [24, 13])])
def test_a_chunk_takes_what_a_small_cache_has_for_it(num_blocks: int, lens: list[int]) -> None:
    # Ten blocks of the layers without a window leave three for each group with one, in which nine tokens may lie.
    engine, runner = make_engine(
        pipeline_depth=0, windows=[None, 9, 9], block_size=4, num_blocks=num_blocks, max_num_batched_tokens=64,
        max_model_len=60,
    )  # fmt: skip
    assert engine.limits.max_stored_tokens == {16: 40, 22: 60}[num_blocks]
    assert engine.limits.num_kv_slots == num_blocks // 3 * 4
    engine.add_request(list(range(37)), greedy(4))
    run(engine)
    assert [len(chunk.token_ids) for batch in runner.batches for chunk in batch.chunks] == lens


def test_the_tail_of_a_prefix_goes_before_its_head_in_all_groups() -> None:
    engine, _ = make_engine(pipeline_depth=0, windows=[None, 64, 64], block_size=4, num_blocks=18)
    # The second takes the free blocks, two each, and then the last one of each group.
    assert [num_cached(engine, prompt) for prompt in (list(range(16)), [49] * 12, list(range(16)))] == [0, 0, 12]


def test_a_sequence_is_given_blocks_of_all_groups_or_none() -> None:
    # Each needs one more in both groups in the same step, and three are free. The mock runner checks who gets them.
    engine, _ = make_engine(pipeline_depth=0, windows=[None, 9], block_size=4, num_blocks=7, max_model_len=12)
    for token in range(2):
        engine.add_request([token] * 4, greedy(3))
    run(engine)
    assert engine.stats()["num_preemptions"] == 1
