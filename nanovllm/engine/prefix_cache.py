"""Finds blocks of the KV cache by their content.

A block's key is the *identity* of its parent block, its own tokens as bytes, and whatever else its content depends on
(`extra`: the request's salt, for a first block). Identities are serial numbers that are never reused, so equal keys are
equal prefixes (vLLM hashes both instead). The first block's parent is a *root*, a different one for each group of
layers, and after each reset.

The state of a recurrent layer at a block's end also has a key: the block's identity, no tokens, and `extra` with the
numbers of its group and its block.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count

BlockKey = tuple[int, bytes, bytes]
"""Parent's identity, tokens, extra. A dict compares keys after their hashes."""
ROOT_IDENTITY = 0
"""Parent identity of first blocks; see `PrefixCache.root`."""
SPENT, SPARE, USUAL, OFTEN_USED = range(4)
"""Ranks of blocks' contents, first evicted first: replaced by a later state; a state of decoding, not used yet; by its
last use; the same, but later.
"""
_OFTEN_USED_TIMES = 4
"""Content that is often used is evicted after this many times as long without a use."""


@dataclass(slots=True, eq=False)
class Block:
    """One page of the cache. While it is in the prefix cache, `key` and `identity` describe its content."""

    block_id: int
    ref_count: int = 0
    key: BlockKey | None = None
    identity: int = ROOT_IDENTITY
    # Prefix-cache hits, whatever the content was.
    num_hits: int = 0
    # Of the content: how soon it is evicted, the sequences that started from it, whether it is part of a state, and of
    # one kept in decoding.
    rank: int = USUAL
    num_uses: int = 0
    is_state: bool = False
    is_decoded: bool = False

    @property
    def is_lasting(self) -> bool:
        """Whether later requests may find it: not if replaced, nor if a state within a block, for one request."""
        return self.rank >= USUAL and not (self.is_state and self.key is not None and self.key[1])


@dataclass(slots=True)
class HostBlock:
    """A copy of a block in host memory: its slot, and `Block`'s attributes of its content."""

    key: BlockKey
    slot: int
    identity: int
    is_decoded: bool = False
    num_uses: int = 0

    @property
    def ref_count(self) -> int:
        """Tables that have it: none."""
        return 0


FoundBlock = Block | HostBlock


class BlockTable(list[int]):
    """Block ids of a sequence in one group of layers, by their index in the sequence."""

    __slots__ = ("num_released", "registered_identity")

    def __init__(self, block_ids: Iterable[int], num_released: int, registered_identity: int) -> None:
        super().__init__(block_ids)
        # Leading entries that are void, since the sequence has released the blocks.
        self.num_released = num_released
        # Identity of the block at the end of `Sequence.num_registered_blocks`.
        self.registered_identity = registered_identity

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


class EvictedPrefixes:
    """Keys and identities of evicted blocks that cached blocks still follow; O(1) per block.

    A cached block is found by the identity of its parent. Where layers have sliding windows, the head of a prefix is
    freed, and evicted, before its tail, although the tail is all that a sequence with this prefix needs.
    """

    def __init__(self) -> None:
        self._identities: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        # Number of cached and evicted blocks that directly follow each identity.
        self._num_children: Counter[int] = Counter()

    def find(self, key: BlockKey) -> int | None:
        """Return the identity of an evicted block."""
        return self._identities.get(key)

    def on_registered(self, key: BlockKey) -> int | None:
        """Record that a block is cached; return its existing identity if children still refer to it."""
        identity = self._identities.pop(key, None)
        if identity is None:
            self._num_children[key[0]] += 1
        else:
            del self._keys[identity]
        return identity

    def on_evicted(self, key: BlockKey, identity: int) -> None:
        """Record that a block is evicted; forget it and its ancestors if no cached block follows."""
        self._identities[key], self._keys[identity] = identity, key
        last = identity
        while not self._num_children[last] and last in self._keys:
            key = self._keys.pop(last)
            del self._identities[key]
            last = key[0]
            self._num_children[last] -= 1
            if not self._num_children[last]:
                del self._num_children[last]


class PrefixCache:
    """Finds blocks by their keys, in use or not; counts those that hold states, and its resets."""

    def __init__(self, block_size: int, num_groups: int, has_gaps: bool) -> None:
        self._block_size, self._num_groups = block_size, num_groups
        self.blocks: dict[BlockKey, Block] = {}
        self.num_state_blocks = self.num_resets = 0
        self._identities = count(ROOT_IDENTITY + 1)
        self._evicted = EvictedPrefixes() if has_gaps else None

    def root(self, num_resets: int, group: int) -> int:
        """Return the parent identity of first blocks."""
        return ROOT_IDENTITY - (num_resets * self._num_groups + group)

    def block_tokens(self, token_ids: array[int], index: int) -> bytes:
        """Return the tokens of a sequence's block."""
        return token_ids[index * self._block_size : (index + 1) * self._block_size].tobytes()

    def match(
        self, root: int, token_ids: array[int], extra: bytes, most: int,
        find_copy: Callable[[BlockKey], HostBlock | None] | None = None,
    ) -> list[FoundBlock | None]:  # fmt: skip
        """Return leading blocks of a prefix, else copies of `find_copy`; None for evicted ones ahead of cached ones."""
        matched: list[FoundBlock | None] = []
        identity = root
        for i in range(most):
            key = identity, self.block_tokens(token_ids, i), b"" if i else extra
            block: FoundBlock | None = self.blocks.get(key)
            if block is None and find_copy is not None:
                block = find_copy(key)
            if block is not None:
                identity = block.identity
            elif self._evicted is None or (evicted := self._evicted.find(key)) is None:
                break
            else:
                identity = evicted
            matched.append(block)
        return matched

    def add(self, block: Block, key: BlockKey, identity: int | None, is_state: bool = False) -> None:
        """Make a block findable by a key; `identity` is its existing one, if blocks elsewhere refer to it."""
        block.key, block.rank, block.num_uses = key, USUAL, 0
        block.is_state, block.is_decoded = is_state, False
        self.num_state_blocks += is_state
        if self._evicted is not None:
            evicted = self._evicted.on_registered(key)
            identity = identity if evicted is None else evicted
        block.identity = next(self._identities) if identity is None else identity
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Remove a block, if present."""
        if block.key is not None:
            del self.blocks[block.key]
            if self._evicted is not None:
                self._evicted.on_evicted(block.key, block.identity)
            self._clear(block)

    def reset(self) -> None:
        """Forget all blocks; blocks in use keep their keys, but are no longer found."""
        self.num_resets += 1
        self._evicted = None if self._evicted is None else EvictedPrefixes()
        for key, block in list(self.blocks.items()):
            if block.ref_count == 0:
                del self.blocks[key]
                self._clear(block)
            elif self._evicted is not None:
                self._evicted.on_registered(key)

    def _clear(self, block: Block) -> None:
        block.key = None
        self.num_state_blocks -= block.is_state
