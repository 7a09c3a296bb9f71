"""The order of eviction, and what a hash collision must not do; the rest of the promises are in test_scheduler.py."""

from __future__ import annotations

import pytest

from nanovllm import SamplingParams
from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence


def hold(manager: BlockManager, tokens: list[int]) -> Sequence:
    """Admit a prompt, as if it were then computed in whole."""
    seq = Sequence(0, tokens, SamplingParams(), 0)
    assert manager.admit(seq)
    seq.num_computed_tokens = len(tokens)
    manager.begin_step()
    manager.register(seq)
    manager.confirm_step()
    return seq


def cached(manager: BlockManager, tokens: list[int]) -> int:
    """Blocks of a prompt that would be found."""
    return len(manager._match_prefix(Sequence(0, tokens, SamplingParams(), 0)))


def test_the_tail_of_a_prefix_goes_before_its_head() -> None:
    manager = BlockManager(3, 2)
    prompt = [1, 2, 3, 4, 5, 6]
    manager.release(hold(manager, prompt))
    for left in (3, 2, 1):
        assert cached(manager, prompt) == left
        hold(manager, [50 + left])
    assert cached(manager, prompt) == 0


def test_the_least_recently_used_goes_first() -> None:
    manager = BlockManager(3, 2)
    prompts = [[1, 1], [2, 2], [3, 3]]
    held = [hold(manager, prompt) for prompt in prompts]
    for i in (1, 0, 2):
        manager.release(held[i])
    # Used again, so no longer the oldest.
    manager.release(hold(manager, prompts[1]))
    hold(manager, [9, 9])
    assert [cached(manager, prompt) for prompt in prompts] == [0, 1, 1]
    hold(manager, [8, 8])
    assert [cached(manager, prompt) for prompt in prompts] == [0, 1, 0]


def test_what_cannot_be_found_again_is_reused_before_what_can() -> None:
    manager = BlockManager(2, 2)
    manager.release(hold(manager, [1, 2]))
    manager.release(hold(manager, [7]))
    hold(manager, [8])
    assert cached(manager, [1, 2]) == 1


def test_a_hash_collision_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "chain_hash", lambda parent, tokens: 42)
    manager = BlockManager(4, 2)
    hold(manager, [1, 2])
    assert cached(manager, [1, 2]) == 1
    assert cached(manager, [1, 3]) == 0


def test_the_same_tokens_behind_another_prefix_are_not_the_same_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if their hashes collide."""
    monkeypatch.setattr(block_manager, "chain_hash", lambda parent, tokens: tokens[0])
    manager = BlockManager(8, 2)
    hold(manager, [1, 1, 5, 5])
    assert cached(manager, [1, 1, 5, 5]) == 2
    hold(manager, [2, 2])
    assert cached(manager, [2, 2, 5, 5]) == 1


def test_blocks_of_a_step_stand_or_fall_with_it() -> None:
    manager = BlockManager(4, 2)
    first, second = (Sequence(i, [i, i], SamplingParams(), 0) for i in (1, 2))
    for seq in (first, second):
        assert manager.admit(seq)
        seq.num_computed_tokens = 2
        manager.begin_step()
        manager.register(seq)
    manager.confirm_step()
    manager.release(second)
    manager.rollback()
    assert cached(manager, [1, 1]) == 1
    assert cached(manager, [2, 2]) == 0
