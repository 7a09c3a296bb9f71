"""Manages the cache's blocks on the host: their contents, their users, and their eviction.

Promises: a block is free, or in `ref_count` block tables; only blocks of the prefix cache are in more than one table,
and no sequence writes to those; a freed block keeps its content, and can be found again, until it is reused; the least
recently used goes first, the tail of a prefix before its head, except for states (see `FreeBlocks`) and preempted
sequences (see `free`). Every operation is O(1) per block. Outputs of one request also share the last block of its
prompt, until they write to it.

Layers are grouped; each group has its own blocks and block tables (`BlockTable`), all from one pool. A policy
(`cache_policy`) decides which blocks a sequence holds in a group: of all its tokens, of a sliding window, or, in the
last group, of one state. A prefix must be usable in all groups. A state that other sequences may start from is in
cached blocks like any other: a sequence that continues from it copies them.

Knows nothing of the device and deals in block ids only.
"""

from __future__ import annotations

import typing
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, zip_longest

import numpy as np

from nanovllm.engine.cache_policy import CachePolicy, PagedPolicy, StatePolicy
from nanovllm.engine.host_cache import HostCache
from nanovllm.engine.prefix_cache import (
    OFTEN_USED,
    SPARE,
    SPENT,
    USUAL,
    Block,
    BlockKey,
    BlockKind,
    BlockTable,
    FoundBlock,
    FreeBlocks,
    HostBlock,
    PrefixCache,
    next_hash,
)
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.stats import BlockUsage
from nanovllm.runner.messages import (
    BlockTransfer,
    CacheKind,
    KeptState,
    NewBlock,
    PagedCache,
    ScheduledBatch,
    StateCache,
)

_MOST_REPEATS = 32
"""Prompts that show whether outputs come again."""


@dataclass(frozen=True)
class _Fit:
    """Blocks that a waiting sequence would be given now."""

    # Cached blocks to share, and copies to load, for each group that grows; empty if there are none.
    found: list[list[FoundBlock]]
    # Blocks that it would hold in each group, by their index in its table.
    needed: list[range]
    # Leading blocks, and tokens, that are not computed.
    num_matched: int
    num_computed: int
    # Blocks that it needs beyond the free ones; at most 0 if it fits.
    num_missing: int


@dataclass
class _Unconfirmed:
    """Blocks and copies that a step's result makes valid: registered blocks by id, copies on the host by key."""

    registered: list[int] = field(default_factory=list)
    saved: list[BlockKey] = field(default_factory=list)


class BlockManager:
    """Pages, reference counts, the prefix cache and its eviction.

    Args:
        num_blocks, block_size: number of blocks, and tokens per block.
        enable_prefix_caching: whether blocks can be found again.
        kinds: kind of each group of layers, states last.
        max_chunk: most tokens of a sequence in one step.
        host: keeps evicted blocks, for a cache of one group that keeps all tokens, and states; None to drop them.
        num_clean_blocks: free blocks, next to be evicted, that `host` should already have a copy of.
        num_drafts: most drafts of a sequence in one step; with any, states of outputs are stored late, and not cached.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True,
        *, kinds: typing.Sequence[CacheKind] = (PagedCache(),), max_chunk: int = 1, host: HostCache | None = None,
        num_clean_blocks: int = 0, num_drafts: int = 0,
    ) -> None:  # fmt: skip
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeBlocks(range(num_blocks))
        # Recent prompts that repeated earlier outputs, minus other prompts.
        self._num_repeats = 0
        # Blocks freed or registered so far; each brings a waiting sequence at most one block closer to fitting.
        self._num_gained = 0
        self.host = host
        self._num_clean_blocks, self._num_drafts = num_clean_blocks, num_drafts
        # Of the step being planned: blocks given to running sequences; loads from host memory, by destination; counts
        # of blocks loaded, and taken from the free ones; copies within the device; keys of states that it computes, and
        # the blocks of states that it keeps.
        self._new_blocks: list[NewBlock] = []
        self._loads: dict[int, BlockTransfer] = {}
        self._num_loading = self._num_taken = 0
        self._copies: list[BlockTransfer] = []
        self._coming_states: set[BlockKey] = set()
        self._kept_blocks: list[int] = []
        # Of steps without a result yet, oldest step first.
        self._unconfirmed: deque[_Unconfirmed] = deque()
        # Drafts of two steps may be in flight.
        max_chunk += 2 * num_drafts
        self.policies: list[CachePolicy] = [
            StatePolicy(kind, block_size) if isinstance(kind, StateCache) else PagedPolicy(kind, block_size, max_chunk)
            for kind in kinds
        ]
        self._state = self.policies[-1] if isinstance(self.policies[-1], StatePolicy) else None
        # Computed tokens cannot be taken back from a state.
        self.has_states = self._state is not None
        self._num_state_blocks = 0 if self._state is None else self._state.num_blocks
        # Groups with a block for every block of tokens; the first group's blocks tell which states are kept.
        self._num_growing = len(kinds) - self.has_states
        assert self._num_growing and all(isinstance(kind, PagedCache) for kind in kinds[: self._num_growing])
        self._windowed = [g for g, policy in enumerate(self.policies[: self._num_growing]) if policy.has_gaps]
        # A prefix can be usable with blocks missing, or become usable by a state.
        self._has_gaps = any(policy.has_gaps for policy in self.policies)
        self._cache = PrefixCache()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence uses, cached content or not."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks in the table of at least one sequence."""
        return self.num_blocks - len(self._free)

    @property
    def num_kept_states(self) -> int:
        """States that sequences may start from."""
        return self._cache.num_state_blocks // max(1, self._num_state_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for `num_tokens` tokens; the last may be partly filled."""
        return -(-num_tokens // self.block_size)

    def allocate(self, seq: Sequence) -> bool:
        """Give a waiting sequence blocks for all its tokens, with cached blocks for its prefix.

        With a window, gives only the blocks that its first step needs; see `extend_windows`.

        Sets `num_computed_tokens` to the tokens that need not be computed: at most all but one, since the next token is
        sampled from the last token's output. Returns False, and changes nothing, if too few blocks are free.
        """
        # Another output of the request may already hold the prompt.
        source = seq.fork_source
        if source is not None and self._can_fork(source, seq):
            if len(self._free) < self._num_state_blocks:
                return False
            self._fork(source, seq)
            return True
        if self._num_gained < seq.fits_from:
            return False
        fit = self._fit(seq)
        if fit.num_missing > 0:
            # With gaps, a single block may make a whole prefix usable.
            seq.fits_from = self._num_gained + (1 if self._has_gaps else fit.num_missing)
            return False
        self._make_tables(seq, fit)
        seq.num_registered_blocks = fit.num_matched
        seq.num_computed_tokens = fit.num_computed
        seq.num_shared_tokens = 0
        return True

    def num_missing_blocks(self, seq: Sequence) -> int:
        """Return how many more blocks must be free before `allocate` succeeds; at most 0 if it does now."""
        source = seq.fork_source
        if source is not None and self._can_fork(source, seq):
            return self._num_state_blocks - len(self._free)
        return self._fit(seq).num_missing

    def _fit(self, seq: Sequence) -> _Fit:
        matched = self._match_prefix(seq)
        num_matched = len(matched[0])
        num_computed = min(num_matched * self.block_size, seq.num_tokens - 1)
        needed = self._needed(num_computed, seq.num_tokens)
        num_missing = sum([blocks.stop - num_matched for blocks in needed[: self._num_growing]]) - len(self._free)
        num_missing += self._num_state_blocks
        found: list[list[FoundBlock]] = []
        if num_matched:
            found = [list(filter(None, some[blocks.start :])) for some, blocks in zip(matched, needed, strict=False)]
            num_missing += sum(block.ref_count == 0 for block in chain.from_iterable(found))
        return _Fit(found, needed, num_matched, num_computed, num_missing)

    def _needed(self, num_computed: int, num_tokens: int) -> list[range]:
        """Return the blocks that a sequence needs in each group; with windows, up to what it could use if alone."""
        num_filled = self.num_blocks_for(num_tokens)
        share = 0
        if self._windowed:
            share = max(0, self.num_blocks - self._min_blocks(num_filled)) // len(self._windowed)
        return [policy.needed(num_computed, num_filled, share) for policy in self.policies]

    def _min_blocks(self, num_filled: int) -> int:
        """Return the fewest blocks with which a sequence that fills `num_filled` blocks in a group can continue."""
        return sum(policy.min_blocks(num_filled) for policy in self.policies)

    def max_tokens(self, max_model_len: int) -> int:
        """Return the most tokens, up to `max_model_len`, that a sequence running alone can have."""
        lengths = range(self.num_blocks_for(max_model_len) + 1)
        return max(0, bisect_right(lengths, self.num_blocks, key=self._min_blocks) - 1) * self.block_size

    def _match_prefix(self, seq: Sequence) -> list[list[FoundBlock | None]]:
        """Return the blocks, for each group that grows, of the longest prefix that is usable in all groups.

        None stands for a missing block. Blocks that the device lacks may be copies in host memory.
        """
        # A waiting sequence may use blocks cached since the last reset.
        seq.num_resets = self._cache.num_resets
        most = seq.max_cached_tokens // self.block_size if self.enable_prefix_caching else 0
        matched: list[list[FoundBlock | None]] = []
        seq.num_branch_blocks = 0
        if not most:
            return [[]] * self._num_growing
        find_copy = None if self.host is None else self.host.find
        for group, policy in enumerate(self.policies[: self._num_growing]):
            known = seq.block_hashes[1 : most + 1]
            hashes = chain(known, map(partial(self._hash, seq), range(len(known) + 1, most + 1)))
            matched.append(self._cache.match(hashes, group, policy.has_gaps, find_copy))
            most = len(matched[-1])
        if self.has_states:
            # Where it leaves the cached keys, or the last block end that leaves it a token to compute.
            branch = min(len(matched[0]), (seq.num_tokens - 1) // self.block_size)
            seq.num_branch_blocks = branch if branch and matched[0][branch - 1] is not None else 0

        def has_states(num_blocks: int) -> bool:
            return bool(self._find_states(self._hash(seq, num_blocks)))

        length, longer = most, -1
        while length != longer:
            longer = length
            for policy, blocks in zip(self.policies, [*matched, matched[0]], strict=False):
                length = policy.usable_prefix(blocks, length, seq.num_tokens, has_states)
        return [blocks[:length] for blocks in matched]

    def _hash(self, seq: Sequence, num_blocks: int) -> bytes:
        """Return the hash of a sequence's first blocks, whose tokens are known."""
        hashes, size = seq.block_hashes, self.block_size
        for start in range((len(hashes) - 1) * size, num_blocks * size, size):
            hashes.append(next_hash(hashes[-1], seq.token_ids[start : start + size]))
        return hashes[num_blocks]

    def _are_cached(self, keys: list[BlockKey]) -> bool:
        """Whether states are cached; at least one key. The ones that the planned step computes are not yet."""
        return bool(keys) and keys[0] in self._cache.blocks and keys[0] not in self._coming_states

    def _state_keys(self, prefix: bytes, kind: BlockKind = "state") -> list[BlockKey]:
        """Return the keys of the state at the end of a prefix."""
        return [(prefix, kind, part) for part in range(self._num_state_blocks)]

    def _make_tables(self, seq: Sequence, fit: _Fit) -> None:
        """Give a sequence the blocks found for each group, and free ones for copies and the rest that it needs."""
        for block in chain.from_iterable(fit.found):
            if isinstance(block, Block):
                self._free.remove(block.block_id)
                block.ref_count += 1
                block.num_hits += 1
        sources: list[FoundBlock] = []
        seq.source_state = None
        if fit.found and self.has_states:
            prefix = self._hash(seq, fit.num_matched)
            sources = self._find_states(prefix)
            if not sources[0].num_uses:
                self._note_repeat(sources[0].is_decoded or seq.num_branch_blocks > fit.num_matched)
            self._use_states(sources)
            # Where cached keys go on, other prompts may start here as well.
            seq.source_state = prefix if fit.num_matched == seq.num_branch_blocks else None
        seq.block_tables.clear()
        for group, needed in enumerate(fit.needed):
            block_ids = [0] * needed.start
            if fit.found and group < self._num_growing:
                found = fit.found[group]
                block_ids += [block.block_id if isinstance(block, Block) else self._place(block) for block in found]
            block_ids += [self._take_free_block() for _ in range(needed.stop - len(block_ids))]
            seq.block_tables.append(BlockTable(block_ids, needed.start))
        if self.has_states:
            self._copy_states(seq, sources)
        if self.host is not None:
            copies = [block for block in chain(*fit.found, sources) if isinstance(block, HostBlock)]
            self.host.note_loads(copies)
            self._num_loading += len(copies)

    def _place(self, copy: HostBlock) -> int:
        """Cache a block again, and return the free one that the planned step loads it into."""
        block = self._register(self.blocks[self._take_free_block()], copy.key)
        self._loads[block.block_id] = BlockTransfer("load", copy.slot, block.block_id)
        return block.block_id

    def _note_repeat(self, is_repeat: bool) -> None:
        """Count a prompt that repeats an earlier output: it starts from a state of decoding, or cached keys go on."""
        self._num_repeats = max(-_MOST_REPEATS, min(_MOST_REPEATS, self._num_repeats + (1 if is_repeat else -1)))

    def _use_states(self, blocks: list[FoundBlock]) -> None:
        """Make the blocks of states that a sequence starts from the most recently used."""
        for block in blocks:
            block.num_uses += 1
            if isinstance(block, HostBlock):
                continue
            block.num_hits += 1
            # A state within a block serves the outputs of one request.
            is_often_used = block.num_uses > 1 and block.key is not None and block.key[1] != "inner"
            block.rank = OFTEN_USED if is_often_used else USUAL
            if block.ref_count == 0:
                self._free.move(block)

    def _copy_states(self, seq: Sequence, sources: list[FoundBlock]) -> None:
        """Plan the copies of a sequence's first states from blocks of others, or their loads."""
        seq.decode_state, seq.fork_states = None, []
        for source, block_id in zip(sources, seq.block_tables[-1], strict=False):
            if isinstance(source, HostBlock):
                self._loads[block_id] = BlockTransfer("load", source.slot, block_id)
            # One of these blocks may have held the state until now.
            elif source.block_id != block_id:
                self._copies.append(BlockTransfer("copy", source.block_id, block_id))

    def _can_fork(self, source: Sequence, seq: Sequence) -> bool:
        """Whether `source` holds all that a sequence will attend to."""
        if self.has_states and not self._are_cached(source.fork_states):
            # The last token of the prompt is computed again, and the state of `source` is already past it.
            return False
        tables = zip(source.block_tables, self.policies, strict=True)
        return all(table.num_released <= policy.num_released(seq.num_tokens - 1) for table, policy in tables)

    def _fork(self, source: Sequence, seq: Sequence) -> None:
        """Share all blocks of a prompt; the last one, if not full, is copied before it is written to."""
        num_blocks = self.num_blocks_for(seq.num_tokens)
        seq.num_resets = source.num_resets
        # The source may have registered blocks past the prompt.
        seq.num_registered_blocks = min(source.num_registered_blocks, seq.num_tokens // self.block_size)
        seq.block_hashes = source.block_hashes[: seq.num_registered_blocks + 1]
        states: list[FoundBlock] = [self._cache.blocks[key] for key in source.fork_states]
        self._use_states(states)
        seq.block_tables.clear()
        for table in source.block_tables[: self._num_growing]:
            seq.block_tables.append(BlockTable(table[:num_blocks], table.num_released))
            for block_id in seq.block_tables[-1].held:
                self.blocks[block_id].ref_count += 1
        if self.has_states:
            block_ids = [self._take_free_block() for _ in range(self._num_state_blocks)]
            seq.block_tables.append(BlockTable(block_ids))
        self._copy_states(seq, states)
        seq.num_computed_tokens, seq.num_shared_tokens = seq.num_tokens - 1, seq.num_tokens

    def make_room(self, seq: Sequence) -> bool:
        """Give a sequence a writable block in each group for its next token to compute; False if too few are free.

        A block that another output of the request shares, or has shared, is not writable: that output may have filled
        and registered it.
        """
        last = seq.num_computed_tokens // self.block_size
        # Drafts in flight may fail.
        first = (seq.num_computed_tokens - seq.num_unsure) // self.block_size
        tables = seq.block_tables[: self._num_growing]

        def is_lacking(group: int) -> bool:
            table, policy = tables[group], self.policies[group]
            return last >= len(table) or bool(seq.siblings and policy.copied(table, first, self._is_shared))

        while lacking := [group for group in range(self._num_growing) if is_lacking(group)]:
            if len(self._free) < len(lacking):
                return False
            for group in lacking:
                if last == len(tables[group]):
                    self._append_block(seq, group)
                else:
                    self._copy_block(seq, group, first)
        return True

    def _is_shared(self, block_id: int) -> bool:
        return self.blocks[block_id].ref_count > 1 or self.blocks[block_id].key is not None

    def _copy_block(self, seq: Sequence, group: int, index: int) -> None:
        """Replace a sequence's shared block with a copy of its own."""
        table = seq.block_tables[group]
        source, table[index] = table[index], self._take_free_block()
        self._release(seq, source)
        self._new_blocks.append(NewBlock(seq.slot, index, table[index], group))
        self._copies.append(BlockTransfer("copy", source, table[index]))

    def own_states(self, seq: Sequence) -> None:
        """Make a sequence's states writable: cached ones are copied into free blocks, or else forgotten."""
        if self._state is None:
            return
        table = seq.block_tables[-1]
        for index in self._state.copied(table, 0, self._is_shared):
            if self._free:
                self._copy_block(seq, self._num_growing, index)
            else:
                self._evict(self.blocks[table[index]])

    def _append_block(self, seq: Sequence, group: int) -> None:
        table = seq.block_tables[group]
        table.append(self._take_free_block())
        self._new_blocks.append(NewBlock(seq.slot, len(table) - 1, table[-1], group))

    def capacity(self, seq: Sequence) -> int:
        """Return the number of tokens that fit into a sequence's blocks in every group."""
        return min(map(len, seq.block_tables[: self._num_growing])) * self.block_size

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        """Give a sequence blocks up to `num_tokens` tokens in all groups, as far as they are free."""
        while self.capacity(seq) < num_tokens and len(self._free) >= self._num_growing:
            for group in range(self._num_growing):
                self._append_block(seq, group)

    def extend_windows(self, seq: Sequence) -> None:
        """Give a sequence blocks for its next tokens in groups with windows, as far as they are free, evenly."""
        self.release_outside_window(seq)
        needed = self._needed(seq.num_computed_tokens, seq.num_tokens)
        ends = {group: needed[group].stop for group in self._windowed}
        for num_blocks in range(self.capacity(seq) // self.block_size, max(ends.values())):
            for group, end in ends.items():
                if len(seq.block_tables[group]) == num_blocks < end and self._free:
                    self._append_block(seq, group)

    def release_outside_window(self, seq: Sequence) -> None:
        """Release blocks that a sequence no longer attends to, though the step in flight may."""
        for group in self._windowed:
            first = self.policies[group].num_released(seq.num_computed_tokens - seq.num_unsure)
            table = seq.block_tables[group]
            for block_id in table[table.num_released : first]:
                self._release(seq, block_id)
            table.num_released = max(table.num_released, first)

    def free(self, seq: Sequence, is_preempted: bool = False) -> None:
        """Release all blocks of a sequence. Their content stays until evicted, the tail of the prefix first.

        A preempted sequence soon needs them all again: blocks with a copy on the host are evicted first, and a step can
        save the others meanwhile.
        """
        held, is_often_used = [table.held[::-1] for table in seq.block_tables], False
        if is_preempted and (host := self.host) is not None:
            held[0].sort(key=lambda block_id: host.lacks(self.blocks[block_id]))
        for block_ids in zip_longest(*held) if len(held) > 1 else held:
            if self.has_states and block_ids[0] is not None:
                is_often_used = self._rank_with_states(self.blocks[block_ids[0]], is_often_used)
            for block_id in block_ids:
                if block_id is not None:
                    self._release(seq, block_id)
        seq.block_tables.clear()
        seq.num_registered_blocks = seq.num_computed_tokens = 0

    def _rank_with_states(self, block: Block, is_often_used: bool) -> bool:
        """Let the states at a block's end be evicted right before it, since they are of no use without it.

        Returns whether these states, or later ones (`is_often_used`), are often used. The block is kept as long.
        """
        keys = [] if block.key is None else self._state_keys(block.key[0])
        for state in (self._cache.blocks[key] for key in keys if key in self._cache.blocks):
            is_often_used |= state.rank == OFTEN_USED
            if state.ref_count == 0 and state.rank >= USUAL:
                self._free.move(state)
        block.rank = OFTEN_USED if is_often_used else USUAL
        return is_often_used

    def _release(self, seq: Sequence, block_id: int) -> None:
        block = self.blocks[block_id]
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free.add(block)
            self._num_gained += 1
            if self.host is not None and block.key is not None:
                self.host.touch(block.key)

    def _take_free_block(self) -> int:
        block = self.blocks[self._free.pop()]
        self._num_taken += 1
        if self.host is not None and self.host.lacks(block):
            self.host.num_lost += 1
        self._evict(block)
        block.ref_count = 1
        return block.block_id

    def _evict(self, block: Block) -> None:
        """Forget a block's content. A state is of no use without all its parts, and the keys before it."""
        if self.has_states and block.key is not None:
            prefix, kind, _ = block.key
            if kind != "keys":
                for part in [self._cache.blocks[key] for key in self._state_keys(prefix, kind)]:
                    self._cache.remove(part)
                    if part.block_id in self._free:
                        self._free.move(part)
            elif self.host is None or self.host.find(block.key) is None:
                self._spend(prefix)
        self._cache.remove(block)

    def take_loads(self) -> list[BlockTransfer]:
        """Return the loads from host memory of the step being planned, each once."""
        loads, self._loads = list(self._loads.values()), {}
        return loads

    def is_loading(self, seq: Sequence) -> bool:
        """Whether loads into a sequence's blocks are not taken yet."""
        return bool(self._loads) and any(not self._loads.keys().isdisjoint(table) for table in seq.block_tables)

    def finish_plan(self, batch: ScheduledBatch, running: list[Sequence]) -> None:
        """Add the new blocks of `running` sequences to a planned step, and all transfers."""
        if self._coming_states:
            # Waiting sequences may use them, and the blocks of the kept ones, from the next step on.
            self._coming_states.clear()
            self._num_gained += 1
        self._release_kept()
        batch.new_blocks = self._new_blocks
        batch.transfers += self._copies
        self._copies.clear()
        if self.host is None:
            return
        unconfirmed = {block_id for step in self._unconfirmed for block_id in step.registered}
        blocks = self._next_to_evict(self.host, running)
        saves = self.host.plan_saves(blocks, unconfirmed, self._num_taken)
        keys = [self.blocks[save.source].key for save in saves]
        self._unconfirmed[-1].saved += [key for key in keys if key is not None]
        batch.transfers += self.take_loads() + saves

    def _release_kept(self) -> None:
        """Let later steps take the blocks of the states that the planned step keeps."""
        for block_id in self._kept_blocks:
            self.blocks[block_id].ref_count = 0
            self._free.add(self.blocks[block_id])
        self._kept_blocks.clear()

    def register(self, seq: Sequence) -> None:
        """Put a sequence's new full blocks into the prefix cache: values known, keys stored or planned to be.

        The states at a block's end may be cached as well. The sequence then needs another block, and `own_states`.
        """
        num_full = min(len(seq.token_ids), seq.num_computed_tokens) // self.block_size
        if not self._can_register(seq) or num_full <= seq.num_registered_blocks:
            return
        for i in range(seq.num_registered_blocks, num_full):
            self._register_block(seq, i)
        if self.has_states and num_full * self.block_size == seq.num_computed_tokens:
            self._register_states(seq, num_full)

    def _can_register(self, seq: Sequence) -> bool:
        """Whether later requests may find a sequence's blocks: not if it got its first ones before the last `reset`."""
        return self.enable_prefix_caching and seq.num_resets == self._cache.num_resets

    def register_chunk(self, seq: Sequence, start: int) -> list[KeptState]:
        """Cache the blocks that a chunk (computed from `start` on) fills; return states to keep within it."""
        if not (self.has_states and self._can_register(seq)):
            self.register(seq)
            return []
        kept: list[KeptState] = []
        num_blocks, num_tokens = seq.num_registered_blocks, seq.num_computed_tokens
        while (num_blocks + 1) * self.block_size < num_tokens:
            self._register_block(seq, num_blocks)
            num_blocks += 1
            if self._keeps_states(seq, num_blocks):
                keys = self._state_keys(self._hash(seq, num_blocks))
                if block_ids := self._take_state_blocks(keys):
                    kept.append(KeptState(num_blocks * self.block_size, block_ids))
                    self._on_kept(seq, num_blocks, block_ids)
        last = seq.num_prompt_tokens - 1
        # A preempted sequence may have registered a block past the prompt.
        is_inside = start < last < num_tokens and num_blocks * self.block_size <= last
        if seq.siblings and is_inside:
            # The other outputs of the request go on from the state before the last token.
            prefix, tokens = self._hash(seq, num_blocks), seq.token_ids[num_blocks * self.block_size : last]
            inner = self._state_keys(next_hash(prefix, tokens), "inner")
            seq.fork_states = inner if tokens else self._state_keys(prefix)
            if block_ids := self._take_state_blocks(seq.fork_states):
                kept.append(KeptState(last, block_ids))
        self.register(seq)
        return kept

    def _register_block(self, seq: Sequence, index: int) -> None:
        for group, table in enumerate(seq.block_tables[: self._num_growing]):
            key: BlockKey = self._hash(seq, index + 1), "keys", group
            # If two sequences compute the same block, others find the first one's.
            if key not in self._cache.blocks:
                self._register(self.blocks[table[index]], key)
        seq.num_registered_blocks = index + 1

    def _keeps_states(self, seq: Sequence, num_blocks: int) -> bool:
        """Whether the state of a prompt is kept after `num_blocks` blocks."""
        policy = self._state
        return policy is not None and policy.is_kept(num_blocks, seq.num_prompt_tokens, seq.num_branch_blocks)

    def _take_state_blocks(self, keys: list[BlockKey]) -> list[int]:
        """Return free blocks for states, now in the cache; none if they are cached already, or too few are free."""
        if len(self._free) < len(keys) or keys[0] in self._cache.blocks:
            return []
        block_ids = [self._take_free_block() for _ in keys]
        for key, block_id in zip(keys, block_ids, strict=True):
            self._register(self.blocks[block_id], key)
        self._coming_states.update(keys)
        # Nothing else that this step plans may take them.
        self._kept_blocks += block_ids
        return block_ids

    def _register_states(self, seq: Sequence, num_blocks: int) -> None:
        """Cache the states of a sequence that has computed exactly `num_blocks` blocks, if they are worth keeping.

        Of a prompt see `_keeps_states`. In decoding each block end replaces the one before, where there is room.
        Where prompts leave out earlier outputs, such a state is room itself until it is used.
        """
        prefix = self._hash(seq, num_blocks)
        is_prompt = num_blocks * self.block_size < seq.num_prompt_tokens
        if not is_prompt:
            if self._num_drafts:
                return
            if seq.decode_state is not None:
                self._replace(seq.decode_state)
            seq.decode_state = prefix
            if self._free.num_spare < self._num_state_blocks:
                return
        elif not self._keeps_states(seq, num_blocks):
            return
        keys = self._state_keys(prefix)
        if keys[0] in self._cache.blocks:
            return
        block_ids = seq.block_tables[-1]
        for key, block_id in zip(keys, block_ids, strict=True):
            block = self._register(self.blocks[block_id], key)
            block.rank, block.is_decoded = USUAL if is_prompt or self._num_repeats >= 0 else SPARE, not is_prompt
        self._coming_states.update(keys)
        if is_prompt:
            self._on_kept(seq, num_blocks, block_ids)

    def _on_kept(self, seq: Sequence, num_blocks: int, block_ids: list[int]) -> None:
        """Rank the state that a sequence keeps of its prompt, and the one that it started from."""
        if num_blocks == seq.num_branch_blocks:
            # Two prompts have come this way already.
            for block_id in block_ids:
                self.blocks[block_id].num_uses = 1
        elif seq.source_state is not None:
            # The next turn of a chat starts from the later state. What has been used only once served nothing else.
            states = self._find_states(seq.source_state)
            if states and states[0].num_uses == 1:
                self._replace(seq.source_state)
            seq.source_state = None

    def _find_states(self, prefix: bytes) -> list[FoundBlock]:
        """Return the blocks of the states at the end of a prefix, or all their copies on the host."""
        if self._are_cached(keys := self._state_keys(prefix)):
            return [self._cache.blocks[key] for key in keys]
        return [] if self.host is None else [*self.host.find_all(keys)]

    def _replace(self, prefix: bytes) -> None:
        """Evict first, on the device and in host memory, the states at the end of a prefix."""
        self._spend(prefix)
        if self.host is not None:
            for key in self._state_keys(prefix):
                self.host.spend(key)

    def _spend(self, prefix: bytes) -> None:
        """Evict first the cached states at the end of a prefix."""
        for key in self._state_keys(prefix):
            block = self._cache.blocks.get(key)
            if block is not None:
                block.rank = SPENT
                if block.ref_count == 0 and block.block_id in self._free:
                    self._free.move(block)

    def waits_for_state(self, seq: Sequence) -> bool:
        """Whether the step being planned computes the state from which a waiting sequence could start."""
        if not self._coming_states:
            return False
        source = seq.fork_source
        if source is not None and not self._coming_states.isdisjoint(source.fork_states):
            return True
        num_matched = len(self._match_prefix(seq)[0])
        if seq.num_branch_blocks <= num_matched:
            return False
        return not self._coming_states.isdisjoint(self._state_keys(self._hash(seq, seq.num_branch_blocks)))

    def _register(self, block: Block, key: BlockKey) -> Block:
        self._cache.add(block, key)
        self._unconfirmed[-1].registered.append(block.block_id)
        self._num_gained += 1
        return block

    def begin_step(self) -> None:
        """Begin a step: blocks registered and saved from now on are confirmed, or rolled back, with its result."""
        self._unconfirmed.append(_Unconfirmed())
        self._new_blocks = []
        self._coming_states.clear()
        self._num_loading = self._num_taken = 0

    def cancel_step(self) -> None:
        """Undo `begin_step`, since the step turned out to be empty."""
        step = self._unconfirmed.pop()
        assert not step.registered and not step.saved

    def confirm_step(self) -> None:
        """Confirm the oldest step without a result: it has succeeded, and its blocks are valid."""
        self._unconfirmed.popleft()

    def rollback(self) -> None:
        """Remove blocks registered by steps without a result from the prefix cache; no sequence uses them any more."""
        self._release_kept()
        for step in self._unconfirmed:
            for block_id in step.registered:
                self._cache.remove(self.blocks[block_id])
                self._free.move(self.blocks[block_id])
            if self.host is not None:
                self.host.drop(step.saved)
        self._unconfirmed.clear()
        self._loads.clear()
        self._copies.clear()
        self._coming_states.clear()

    def reset(self) -> bool:
        """Forget the prefix cache, and what running sequences add to it; return whether none holds blocks."""
        if self.host is not None:
            self.host.clear()
            for step in self._unconfirmed:
                step.saved.clear()
        self._cache.reset()
        return not self.num_used_blocks

    def must_wait_to_load(self, seq: Sequence) -> bool:
        """Whether a waiting sequence would load blocks in a step that already loads enough."""
        if self.host is None or not self.host.is_enough(self._num_loading):
            return False
        matched = self._match_prefix(seq)[0]
        states = self._find_states(self._hash(seq, len(matched))) if matched and self.has_states else []
        return any(isinstance(block, HostBlock) for block in chain(matched, states))

    def _next_to_evict(self, host: HostCache, running: list[Sequence]) -> Iterator[Block]:
        """Yield the blocks that steps overwrite first: free ones, then blocks of the next sequences to be preempted.

        If few blocks are free, a finishing sequence's may be reused in the same step, so blocks of all sequences are
        included. They are saved in order: if the last has a copy, all have.
        """
        for block_id in islice(self._free, self._num_clean_blocks):
            yield self.blocks[block_id]
        if len(self._free) >= self._num_clean_blocks:
            return
        for seq in reversed(running):
            block_ids = seq.block_tables[0][: seq.num_registered_blocks]
            registered = [self.blocks[block_id] for block_id in block_ids]
            if registered and host.lacks(registered[-1]):
                yield from registered

    def usage(self, most_cells: int) -> BlockUsage:
        """Return the state of the blocks in at most `most_cells` cells; from any thread, it may mix two moments."""
        blocks, size = self.blocks, -(-self.num_blocks // most_cells)
        starts = np.arange(0, self.num_blocks, size)

        def cells(values: Iterable[int], reduceat: Callable[..., np.ndarray] = np.add.reduceat) -> list[int]:
            return reduceat(np.fromiter(values, np.int64, len(blocks)), starts).tolist()

        return BlockUsage(
            self.block_size,
            self.num_blocks,
            size,
            used=cells(block.ref_count > 0 for block in blocks),
            cached=cells(block.key is not None for block in blocks),
            users=cells((block.ref_count for block in blocks), np.maximum.reduceat),
            hits=cells(block.num_hits for block in blocks),
        )
