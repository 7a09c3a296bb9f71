"""Snapshot of the cache's blocks for display."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nanovllm.engine.block_manager import BlockManager


@dataclass(frozen=True)
class BlockUsage:
    """The blocks of a KV cache, in cells of adjacent blocks.

    Attributes:
        block_size: tokens in a block.
        num_blocks: blocks in the cache.
        blocks_per_cell: blocks in each cell but the last, which may have fewer.
        used: blocks in use, per cell.
        cached: blocks that hold part of a findable prefix, in use or not, per cell.
        users: the most sequences that share a block, per cell.
        hits: prefix-cache hits since the engine began, per cell.
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

    Any thread may call it: it only reads, so one answer may mix two moments.
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
    """Return the blocks of several engines' caches of about one size, concatenated."""
    first = usages[0]
    cells = {
        name: [n for usage in usages for n in getattr(usage, name)] for name in ("used", "cached", "users", "hits")
    }
    return BlockUsage(first.block_size, sum(usage.num_blocks for usage in usages), first.blocks_per_cell, **cells)
