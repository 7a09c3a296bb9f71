"""The paged KV cache, seen from the host: which block holds what, who uses it, what can be evicted.

Promises: a block is free, or in the tables of as many sequences as its reference count says; only blocks of the
prefix cache are in more than one table, and nobody writes to those; a freed block keeps its content, and can be found
again, until it is needed for something else; the least recently used goes first, the tail of a prefix before its
head. All of it is O(1) a block.

Knows nothing of the device: block ids are all that it deals in.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

import xxhash

from nanovllm.engine.sequence import Sequence

_ROOT_HASH = 0


def chain_hash(parent_hash: int, token_ids: array[int]) -> int:
    """Name a full block: the xxhash64 of its tokens, seeded with its parent's name."""
    return xxhash.xxh64_intdigest(token_ids, parent_hash)


class Block:
    """One page of the cache. `block_hash` is None unless the block is in the prefix cache."""

    __slots__ = ("block_hash", "block_id", "parent_hash", "ref_count", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: int | None = None
        self.parent_hash = _ROOT_HASH
        self.token_ids = array("i")


class BlockManager:
    """Pages, reference counts, the prefix cache and its eviction."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        # Free blocks, next to be reused first. An OrderedDict is a queue that also removes from the middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[int, int] = {}
        # Blocks registered by the steps whose results are not back yet, oldest step first.
        self._unconfirmed: deque[list[int]] = deque()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence uses, cached content or not."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks in the table of at least one sequence."""
        return self.num_blocks - len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one maybe in part."""
        return -(-num_tokens // self.block_size)

    def admit(self, seq: Sequence) -> bool:
        """Give a waiting sequence blocks for all its tokens, those of its prefix from the cache where they are there.

        Sets `num_computed_tokens` to the tokens that need not be computed: at most all but one, since the last
        token's output is what the next is sampled from. Returns False, and changes nothing, if too few are free.
        """
        matched = self._match_prefix(seq)
        num_new = self.num_blocks_for(seq.num_tokens) - len(matched)
        num_revived = sum(self.blocks[block_id].ref_count == 0 for block_id in matched)
        if num_new + num_revived > len(self._free):
            return False
        for block_id in matched:
            self._free.pop(block_id, None)
            self.blocks[block_id].ref_count += 1
        seq.block_table = matched + [self._take_free_block() for _ in range(num_new)]
        seq.num_registered_blocks = len(matched)
        seq.num_computed_tokens = min(len(matched) * self.block_size, seq.num_tokens - 1)
        return True

    def needs_block(self, seq: Sequence) -> bool:
        """Whether the sequence's next token to compute lies past its last block."""
        return seq.num_computed_tokens == len(seq.block_table) * self.block_size

    def append_block(self, seq: Sequence) -> int:
        """Add one block, which must be free, to a sequence's table; returns its id."""
        block_id = self._take_free_block()
        seq.block_table.append(block_id)
        return block_id

    def release(self, seq: Sequence) -> None:
        """Take all blocks from a sequence. Their content stays until it is evicted, the tail of the prefix first."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                # What can never be found again is reused before anything that can.
                self._free.move_to_end(block_id, last=block.block_hash is not None)
        seq.block_table = []
        seq.num_registered_blocks = 0
        seq.num_computed_tokens = 0

    def begin_step(self) -> None:
        """Open the books of a step: what is registered from now on stands or falls with its result."""
        self._unconfirmed.append([])

    def cancel_step(self) -> None:
        """The step just begun turned out to be empty."""
        assert not self._unconfirmed.pop()

    def confirm_step(self) -> None:
        """The oldest open step has succeeded: the blocks it registered hold what they should."""
        self._unconfirmed.popleft()

    def rollback(self) -> None:
        """Take every block registered by a step without a result out of the prefix cache; none is in use any more."""
        for block_id in (block_id for step in self._unconfirmed for block_id in step):
            self._unregister(self.blocks[block_id])
            self._free.move_to_end(block_id, last=False)
        self._unconfirmed.clear()

    def register(self, seq: Sequence) -> None:
        """Put a sequence's new full blocks into the prefix cache: values known, keys stored or planned to be."""
        num_full = min(len(seq.token_ids), seq.num_computed_tokens) // self.block_size
        if not self.enable_prefix_caching or num_full <= seq.num_registered_blocks:
            return
        hashes = self._block_hashes(seq, num_full)
        for i in range(seq.num_registered_blocks, num_full):
            if hashes[i] in self._cached:
                continue
            block = self.blocks[seq.block_table[i]]
            block.block_hash = hashes[i]
            block.parent_hash = hashes[i - 1] if i else _ROOT_HASH
            block.token_ids = self._block_tokens(seq, i)
            self._cached[hashes[i]] = block.block_id
            self._unconfirmed[-1].append(block.block_id)
        seq.num_registered_blocks = num_full

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert every promise of this class, given all sequences that may hold blocks. For tests; O(blocks)."""
        sequences = list(sequences)
        uses = Counter(block_id for seq in sequences for block_id in seq.block_table)
        for block in self.blocks:
            assert block.ref_count == uses[block.block_id], f"block {block.block_id}: wrong reference count"
            assert (block.ref_count == 0) == (block.block_id in self._free), f"block {block.block_id} lost or leaked"
            assert block.ref_count <= 1 or block.block_hash is not None, f"block {block.block_id} shared unregistered"
            if block.block_hash is not None:
                assert self._cached[block.block_hash] == block.block_id, f"block {block.block_id}: wrong cache entry"
                assert block.block_hash == chain_hash(block.parent_hash, block.token_ids)
        assert len(self._cached) == sum(block.block_hash is not None for block in self.blocks)
        for seq in sequences:
            assert len(seq.block_table) == len(set(seq.block_table)), f"{seq} holds a block twice"
            for block_id in seq.block_table[seq.num_computed_tokens // self.block_size :]:
                assert self.blocks[block_id].block_hash is None, f"{seq} will write to cached block {block_id}"

    def _match_prefix(self, seq: Sequence) -> list[int]:
        if not self.enable_prefix_caching:
            return []
        matched: list[int] = []
        parent_hash = _ROOT_HASH
        for i, block_hash in enumerate(self._block_hashes(seq, len(seq.token_ids) // self.block_size)):
            block_id = self._cached.get(block_hash)
            if block_id is None:
                break
            block = self.blocks[block_id]
            # A hash may collide; tokens do not.
            if block.parent_hash != parent_hash or block.token_ids != self._block_tokens(seq, i):
                break
            matched.append(block_id)
            parent_hash = block_hash
        return matched

    def _block_hashes(self, seq: Sequence, num_blocks: int) -> list[int]:
        hashes = seq.block_hashes
        for i in range(len(hashes), num_blocks):
            hashes.append(chain_hash(hashes[-1] if hashes else _ROOT_HASH, self._block_tokens(seq, i)))
        return hashes[:num_blocks]

    def _block_tokens(self, seq: Sequence, index: int) -> array[int]:
        return seq.token_ids[index * self.block_size : (index + 1) * self.block_size]

    def _take_free_block(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        self._unregister(block)
        block.ref_count = 1
        return block_id

    def _unregister(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            block.block_hash = None
            block.token_ids = array("i")
