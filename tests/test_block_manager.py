"""The order of eviction, and what prefixes share; the rest of the promises are in test_scheduler.py."""

from __future__ import annotations

import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.prefix_cache import FoundBlock
from nanovllm.engine.sequence import Sequence
from tests.cache_checks import check_blocks
from tests.mock_runner import make_sequence, window_kinds


def hold(manager: BlockManager, tokens: list[int]) -> Sequence:
    """Admit a prompt, as if it were then computed in whole."""
    seq = make_sequence(0, tokens)
    assert manager.allocate(seq)
    seq.num_computed_tokens = len(tokens)
    manager.begin_step()
    manager.register(seq)
    manager.confirm_step()
    return seq


def cached(manager: BlockManager, tokens: list[int]) -> int:
    """Blocks of a prompt that would be found."""
    return len(manager._match_prefix(make_sequence(0, tokens))[0])


def test_the_least_recently_used_goes_first() -> None:
    manager = BlockManager(3, 2)
    prompts = [[1, 1], [2, 2], [3, 3]]
    held = [hold(manager, prompt) for prompt in prompts]
    for i in (1, 0, 2):
        manager.free(held[i])
    # Used again, so no longer the oldest.
    manager.free(hold(manager, prompts[1]))
    hold(manager, [9, 9])
    assert [cached(manager, prompt) for prompt in prompts] == [0, 1, 1]
    hold(manager, [8, 8])
    assert [cached(manager, prompt) for prompt in prompts] == [0, 1, 0]


def test_what_cannot_be_found_again_is_reused_before_what_can() -> None:
    manager = BlockManager(2, 2)
    manager.free(hold(manager, [1, 2]))
    manager.free(hold(manager, [7]))
    hold(manager, [8])
    assert cached(manager, [1, 2]) == 1


def test_usage_sums_up_neighbouring_blocks() -> None:
    manager = BlockManager(5, 2)
    held = [hold(manager, prompt) for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 4], [7])]
    usage = manager.usage(3)
    assert (usage.num_blocks, usage.blocks_per_cell, usage.used) == (5, 2, [2, 2, 0])
    assert (usage.cached, usage.users, usage.hits) == ([2, 0, 0], [2, 1, 0], [2, 0, 0])
    for seq in held:
        manager.free(seq)
    hold(manager, [1, 2, 9])
    usage = manager.usage(5)
    assert (usage.used, usage.cached) == ([1, 0, 0, 1, 0], [1, 1, 0, 0, 0])
    assert usage.hits == [2, 1, 0, 0, 0]


def test_a_block_is_found_after_its_own_prefix_alone() -> None:
    manager = BlockManager(8, 2)
    first = hold(manager, [1, 2])
    assert (cached(manager, [1, 2]), cached(manager, [1, 3])) == (1, 0)
    other = hold(manager, [1, 3, 5, 5])
    assert first.block_tables[0].held[0] != other.block_tables[0].held[0]
    # What was computed after [1, 3] is not what follows [1, 2].
    assert cached(manager, [1, 2, 5, 5]) == 1
    hold(manager, [1, 2, 5, 5])
    assert (cached(manager, [1, 2, 5, 5]), cached(manager, [1, 3, 5, 5])) == (2, 2)


def test_a_sequence_that_does_not_fit_is_matched_once_until_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = BlockManager(6, 2)
    held = [hold(manager, [i, i]) for i in range(5)]
    matches, match = [], BlockManager._match_prefix

    def counted_match(self: BlockManager, seq: Sequence) -> list[list[FoundBlock | None]]:
        matches.append(seq)
        return match(self, seq)

    monkeypatch.setattr(BlockManager, "_match_prefix", counted_match)
    waiting = make_sequence(9, [9] * 8)
    for _ in range(10):
        assert not manager.allocate(waiting)
    assert len(matches) == 1
    # It needs four blocks, and one is free.
    for seq in held[:3]:
        assert not manager.allocate(waiting)
        manager.free(seq)
    assert len(matches) == 1
    assert manager.allocate(waiting) and len(matches) == 2


def test_a_block_that_another_registers_lets_a_sequence_fit() -> None:
    manager = BlockManager(4, 2)
    seq = make_sequence(0, [1, 1, 2, 2, 3, 3])
    assert manager.allocate(seq)
    waiting = make_sequence(1, [1, 1, 2, 2, 3, 4])
    for num_computed in (2, 4):
        assert not manager.allocate(waiting)
        seq.num_computed_tokens = num_computed
        manager.begin_step()
        manager.register(seq)
    assert manager.allocate(waiting)


def test_rollback_queues_uncached_blocks_first() -> None:
    manager = BlockManager(4, 2)
    good = hold(manager, [1, 1])
    bad = make_sequence(1, [2, 2, 3, 3])
    assert manager.allocate(bad)
    bad.num_computed_tokens = 4
    manager.begin_step()
    manager.register(bad)
    manager.free(good)
    manager.free(bad)
    manager.rollback()
    check_blocks(manager)
    hold(manager, [5, 5, 6, 6, 7])
    assert cached(manager, [1, 1]) == 1


def test_blocks_of_a_step_stand_or_fall_with_it() -> None:
    manager = BlockManager(4, 2)
    first, second = (make_sequence(i, [i, i]) for i in (1, 2))
    for seq in (first, second):
        assert manager.allocate(seq)
        seq.num_computed_tokens = 2
        manager.begin_step()
        manager.register(seq)
    manager.confirm_step()
    manager.free(second)
    manager.rollback()
    assert cached(manager, [1, 1]) == 1
    assert cached(manager, [2, 2]) == 0
    # A step that is undone is over: the next one that succeeds is none that a further rollback undoes.
    manager.free(hold(manager, [3, 3]))
    manager.rollback()
    assert cached(manager, [3, 3]) == 1


def test_no_group_finds_what_another_has_kept_since_before_a_reset() -> None:
    manager = BlockManager(20, 2, kinds=window_kinds(None, 8))
    hold(manager, [1, 2, 3, 4, 5])
    assert not manager.reset()
    second, third = (hold(manager, [1, 2, 3, 4, 5]) for _ in range(2))
    assert [table.held[:2] for table in third.block_tables] == [table.held[:2] for table in second.block_tables]
