"""Plans cascade attention: finds decode rows that share a prefix, to attend to it once for all of them.

Rows share the common prefix of their block tables, whose blocks the prefix cache gave them. Groups change only with the
members of a batch, as shared blocks are full and stay. The result is a `CascadeGroups` of
`kernels/attention/cascade_attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.attention.backend import NOTHING
from nanovllm.kernels.attention.cascade_attention import CascadeGroups

_MIN_SAVED_TOKENS = 8192
"""Keys that must not be read again for the work to pay."""
_MIN_SPLIT_KEYS = 256
"""Fewest keys of an item, unless the prefix has no more."""


class PrefixGroup(NamedTuple):
    """Rows that share `num_blocks` blocks; `saved_blocks` is what reading them once saves."""

    members: np.ndarray
    num_blocks: int
    saved_blocks: int


def find_groups(tables: np.ndarray, num_full_blocks: np.ndarray) -> Iterator[PrefixGroup]:
    """Group rows by their first block, each group cut to the depth, and the members, that save most.

    Depth is measured against one row, the best of the first, the middle and the last, so that one row that diverges
    early does not shorten the prefix for all. tables: [num_rows, max_blocks] int32; num_full_blocks: [num_rows], blocks
    that can be shared.
    """
    rows = np.flatnonzero(num_full_blocks)
    _, names, counts = np.unique(tables[rows, 0], return_inverse=True, return_counts=True)
    for name in np.flatnonzero(counts > 1):
        members = rows[names == name]
        full = num_full_blocks[members]
        blocks = tables[members, : full.max()]
        groups = [_cut(members, full, blocks, row) for row in (0, len(members) // 2, -1)]
        yield max(groups, key=lambda group: group.saved_blocks)


def _cut(members: np.ndarray, full: np.ndarray, blocks: np.ndarray, row: int) -> PrefixGroup:
    """Return the members and the depth that save the most reads of blocks shared with `row`."""
    same = blocks == blocks[row]
    matched = np.where(same.all(axis=1), blocks.shape[1], same.argmin(axis=1))
    matched = np.minimum(matched, np.minimum(full, full[row]))
    # With the k deepest members, depths[k - 1] blocks are read once instead of k times.
    depths = np.sort(matched)[::-1]
    saved = depths * np.arange(len(depths))
    best = int(saved.argmax())
    return PrefixGroup(members[matched >= depths[best]], int(depths[best]), int(saved[best]))


def plan_cascade_groups(
    tables: np.ndarray, num_full_blocks: np.ndarray, block_size: int, max_items: int, rows_per_item: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Divide the work on common prefixes into items; None if it saves too little.

    tables, num_full_blocks: see `find_groups`. Returns the arrays of `CascadeGroups`, int32: items, [max_items, 4], of
    first member, members, first key and keys; members, [num_rows]; rows, [3, num_rows], of shared tokens, first output
    and outputs.
    """
    num_rows = len(tables)
    if not num_rows:
        return None
    groups: list[PrefixGroup] = []
    num_tiles = 0
    for group in sorted(find_groups(tables, num_full_blocks), key=lambda group: -group.saved_blocks):
        tiles = -(-len(group.members) // rows_per_item)
        if num_tiles + tiles <= max_items:
            groups.append(group)
            num_tiles += tiles
    if sum(group.saved_blocks for group in groups) * block_size < _MIN_SAVED_TOKENS:
        return None
    items = np.zeros((max_items, 4), dtype=np.int32)
    members = np.zeros(num_rows, dtype=np.int32)
    rows = np.zeros((3, num_rows), dtype=np.int32)
    item = placed = 0
    for group in groups:
        num_keys = group.num_blocks * block_size
        num_splits = min(max_items // num_tiles, -(-num_keys // _MIN_SPLIT_KEYS))
        # A whole number of blocks each, but for the last.
        split_keys = -(-group.num_blocks // num_splits) * block_size
        num_splits = -(-num_keys // split_keys)
        for start in range(0, len(group.members), rows_per_item):
            tile = group.members[start : start + rows_per_item]
            members[placed : placed + len(tile)] = tile
            rows[0, tile] = num_keys
            rows[1, tile] = item * rows_per_item + np.arange(len(tile))
            rows[2, tile] = num_splits
            for first_key in range(0, num_keys, split_keys):
                items[item] = placed, len(tile), first_key, min(split_keys, num_keys - first_key)
                item += 1
            placed += len(tile)
    return items, members, rows


class CascadePlanner:
    """Plans the work of each step, again when the decoding sequences change.

    num_slots: most decode rows; max_items, rows_per_item: most items of `CascadeGroups`, 0 for none, and rows of one.

    Attributes:
        packed: [n] int32; the plan of the last step that `plan` was called for.
        buffer, groups: where `packed` is on the device, and views of that.
    """

    def __init__(
        self, num_slots: int, block_size: int, max_items: int, rows_per_item: int, device: torch.device
    ) -> None:
        self.num_slots, self.block_size = num_slots, block_size
        self.max_items, self.rows_per_item = max_items, rows_per_item
        lengths = [4 * max_items, num_slots, 3 * num_slots]
        self.buffer = torch.zeros(sum(lengths), dtype=torch.int32, device=device)
        items, members, rows = self.buffer.split(lengths)
        self.groups = CascadeGroups(items.view(-1, 4), members, rows.view(3, num_slots))
        self.packed = NOTHING
        self._shared_lens: np.ndarray | None = None
        self._planned_slots = NOTHING

    def plan(self, decode_slots: np.ndarray, num_computed: np.ndarray, block_tables: np.ndarray) -> np.ndarray | None:
        """Plan the step of these rows; returns the length of each row's shared prefix, [num_rows], or None.

        num_computed and block_tables are all slots', on the host.
        """
        if self.max_items and not np.array_equal(decode_slots, self._planned_slots):
            self._planned_slots = decode_slots
            full, tables = num_computed[decode_slots] // self.block_size, block_tables[decode_slots]
            work = plan_cascade_groups(tables, full, self.block_size, self.max_items, self.rows_per_item)
            self.packed, self._shared_lens = NOTHING, None
            if work is not None:
                items, members, rows = work
                padding = self.num_slots - len(members)
                padded = np.pad(members, (0, padding)), np.pad(rows, ((0, 0), (0, padding)))
                self.packed = np.concatenate([array.reshape(-1) for array in (items, *padded)])
                self._shared_lens = rows[0]
        return self._shared_lens
