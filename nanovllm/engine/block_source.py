"""Blocks that others have computed: where they come from, and what the step being planned loads of them."""

from __future__ import annotations

import typing
from typing import Protocol

from nanovllm.engine.sequence import Sequence
from nanovllm.runner.messages import BlockTransfer


class BlockSource(Protocol):
    """Has blocks that the device's cache does not have, and can bring them into the host's memory."""

    def fetch(self, seq: Sequence, first: int, end: int) -> typing.Sequence[int]:
        """Return the host slots of a sequence's blocks from `first` on, as many as there are, up to `end`.

        The next step loads them from there. There is one block table; its `registered_identity` is
        that of the block before `first`.
        """


class BlockLoads:
    """What the step being planned must load, by the block that it loads into."""

    def __init__(self) -> None:
        self._transfers: dict[int, BlockTransfer] = {}

    def __bool__(self) -> bool:
        return bool(self._transfers)

    def add(self, slots: typing.Sequence[int], block_ids: typing.Sequence[int]) -> None:
        """Load blocks from the host slots that have them."""
        for slot, block_id in zip(slots, block_ids, strict=True):
            self._transfers[block_id] = BlockTransfer("load", slot, block_id)

    def take(self) -> list[BlockTransfer]:
        """Return, once, what is to be loaded."""
        loads, self._transfers = list(self._transfers.values()), {}
        return loads

    def has_blocks_of(self, seq: Sequence) -> bool:
        """Whether a sequence needs blocks that are to be loaded, and that were not taken yet."""
        return bool(self._transfers) and not self._transfers.keys().isdisjoint(seq.block_tables[0])

    def clear(self) -> None:
        """Load nothing of all that."""
        self._transfers.clear()
