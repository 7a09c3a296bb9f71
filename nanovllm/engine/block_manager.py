"""Manages the paged KV cache on the host: which block holds what, which sequences use it, what can be evicted.

Promises: a block is free, or in the tables of as many sequences as its reference count says; only blocks of the
prefix cache are in more than one table, and nobody writes to those; a freed block keeps its content, and can be found
again, until it is needed for something else; the least recently used goes first, the tail of a prefix before its
head. All of it is O(1) a block. Outputs of one request also share the last block of its prompt, until they write to it.

The prefix cache finds a block by its key: the *identity* of the block before it, and its own tokens, as bytes.
Identities are serial numbers that are never used again, so equal keys are equal prefixes (vLLM hashes both instead).
The first block's parent is a *root*, which a salt and each reset change.

Where all layers have a sliding window, a sequence holds the blocks of the window and of what it computes next: what
lies before is released as it goes on, and need not be there when a prefix is found again.

Knows nothing of the device: block ids are all that it deals in.
"""

from __future__ import annotations

import typing
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import count, filterfalse, islice

from nanovllm.engine.block import ROOT_IDENTITY, Block
from nanovllm.engine.block_source import BlockLoads, BlockSource
from nanovllm.engine.evicted_prefixes import BlockKey, EvictedPrefixes, Identity
from nanovllm.engine.held_blocks import HeldBlocks
from nanovllm.engine.host_cache import HostCache
from nanovllm.engine.sequence import Sequence
from nanovllm.runner.messages import BlockTransfer


class BlockManager:
    """Pages, reference counts, the prefix cache and its eviction.

    Args:
        num_blocks, block_size: blocks, and tokens of one.
        enable_prefix_caching: whether blocks can be found again.
        window: tokens that each layer sees at most, the query's own included; None if a layer sees all.
        max_chunk: most tokens of a sequence in one step.
        host: keeps evicted blocks; None if nothing does.
        num_clean_blocks: free blocks, the next to be evicted, that `host` is to have before they are.

    Attributes:
        held: which of its blocks a sequence holds.
        source: is asked for the blocks of a prefix that follow those in the cache and in `host`.
        loads: what the step being planned must load.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        window: int | None = None,
        max_chunk: int = 1,
        host: HostCache | None = None,
        num_clean_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        # Free blocks, next to be reused first. An OrderedDict is a queue that also removes from the middle in O(1).
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[BlockKey, Block] = {}
        self._identities = count(ROOT_IDENTITY + 1)
        self._num_resets = 0
        # Blocks freed or registered so far: each brings a waiting sequence at most one block nearer to fitting.
        self._num_gained = 0
        self.source: BlockSource | None = None
        self.host = host
        self._num_clean_blocks = num_clean_blocks
        self.loads = BlockLoads()
        # Blocks registered by the steps whose results are not back yet, oldest step first.
        self._unconfirmed: deque[list[int]] = deque()
        self.held = HeldBlocks(num_blocks, block_size, window, max_chunk)
        self._evicted = EvictedPrefixes() if self.held.has_window else None

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

    def allocate(self, seq: Sequence) -> bool:
        """Give a waiting sequence blocks for all its tokens, those of its prefix from the cache where they are there.

        With a window, only those that its first step needs; see `extend`.

        Sets `num_computed_tokens` to the tokens that need not be computed: at most all but one, since the last
        token's output is what the next is sampled from. Returns False, and changes nothing, if too few are free.
        """
        source = seq.fork_source
        if source is not None and self._can_fork(source, seq):
            self._fork(source, seq)
            return True
        if self._num_gained < seq.fits_from:
            return False
        seq.root_identity = self._root(seq.request.cache_salt)
        matched = self._match_prefix(seq)
        num_computed = min(len(matched) * self.block_size, seq.num_tokens - 1)
        first, end = self.held.span(num_computed, seq.num_tokens)
        found = [block for block in matched[first:] if block is not None]
        num_new = end - len(matched)
        num_revived = sum(block.ref_count == 0 for block in found) if found else 0
        num_missing = num_new + num_revived - len(self._free)
        if num_missing > 0:
            # With a window, one block more may make a whole prefix usable.
            seq.fits_from = self._num_gained + (num_missing if not self.held.has_window else 1)
            return False
        for block in found:
            self._free.pop(block.block_id, None)
            block.ref_count += 1
            block.num_hits += 1
        seq.block_table = [0] * first + [block.block_id for block in found]
        seq.block_table += [self._take_free_block() for _ in range(num_new)]
        seq.num_released_blocks = first
        seq.num_registered_blocks = len(matched)
        seq.registered_identity = found[-1].identity if found else seq.root_identity
        seq.num_computed_tokens = num_computed
        seq.num_shared_tokens = 0
        for other in (self.host, self.source):
            if other is not None:
                self._fetch(other, seq)
        return True

    def _fetch(self, source: BlockSource, seq: Sequence) -> None:
        """Load what a source has of the blocks that follow a sequence's registered ones."""
        first, end = seq.num_registered_blocks, seq.max_cached_tokens // self.block_size
        slots = source.fetch(seq, first, end) if first < end else ()
        if slots:
            self._load(seq, slots)

    def _load(self, seq: Sequence, slots: typing.Sequence[int]) -> None:
        """Load blocks that follow a sequence's registered ones; they stand or fall with the step being planned.

        `register` counts the full blocks that are computed. Only then is the last token taken back, which is computed
        whatever is cached, since the next one is sampled from its output.
        """
        num_loaded = seq.num_registered_blocks + len(slots)
        self.loads.add(slots, seq.block_table[seq.num_registered_blocks : num_loaded])
        seq.num_computed_tokens = num_loaded * self.block_size
        self.register(seq)
        seq.num_computed_tokens = min(seq.num_computed_tokens, seq.num_tokens - 1)

    def plan_saves(self, running: list[Sequence], num_prompt_tokens: int) -> list[BlockTransfer]:
        """Return what the step being planned saves in the host's memory; see `HostCache.plan_saves`."""
        if self.host is None:
            return []
        unconfirmed = {block_id for step in self._unconfirmed for block_id in step}
        return self.host.plan_saves(self._next_to_evict(self.host, running), unconfirmed, num_prompt_tokens)

    def _next_to_evict(self, host: HostCache, running: list[Sequence]) -> Iterator[Block]:
        """Yield the blocks that steps will overwrite first: free ones, then those of the next to be preempted.

        Where few are free, blocks of a sequence that ends are taken in the same step, so that those of all are among
        them. A sequence's are saved first ones first, so that with the last one all are; none of those that nobody
        finds any more.
        """
        for block_id in islice(self._free, self._num_clean_blocks):
            yield self.blocks[block_id]
        if len(self._free) >= self._num_clean_blocks:
            return
        for seq in filterfalse(self._precedes_reset, reversed(running)):
            registered = [self.blocks[block_id] for block_id in seq.block_table[: seq.num_registered_blocks]]
            if registered and (key := registered[-1].key) is not None and key not in host:
                yield from registered

    def prefix_blocks(self, token_ids: array[int], salt: str | None) -> list[int]:
        """Return the blocks that the cache has of a prefix's full ones, up to the first that it has not."""
        parent = self._root(salt)
        block_ids = []
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            block = self._cached.get((parent, token_ids[start : start + self.block_size].tobytes()))
            if block is None:
                break
            block_ids.append(block.block_id)
            parent = block.identity
        return block_ids

    def _can_fork(self, source: Sequence, seq: Sequence) -> bool:
        """Whether a sequence can share the blocks that `source` has of their prompt.

        It always can without a window. With one, `source` must hold all blocks that the sequence will attend to, and
        have registered none past the prompt, where the sequence will register its own.
        """
        first, _ = self.held.span(seq.num_tokens - 1, seq.num_tokens)
        num_released, num_full = source.num_released_blocks, seq.num_tokens // self.block_size
        return not num_released or (num_released <= first and source.num_registered_blocks <= num_full)

    def _fork(self, source: Sequence, seq: Sequence) -> None:
        """Share all blocks of a prompt; whoever writes to the last one, if it is not full, copies it first."""
        seq.block_table = source.block_table[: self.num_blocks_for(seq.num_tokens)]
        seq.num_released_blocks = source.num_released_blocks
        for block_id in seq.block_table[seq.num_released_blocks :]:
            self.blocks[block_id].ref_count += 1
        seq.root_identity = source.root_identity
        seq.num_registered_blocks, seq.registered_identity = 0, seq.root_identity
        if seq.num_released_blocks:
            seq.num_registered_blocks = source.num_registered_blocks
            seq.registered_identity = source.registered_identity
        seq.num_computed_tokens, seq.num_shared_tokens = seq.num_tokens - 1, seq.num_tokens

    def must_copy(self, seq: Sequence) -> bool:
        """Whether the next token to compute, of a sequence with siblings, lies in a block that it may not write to.

        Another output of its request has the block, too, or has filled and registered it.
        """
        index = seq.num_computed_tokens // self.block_size
        if index >= len(seq.block_table):
            return False
        block = self.blocks[seq.block_table[index]]
        return block.ref_count > 1 or block.key is not None

    def copy_block(self, seq: Sequence) -> BlockTransfer:
        """Give the sequence its own copy, in a free block, of the block that it is about to write to."""
        index = seq.num_computed_tokens // self.block_size
        source, copy = seq.block_table[index], self._take_free_block()
        self._release(seq, source)
        seq.block_table[index] = copy
        return BlockTransfer("copy", source, copy)

    def needs_block(self, seq: Sequence) -> bool:
        """Whether the sequence's next token to compute lies past its last block."""
        return seq.num_computed_tokens == len(seq.block_table) * self.block_size

    def append_block(self, seq: Sequence) -> int:
        """Add one block, which must be free, to a sequence's table; returns its id."""
        seq.block_table.append(self._take_free_block())
        return seq.block_table[-1]

    def extend(self, seq: Sequence) -> list[int]:
        """Give a sequence with a window blocks for its next tokens, as far as they are free; returns their indices."""
        self.release_outside_window(seq)
        _, end = self.held.span(seq.num_computed_tokens, seq.num_tokens)
        num_held = len(seq.block_table)
        indices = list(range(num_held, min(end, num_held + len(self._free))))
        seq.block_table += [self._take_free_block() for _ in indices]
        return indices

    def release_outside_window(self, seq: Sequence) -> None:
        """Take the blocks from a sequence that it will not attend to any more; the step in flight may still."""
        if not self.held.has_window:
            return
        first, _ = self.held.span(seq.num_computed_tokens, seq.num_tokens)
        for index in range(seq.num_released_blocks, first):
            self._release(seq, seq.block_table[index])
        seq.num_released_blocks = max(seq.num_released_blocks, first)

    def free(self, seq: Sequence) -> None:
        """Take all blocks from a sequence. Their content stays until it is evicted, the tail of the prefix first."""
        for block_id in reversed(seq.block_table[seq.num_released_blocks :]):
            self._release(seq, block_id)
        seq.block_table.clear()
        seq.num_released_blocks = seq.num_registered_blocks = seq.num_computed_tokens = 0

    def _release(self, seq: Sequence, block_id: int) -> None:
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            if self._precedes_reset(seq):
                self._unregister(block)
            self._free[block_id] = None
            # What can never be found again is reused before anything that can.
            self._free.move_to_end(block_id, last=block.key is not None)
            self._num_gained += 1
            if self.host is not None and block.key is not None:
                self.host.touch(block.key)

    def begin_step(self) -> None:
        """Begin a step: the blocks registered from now on are confirmed, or rolled back, with its result."""
        self._unconfirmed.append([])
        if self.host is not None:
            self.host.begin_step()

    def cancel_step(self) -> None:
        """Undo `begin_step`, since the step turned out to be empty."""
        registered = self._unconfirmed.pop()
        assert not registered
        if self.host is not None:
            self.host.cancel_step()

    def confirm_step(self) -> None:
        """Confirm the blocks of the oldest step without a result: it has succeeded, and they hold what they should."""
        self._unconfirmed.popleft()
        if self.host is not None:
            self.host.confirm_step()

    def rollback(self) -> None:
        """Take every block registered by a step without a result out of the prefix cache; none is in use any more."""
        for block_id in (block_id for step in self._unconfirmed for block_id in step):
            self._unregister(self.blocks[block_id])
            self._free.move_to_end(block_id, last=False)
        self._unconfirmed.clear()
        self.loads.clear()
        if self.host is not None:
            self.host.rollback()

    def reset(self) -> bool:
        """Forget the prefix cache; return whether no sequence holds blocks of it.

        Those that do keep them, and nobody else will find them, nor what they compute from now on.
        """
        self._num_resets += 1
        self._evicted = None if self._evicted is None else EvictedPrefixes()
        if self.host is not None:
            self.host.clear()
        for key, block in list(self._cached.items()):
            if block.ref_count == 0:
                del self._cached[key]
                block.key = None
            elif self._evicted is not None:
                self._evicted.on_registered(key)
        return not self._cached

    def register(self, seq: Sequence) -> None:
        """Put a sequence's new full blocks into the prefix cache: values known, keys stored or planned to be."""
        num_full = min(len(seq.token_ids), seq.num_computed_tokens) // self.block_size
        if not self.enable_prefix_caching or num_full <= seq.num_registered_blocks:
            return
        for i in range(seq.num_registered_blocks, num_full):
            key = seq.registered_identity, self._block_tokens(seq, i)
            # Of two sequences that compute the same block, the first one's is the one that others find.
            block = self._cached.get(key) or self._register(self.blocks[seq.block_table[i]], key)
            seq.registered_identity = block.identity
        seq.num_registered_blocks = num_full

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert every promise of this class, given all sequences that may hold blocks. For tests; O(blocks)."""
        sequences = list(sequences)
        uses = Counter(block_id for seq in sequences for block_id in seq.block_table[seq.num_released_blocks :])
        for block in self.blocks:
            assert block.ref_count == uses[block.block_id], f"block {block.block_id}: wrong reference count"
            assert (block.ref_count == 0) == (block.block_id in self._free), f"block {block.block_id} lost or leaked"
            if block.ref_count > 1 and block.key is None:
                owners = [s for s in sequences if block.block_id in s.block_table[s.num_released_blocks :]]
                assert all(owner in owners[0].siblings for owner in owners), (
                    f"block {block.block_id} shared unregistered"
                )
            if block.key is not None:
                assert self._cached[block.key] is block, f"block {block.block_id}: wrong cache entry"
                parent = block.key[0]
                is_older = not isinstance(parent, str) and block.identity <= parent
                assert not is_older, f"block {block.block_id} is older than its parent"
        assert len(self._cached) == sum(block.key is not None for block in self.blocks)
        identities = {key: block.identity for key, block in self._cached.items()}
        if self._evicted is not None:
            self._evicted.check_integrity(identities)
        if self.host is not None:
            self.host.check_integrity(identities)
        for seq in sequences:
            held = seq.block_table[seq.num_released_blocks :]
            assert len(held) == len(set(held)) <= self.held.most, f"{seq} holds a block twice, or too many"
            first, _ = self.held.span(seq.num_computed_tokens, seq.num_tokens)
            most_released = min(first, seq.num_registered_blocks) if self.enable_prefix_caching else first
            assert seq.num_released_blocks <= most_released, f"{seq} has released a block too early"
            # A chunk that begins inside a registered block does not store.
            num_kept = seq.num_registered_blocks if seq.is_prefill else 0
            for block_id in seq.block_table[max(num_kept, seq.num_computed_tokens // self.block_size) :]:
                is_own = self.blocks[block_id].key is None and self.blocks[block_id].ref_count == 1
                assert is_own or seq.siblings, f"{seq} will write to cached block {block_id}"

    def _match_prefix(self, seq: Sequence) -> list[Block | None]:
        """Return the blocks of the longest prefix that need not be computed; None for those that were evicted."""
        if not self.enable_prefix_caching:
            return []
        matched: list[Block | None] = []
        identity = seq.root_identity
        for i in range(seq.max_cached_tokens // self.block_size):
            key = identity, self._block_tokens(seq, i)
            block = self._cached.get(key)
            if block is not None:
                identity = block.identity
            elif self._evicted is None or (evicted := self._evicted.find(key)) is None:
                break
            else:
                identity = evicted
            matched.append(block)
        return matched if self._evicted is None else matched[: self.held.num_usable(matched, seq.num_tokens)]

    def _block_tokens(self, seq: Sequence, index: int) -> bytes:
        return seq.token_ids[index * self.block_size : (index + 1) * self.block_size].tobytes()

    def _root(self, salt: str | None) -> Identity:
        """Return the identity that first blocks have as their parent, which is another one after a `reset`."""
        return ROOT_IDENTITY - self._num_resets if salt is None else f"{self._num_resets} {salt}"

    def _precedes_reset(self, seq: Sequence) -> bool:
        """Whether nobody finds a sequence's blocks, since it was given its first ones before a `reset`."""
        return seq.root_identity != self._root(seq.request.cache_salt)

    def _take_free_block(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        if self.host is not None and block.key is not None and block.key not in self.host:
            self.host.num_lost += 1
        self._unregister(block)
        block.ref_count = 1
        return block_id

    def _register(self, block: Block, key: BlockKey) -> Block:
        # A fork may share a block whose parent was evicted since it was registered.
        self._unregister(block)
        block.key = key
        known = None if self.host is None else self.host.identity(key)
        if self._evicted is not None:
            known = self._evicted.on_registered(key)
        block.identity = next(self._identities) if known is None else known
        self._cached[key] = block
        self._unconfirmed[-1].append(block.block_id)
        self._num_gained += 1
        return block

    def _unregister(self, block: Block) -> None:
        if block.key is not None:
            del self._cached[block.key]
            if self._evicted is not None:
                self._evicted.on_evicted(block.key, block.identity)
            block.key = None
