"""The cache's blocks as they are now, for those who want to see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nanovllm.engine.block_manager import BlockManager


@dataclass(frozen=True)
class BlockUsage:
    """The blocks of a KV cache, in cells of neighbouring ones.

    Attributes:
        block_size: tokens in a block.
        num_blocks: blocks in the cache.
        blocks_per_cell: blocks in each cell but the last, which may have fewer.
        used: how many of each cell's blocks are in use.
        cached: how many hold a part of a prefix that can be found again, in use or not.
        users: the most sequences that use one of them.
        hits: how often one of them was found in the prefix cache, since the engine began.
    """

    block_size: int
    num_blocks: int
    blocks_per_cell: int
    used: list[int]
    cached: list[int]
    users: list[int]
    hits: list[int]


def block_usage(manager: BlockManager, most_cells: int) -> BlockUsage:
    """Return the state of a cache in at most `most_cells` cells.

    Any thread may call it: it only reads, so that blocks of one answer may be of two moments.
    """
    blocks, size = manager.blocks, -(-manager.num_blocks // most_cells)
    starts = np.arange(0, manager.num_blocks, size)

    def cells(values: Iterable[int], reduceat: Callable[..., np.ndarray] = np.add.reduceat) -> list[int]:
        return reduceat(np.fromiter(values, np.int64, len(blocks)), starts).tolist()

    return BlockUsage(
        manager.block_size,
        manager.num_blocks,
        size,
        used=cells(block.ref_count > 0 for block in blocks),
        cached=cells(block.key is not None for block in blocks),
        users=cells((block.ref_count for block in blocks), np.maximum.reduceat),
        hits=cells(block.num_hits for block in blocks),
    )


def joined_usage(usages: Sequence[BlockUsage]) -> BlockUsage:
    """Return the blocks of several engines' caches of about one size, one after the other."""
    first = usages[0]
    cells = {
        name: [n for usage in usages for n in getattr(usage, name)] for name in ("used", "cached", "users", "hits")
    }
    return BlockUsage(first.block_size, sum(usage.num_blocks for usage in usages), first.blocks_per_cell, **cells)
