"""Rows that share a prefix, and the work items made for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.attention import cascade as shared_prefix
from nanovllm.attention.cascade import CascadePlanner, find_groups, plan_cascade_groups
from tests.examples import num_examples
from tests.mock_runner import slot_rows

BLOCK_SIZE = 16


def tables_of(rows: list[list[int]], width: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Block tables of rows, and how many of their blocks are full: all but the last."""
    tables = np.zeros((len(rows), width), dtype=np.int32)
    for i, row in enumerate(rows):
        tables[i, : len(row)] = row
    return tables, np.array([len(row) - 1 for row in rows])


def test_a_group_goes_as_deep_as_saves_most() -> None:
    # Four share two blocks; three of them share five.
    rows = [[1, 2, 3, 4, 5, 10], [1, 2, 3, 4, 5, 11], [1, 2, 20], [1, 2, 3, 4, 5, 12], [30, 31], [40]]
    (group,) = find_groups(*tables_of(rows))
    assert group.members.tolist() == [0, 1, 3] and group.num_blocks == 5 and group.saved_blocks == 10
    # With five more that share two, those are worth more.
    (group,) = find_groups(*tables_of(rows + [[1, 2, 50 + i] for i in range(5)]))
    assert len(group.members) == 9 and group.num_blocks == 2 and group.saved_blocks == 16


def test_blocks_that_are_not_full_are_nobody_elses() -> None:
    assert not list(find_groups(*tables_of([[7], [7], [8, 9]])))
    (group,) = find_groups(*tables_of([[7, 8, 9], [7, 8]]))
    assert group.num_blocks == 1


@given(st.data())
@settings(max_examples=num_examples(40, 400), deadline=None)
def test_every_shared_key_is_attended_to_once(data: st.DataObject) -> None:
    rows_per_item, max_items = data.draw(st.sampled_from([1, 3, 8])), data.draw(st.integers(1, 12))
    prefixes = data.draw(st.lists(st.lists(st.integers(1, 3), max_size=9), min_size=1, max_size=3))
    rows = []
    for i in range(data.draw(st.integers(1, 30))):
        prefix = data.draw(st.sampled_from(prefixes))
        # A block's id names its content and all before it, as in the cache.
        path = [1 + hash(tuple(prefix[: n + 1])) % 10**6 for n in range(data.draw(st.integers(0, len(prefix))))]
        rows.append([*path, 10**7 + i])
    tables, full = tables_of(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "_MIN_SAVED_TOKENS", 1)
        patch.setattr(shared_prefix, "_MIN_SPLIT_KEYS", 32)
        work = plan_cascade_groups(tables, full, BLOCK_SIZE, max_items, rows_per_item)
    groups = list(find_groups(tables, full))
    if work is None:
        assert all(-(-len(group.members) // rows_per_item) > max_items or not group.saved_blocks for group in groups)
        return
    items, members, row_work = work
    assert items.shape == (max_items, 4)
    keys: dict[int, list[int]] = {row: [] for row in range(len(rows))}
    for item, (first, count, first_key, num_keys) in enumerate(items):
        assert count <= rows_per_item
        for local, row in enumerate(members[first : first + count]):
            # The place where the row finds it.
            split, rest = divmod(item * rows_per_item + local - row_work[1, row], rows_per_item)
            assert rest == 0 and 0 <= split < row_work[2, row]
            keys[int(row)] += range(first_key, first_key + num_keys)
            shared = (first_key + num_keys + BLOCK_SIZE - 1) // BLOCK_SIZE
            assert (tables[row, :shared] == tables[members[first], :shared]).all() and shared <= full[row]
    for row, attended in keys.items():
        assert attended == list(range(row_work[0, row]))


def test_too_little_to_save_is_left_alone() -> None:
    tables, full = tables_of([[1, 2, 3, 10 + i] for i in range(4)])
    assert plan_cascade_groups(tables, full, BLOCK_SIZE, 8, 4) is None
    assert plan_cascade_groups(tables, full, 4096, 8, 4) is not None


def test_a_plan_is_made_again_when_rows_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "_MIN_SAVED_TOKENS", 1)
    tables = np.array([[1, 2, 10 + slot, 0] for slot in range(6)], dtype=np.int32)
    tables[5, 0] = 9
    slots = np.full(6, 2 * BLOCK_SIZE + 3, dtype=np.int32), tables
    planner = CascadePlanner(6, BLOCK_SIZE, 4, 2, torch.device("cpu"))
    assert planner.plan(slot_rows(*[5]).slots, *slots) is None and not len(planner.packed)
    none = np.empty(0, dtype=np.int32)
    assert planner.plan(none, none, none.reshape(0, 0)) is None
    lens = planner.plan(slot_rows(*[0, 3, 5]).slots, *slots)
    assert lens is not None and lens.tolist() == [32, 32, 0]
    packed = planner.packed
    planner.buffer.copy_(torch.from_numpy(packed))
    assert planner.groups.rows[0].tolist() == [32, 32, 0, 0, 0, 0]
    assert planner.groups.items[0].tolist() == [0, 2, 0, 32] and not planner.groups.items[1:].any()
    # The same object, which is not sent again.
    assert planner.plan(slot_rows(*[0, 3, 5]).slots, *slots) is not None and planner.packed is packed
    # Alone, a row has nothing to share.
    assert planner.plan(slot_rows(*[0]).slots, *slots) is None and not len(planner.packed)
