"""Blocks of the prefix cache in host memory: their slots, and the number that a step saves and loads.

A copy has its block's key, so that blocks are found wherever they are. It may outlive the block on the device, or be
dropped before it. Correctness follows from the order of transfers: a step's loads come before its
saves, and a later step's after both.

Deals in slots and keys only, and knows nothing of the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable

from nanovllm.engine.prefix_cache import Block, BlockKey, HostBlock
from nanovllm.runner.messages import BlockTransfer, HostMemory

_STEP_BYTES = 2**28
"""Bytes of each rank that a step may always save, and after whose loading it admits no other prompt that loads: 5 ms at
50 GB/s.
"""


class HostCache:
    """Copies of blocks, least recently used first."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._copies: OrderedDict[BlockKey, HostBlock] = OrderedDict()
        self._num_used_slots = 0
        self._free_slots: list[int] = []
        # Blocks so far; the lost ones were evicted before they were saved.
        self.num_saved = self.num_loaded = self.num_lost = 0

    def lacks(self, block: Block) -> bool:
        """Whether a block that others can find much later has no copy."""
        return block.key is not None and block.key not in self._copies and block.is_lasting

    def counters(self) -> dict[str, int]:
        """Return counts so far, and the blocks held now."""
        return {
            "num_saved_blocks": self.num_saved,
            "num_loaded_blocks": self.num_loaded,
            "num_lost_blocks": self.num_lost,
            "num_host_blocks": len(self._copies),
        }

    def note_loads(self, copies: list[HostBlock]) -> None:
        """Count the loads of a prefix, and make its copies the most recently used, its head last."""
        for copy in reversed(copies):
            self.touch(copy.key)
        self.num_loaded += len(copies)

    def is_enough(self, num_blocks: int) -> bool:
        """Whether a step that loads this number of blocks should admit no other prompt that loads."""
        return num_blocks * self._memory.block_bytes >= _STEP_BYTES

    def find(self, key: BlockKey) -> HostBlock | None:
        """Return the copy of a block."""
        return self._copies.get(key)

    def find_all(self, keys: Iterable[BlockKey]) -> list[HostBlock]:
        """Return the copies of a state's blocks; none unless all have one."""
        copies = [self._copies.get(key) for key in keys]
        return [] if None in copies else [copy for copy in copies if copy is not None]

    def touch(self, key: BlockKey) -> None:
        """Make a block's copy, if it has one, the most recently used."""
        if key in self._copies:
            self._copies.move_to_end(key)

    def spend(self, key: BlockKey) -> None:
        """Drop a block's copy, if it has one, before all others."""
        if key in self._copies:
            self._copies.move_to_end(key, last=False)

    def plan_saves(self, blocks: Iterable[Block], unconfirmed: Container[int], num_taken: int) -> list[BlockTransfer]:
        """Give slots to blocks without a copy, so that no eviction has to wait, and return the transfers.

        Args:
            blocks: the next to be overwritten, in that order.
            unconfirmed: ids of blocks whose content is not computed yet.
            num_taken: free blocks that the step takes.
        """
        saves: list[BlockTransfer] = []
        # Results queue after saves on the link, and the next step waits for them; but saves overtake evictions.
        most = min(self._memory.num_slots, max(1, _STEP_BYTES // self._memory.block_bytes, 2 * num_taken))
        for block in blocks:
            if block.key is None or not self.lacks(block) or block.block_id in unconfirmed:
                continue
            if (slot := self._take_slot()) is None:
                break
            self._copies[block.key] = HostBlock(block.key, slot, block.is_decoded, block.num_uses)
            saves.append(BlockTransfer("save", block.block_id, slot))
            if len(saves) == most:
                break
        self.num_saved += len(saves)
        return saves

    def _take_slot(self) -> int | None:
        """Return a free slot, or the slot of the least recently used copy; None if memory is still being allocated."""
        if self._free_slots:
            return self._free_slots.pop()
        if self._num_used_slots < self._memory.num_ready_slots():
            self._num_used_slots += 1
            return self._num_used_slots - 1
        if not self._copies or not self._memory.has_all_slots():
            return None
        _, oldest = self._copies.popitem(last=False)
        return oldest.slot

    def clear(self) -> None:
        """Drop all copies, including any in flight, and ask again which slots have memory."""
        self._copies.clear()
        self._free_slots.clear()
        self._num_used_slots = 0

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Drop the copies of blocks whose saves have failed, unless they are dropped already."""
        for key in keys:
            if (copy := self._copies.pop(key, None)) is not None:
                self._free_slots.append(copy.slot)
