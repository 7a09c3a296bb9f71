"""Finds blocks of the KV cache by the hash of the prefix that they end.

The hash of a prefix of whole blocks is over the hash of all blocks but the last, and the last one's tokens (SHA-256, as
in vLLM), so that equal hashes are equal prefixes. The first block continues the hash of what else its content depends
on, the request's salt. A prefix has a block in each group of layers whose caches grow, and maybe the state of recurrent
layers at its end, in several blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from typing import Literal

BlockKind = Literal["keys", "state", "inner"]
"""Keys and values; a part of a state; a part of a state within a block, from which outputs of one request continue."""
BlockKey = tuple[bytes, BlockKind, int]
"""Hash of the prefix, kind, and number of the group (of keys) or of the part (of a state)."""
SPENT, SPARE, USUAL, OFTEN_USED = range(4)
"""Ranks of blocks' contents, first evicted first: replaced by a later state; a state of decoding, not used yet; by its
last use; the same, but later.
"""
_OFTEN_USED_TIMES = 4
"""Content that is often used is evicted after this many times as long without a use."""


@dataclass(slots=True, eq=False)
class Block:
    """One page of the cache. While it is in the prefix cache, `key` describes its content."""

    block_id: int
    ref_count: int = 0
    key: BlockKey | None = None
    # Prefix-cache hits, whatever the content was.
    num_hits: int = 0
    # Of the content: how soon it is evicted, the sequences that started from it, whether it is of a state of decoding.
    rank: int = USUAL
    num_uses: int = 0
    is_decoded: bool = False

    @property
    def is_state(self) -> bool:
        """Whether it is cached as a part of a state."""
        return self.key is not None and self.key[1] != "keys"

    @property
    def is_lasting(self) -> bool:
        """Whether later requests may find it: not if replaced, nor if a state within a block, for one request."""
        return self.rank >= USUAL and (self.key is None or self.key[1] != "inner")


@dataclass(slots=True)
class HostBlock:
    """A copy of a block in host memory: its slot, and `Block`'s attributes of its content."""

    key: BlockKey
    slot: int
    is_decoded: bool = False
    num_uses: int = 0

    @property
    def ref_count(self) -> int:
        """Tables that have it: none."""
        return 0


FoundBlock = Block | HostBlock


class BlockTable(list[int]):
    """Block ids of a sequence in one group of layers, by their index in the sequence."""

    __slots__ = ("num_released",)

    def __init__(self, block_ids: Iterable[int], num_released: int = 0) -> None:
        super().__init__(block_ids)
        # Leading entries that are void, since the sequence has released the blocks.
        self.num_released = num_released

    @property
    def held(self) -> list[int]:
        """The blocks that the sequence has."""
        return self[self.num_released :]


class FreeBlocks:
    """Free blocks, next one first: empty ones, then by rank, then least recently used; O(1) per operation."""

    def __init__(self, block_ids: Iterable[int]) -> None:
        # By rank; an OrderedDict is a queue with O(1) removal from the middle. The values are times, in additions.
        self._queues: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(4)]
        self._queues[SPENT] = OrderedDict.fromkeys(block_ids, 0)
        self._now = 0

    def __len__(self) -> int:
        spent, spare, usual, often = self._queues
        return len(spent) + len(spare) + len(usual) + len(often)

    def __contains__(self, block_id: int) -> bool:
        return any(block_id in queue for queue in self._queues)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._queues)

    @property
    def num_spare(self) -> int:
        """Number of blocks that hold nothing, or are evicted first."""
        return len(self._queues[SPENT]) + len(self._queues[SPARE])

    def add(self, block: Block) -> None:
        """Add a block, used until now."""
        self._now += 1
        rank = SPENT if block.key is None else block.rank
        self._queues[rank][block.block_id] = self._now
        if rank == SPENT:
            self._queues[rank].move_to_end(block.block_id, last=False)

    def remove(self, block_id: int) -> None:
        """Remove a block, if present."""
        for queue in self._queues:
            queue.pop(block_id, None)

    def move(self, block: Block) -> None:
        """Move a free block to where its rank, and a use at this moment, put it."""
        self.remove(block.block_id)
        self.add(block)

    def pop(self) -> int:
        """Remove and return the next one."""
        spent, spare, usual, often = self._queues
        queue = spent or spare or usual or often
        if often and queue is usual:
            age, other = (self._now - next(iter(times.values())) for times in (usual, often))
            queue = often if other > _OFTEN_USED_TIMES * age else usual
        return queue.popitem(last=False)[0]


class PrefixCache:
    """Finds blocks by their keys, in use or not; counts those that hold states, and its resets."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, Block] = {}
        self.num_state_blocks = self.num_resets = 0

    def match(
        self, hashes: Iterable[bytes], group: int, has_gaps: bool,
        find_copy: Callable[[BlockKey], HostBlock | None] | None = None,
    ) -> list[FoundBlock | None]:  # fmt: skip
        """Return the blocks of a prefix in a group, else copies of `find_copy`, up to the last one found.

        hashes: of its first block, its first two blocks, and so on. With `has_gaps` None stands for a block that is
        missing before others; otherwise the first missing one ends the prefix.
        """
        matched: list[FoundBlock | None] = []
        for block_hash in hashes:
            key: BlockKey = block_hash, "keys", group
            block: FoundBlock | None = self.blocks.get(key)
            if block is None and find_copy is not None:
                block = find_copy(key)
            if block is None and not has_gaps:
                break
            matched.append(block)
        while matched and matched[-1] is None:
            matched.pop()
        return matched

    def add(self, block: Block, key: BlockKey) -> None:
        """Make a block findable by a key."""
        assert block.key is None and key not in self.blocks
        block.key, block.rank, block.num_uses, block.is_decoded = key, USUAL, 0, False
        self.num_state_blocks += block.is_state
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Remove a block, if present."""
        if block.key is not None:
            del self.blocks[block.key]
            self.num_state_blocks -= block.is_state
            block.key = None

    def reset(self) -> None:
        """Forget all blocks."""
        self.num_resets += 1
        for block in list(self.blocks.values()):
            self.remove(block)


def next_hash(parent: bytes, token_ids: array[int]) -> bytes:
    """Return the hash of a prefix, given the hash of its beginning and the tokens that follow."""
    return sha256(parent + token_ids.tobytes()).digest()
