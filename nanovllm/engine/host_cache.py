"""Blocks of the prefix cache in the host's memory: which slot holds what, what is saved there, and what is loaded.

A copy has its block's key and identity, so that one chain finds blocks wherever they are. It may outlive the block on
the device, or be dropped before it. The order of transfers makes it right: a step's loads come before its saves, and a
later step's after both.

Knows nothing of the device: slots and keys are all that it deals in.
"""

from __future__ import annotations

import math
import time
import typing
from collections import OrderedDict, deque
from collections.abc import Container, Iterable
from dataclasses import dataclass

from nanovllm.engine.prefix_cache import Block, BlockKey
from nanovllm.engine.sequence import Sequence
from nanovllm.runner.messages import BlockTransfer, HostMemory

_SAVES_SHARE = 0.9
"""How much of a step with prompts its saves may take: its results wait on the link for them, and the next step for the
results."""


@dataclass(frozen=True)
class HostBlock:
    """A copy: the slot that it is in, and the identity of the block."""

    slot: int
    identity: int


class BlockLoads:
    """Transfers into device blocks that the step being planned performs, by destination block."""

    def __init__(self) -> None:
        self._transfers: dict[int, BlockTransfer] = {}

    def __bool__(self) -> bool:
        return bool(self._transfers)

    def add(self, slots: typing.Sequence[int], block_ids: typing.Sequence[int]) -> None:
        """Load blocks from host slots."""
        for slot, block_id in zip(slots, block_ids, strict=True):
            self._transfers[block_id] = BlockTransfer("load", slot, block_id)

    def take(self) -> list[BlockTransfer]:
        """Return and remove the pending loads."""
        loads, self._transfers = list(self._transfers.values()), {}
        return loads

    def has_blocks_of(self, seq: Sequence) -> bool:
        """Return whether loads into a sequence's blocks are pending."""
        return bool(self._transfers) and not self._transfers.keys().isdisjoint(seq.block_tables[0])

    def clear(self) -> None:
        """Drop all pending loads."""
        self._transfers.clear()


class HostCache:
    """Copies of blocks, least recently used first.

    Args:
        memory: has the slots.
        block_size: tokens of a block.

    Attributes:
        num_saved, num_loaded: blocks so far.
        num_lost: blocks that were evicted before they were saved.
    """

    def __init__(self, memory: HostMemory, block_size: int) -> None:
        self._memory = memory
        self._block_size = block_size
        self._copies: OrderedDict[BlockKey, HostBlock] = OrderedDict()
        self._num_used_slots = 0
        self._free_slots: list[int] = []
        # Keys saved by the steps whose results are not back yet, oldest step first.
        self._unconfirmed: deque[list[BlockKey]] = deque()
        # When the link ends all copies planned so far, and the loads among them; when it would end the saves without
        # the loads.
        self._link_free_at = self._loaded_at = self._saved_at = 0.0
        # When the device ends computing the blocks that were not worth loading.
        self._computed_at = 0.0
        # When the step before was planned.
        self._planned_at = 0.0
        self.num_saved = self.num_loaded = self.num_lost = 0

    def lacks(self, block: Block) -> bool:
        """Whether a block that others can find has no copy."""
        return block.key is not None and block.key not in self._copies

    def counters(self) -> dict[str, int]:
        """Return counts so far, the blocks held now, and the rates that were measured."""
        return {
            "num_saved_blocks": self.num_saved,
            "num_loaded_blocks": self.num_loaded,
            "num_lost_blocks": self.num_lost,
            "num_host_blocks": len(self._copies),
            "host_bytes_per_second": round(self._memory.bytes_per_second),
            "prefill_tokens_per_second": round(self._memory.tokens_per_second),
        }

    def fetch(self, seq: Sequence, first: int, end: int) -> typing.Sequence[int]:
        """Return the slots of a sequence's blocks from `first` on, up to `end`, if loading them is faster."""
        copies = self._copies_of(seq, seq.block_tables[0].registered_identity, first, end)
        if not self._pays(len(copies)):
            _, self._computed_at = self._done_at(len(copies))
            return ()
        self._loaded_at, _ = self._done_at(len(copies))
        self._link_free_at = self._loaded_at
        # The tail of a prefix is dropped before its head, without which it cannot be found.
        for key in reversed(copies):
            self.touch(key)
        self.num_loaded += len(copies)
        return [copy.slot for copy in copies.values()]

    def would_load(self, seq: Sequence, parent: int, first: int, end: int) -> bool:
        """Whether `fetch` would load something; `parent` is the identity of the block before `first`."""
        copies = self._copies_of(seq, parent, first, end)
        return self._pays(len(copies))

    def _copies_of(self, seq: Sequence, parent: int, first: int, end: int) -> dict[BlockKey, HostBlock]:
        copies: dict[BlockKey, HostBlock] = {}
        for i in range(first, end):
            tokens = seq.token_ids[i * self._block_size : (i + 1) * self._block_size].tobytes()
            key = parent, tokens, b"" if i else seq.request.cache_extra
            copy = self._copies.get(key)
            if copy is None:
                break
            copies[key] = copy
            parent = copy.identity
        return copies

    def _pays(self, num_blocks: int) -> bool:
        """Whether to load blocks, if any: the link has them no later than the device would have computed them."""
        loaded_at, computed_at = self._done_at(num_blocks)
        return num_blocks > 0 and loaded_at <= computed_at + self._memory.step_seconds

    def _done_at(self, num_blocks: int) -> tuple[float, float]:
        """Return when the link will have loaded blocks, or the device will have computed them, after all before."""
        now, memory = time.monotonic(), self._memory
        loaded_at = max(now, self._link_free_at) + num_blocks * memory.block_bytes / memory.bytes_per_second
        return loaded_at, max(now, self._computed_at) + num_blocks * self._block_size / memory.tokens_per_second

    def is_link_busy(self) -> bool:
        """Whether the link has more to copy than it can in a small step."""
        return self._link_free_at > time.monotonic() + self._memory.step_seconds

    def identity(self, key: BlockKey) -> int | None:
        """Return the identity by which others follow a block that has a copy."""
        copy = self._copies.get(key)
        return None if copy is None else copy.identity

    def touch(self, key: BlockKey) -> None:
        """Make a block's copy, if it has one, the most recently used."""
        if key in self._copies:
            self._copies.move_to_end(key)

    def plan_saves(
        self, blocks: Iterable[Block], unconfirmed: Container[int], num_prompt_tokens: int
    ) -> list[BlockTransfer]:
        """Give slots to blocks without a copy, so that no eviction has to wait, and return how they get there.

        Args:
            blocks: the next to be overwritten, first ones first.
            unconfirmed: those of them, by id, whose content is not computed yet.
            num_prompt_tokens: of the step that saves them.
        """
        saves: list[BlockTransfer] = []
        most = self._most_saves(num_prompt_tokens)
        for block in blocks if most else ():
            if block.key is None or block.key in self._copies or block.block_id in unconfirmed:
                continue
            slot = self._take_slot()
            if slot is None:
                break
            self._copies[block.key] = HostBlock(slot, block.identity)
            self._unconfirmed[-1].append(block.key)
            saves.append(BlockTransfer("save", block.block_id, slot))
            if len(saves) == most:
                break
        self.num_saved += len(saves)
        now, seconds = time.monotonic(), len(saves) * self._memory.block_bytes / self._memory.bytes_per_second
        self._planned_at = now
        self._link_free_at = max(now, self._link_free_at) + seconds
        self._saved_at = max(now, self._saved_at) + seconds
        return saves

    def _most_saves(self, num_prompt_tokens: int) -> int:
        """Return how many saves the link can begin during a step with so many prompt tokens.

        The step's time is estimated: its prompts by the measured rate, or its wait for loads, and at most the time of
        the step before, since many prompts are computed faster than the one that was measured. Loads take no saves
        away: a lost block is computed again, which takes longer than to save it.
        """
        now, memory = time.monotonic(), self._memory
        expected = max(num_prompt_tokens / memory.tokens_per_second, self._loaded_at - now)
        seconds = _SAVES_SHARE * min(expected, now - self._planned_at)
        left = now + max(seconds, memory.step_seconds) - max(now, self._saved_at)
        most = math.ceil(left * memory.bytes_per_second / memory.block_bytes)
        return min(memory.num_slots, max(0, most))

    def _take_slot(self) -> int | None:
        """Return a slot, that of the least recently used copy if all are taken; None if one must be waited for."""
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
        """Forget all copies, those that are being made as well; which slots have memory is asked again."""
        self._copies.clear()
        self._free_slots.clear()
        self._num_used_slots = 0
        for saved in self._unconfirmed:
            saved.clear()

    def begin_step(self) -> None:
        """Begin a step: what is saved from now on is confirmed, or rolled back, with its result."""
        self._unconfirmed.append([])

    def cancel_step(self) -> None:
        """Undo `begin_step`, since the step turned out to be empty."""
        saved = self._unconfirmed.pop()
        assert not saved

    def confirm_step(self) -> None:
        """Confirm what the oldest step without a result was to save."""
        self._unconfirmed.popleft()

    def rollback(self) -> None:
        """Drop what steps without a result were to save."""
        for key in (key for step in self._unconfirmed for key in step):
            # It may have been dropped since, and its slot given to another.
            copy = self._copies.pop(key, None)
            if copy is not None:
                self._free_slots.append(copy.slot)
        self._unconfirmed.clear()

    def check_integrity(self, identities: dict[BlockKey, int]) -> None:
        """Assert that each slot is free or holds one block, given the identities of cached blocks; for tests."""
        slots = self._free_slots + [copy.slot for copy in self._copies.values()]
        assert sorted(slots) == list(range(self._num_used_slots)), "a slot is lost, or holds two blocks"
        for key, copy in self._copies.items():
            assert identities.get(key, copy.identity) == copy.identity, "a block has two identities"
