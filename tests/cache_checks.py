"""The promises of the engine's block manager, checked between any two steps; O(blocks)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.cache_policy import PagedPolicy
from nanovllm.engine.host_cache import HostCache
from nanovllm.engine.prefix_cache import SPENT, Block, BlockKey, BlockTable, EvictedPrefixes, PrefixCache
from nanovllm.engine.sequence import Sequence


def check_blocks(manager: BlockManager, sequences: Iterable[Sequence] = ()) -> None:
    """Assert every promise of a block manager, given all sequences that may hold blocks."""
    sequences = list(sequences)
    owners: defaultdict[int, list[Sequence]] = defaultdict(list)
    for seq in sequences:
        for block_id in chain.from_iterable(table.held for table in seq.block_tables):
            owners[block_id].append(seq)
    for block in manager.blocks:
        users = owners[block.block_id]
        assert block.ref_count == len(users), f"block {block.block_id}: wrong reference count"
        assert (block.ref_count == 0) == (block.block_id in manager._free), f"block {block.block_id} lost or leaked"
        if block.ref_count > 1 and block.key is None:
            is_shared = all(user in users[0].siblings for user in users)
            assert is_shared, f"block {block.block_id} shared unregistered"
    identities = check_prefix_cache(manager._cache, manager.blocks)
    if manager.host is not None:
        check_host(manager.host, identities)
    check_states(manager)
    for seq in sequences:
        for group, table in enumerate(seq.block_tables):
            check_table(manager, seq, group, table)


def check_states(manager: BlockManager) -> None:
    """Assert that the free queues follow the ranks, and that a state without all its parts is evicted first."""
    parts: defaultdict[tuple[int, bytes], list[Block]] = defaultdict(list)
    for block in manager._cache.blocks.values():
        if block.is_state and block.key is not None:
            parts[block.key[:2]].append(block)
        assert block.ref_count or block.block_id in manager._free._queues[block.rank]
    assert sum(map(len, parts.values())) == manager._cache.num_state_blocks
    for blocks in parts.values():
        is_whole = len(blocks) == manager._num_state_blocks
        assert is_whole or all(block.rank == SPENT for block in blocks), "a part of a state is kept"


def check_table(manager: BlockManager, seq: Sequence, group: int, table: BlockTable) -> None:
    held, blocks = table.held, manager.blocks
    assert len(held) == len(set(held)), f"{seq} holds a block twice"
    policy = manager.policies[group]
    if not isinstance(policy, PagedPolicy):
        assert len(held) == manager._num_state_blocks, f"{seq} has a part of a state"
        assert all(blocks[block_id].ref_count == 1 for block_id in held), f"{seq} shares its state"
        return
    assert len(held) <= policy._most, f"{seq} holds too many blocks"
    first = policy.num_released(seq.num_computed_tokens - seq.num_unsure)
    most_released = min(first, seq.num_registered_blocks) if manager.enable_prefix_caching else first
    assert table.num_released <= most_released, f"{seq} has released a block too early"
    # A chunk that begins inside a registered block does not store.
    num_kept = seq.num_registered_blocks if seq.is_behind else 0
    for block_id in table[max(num_kept, seq.num_computed_tokens // manager.block_size) :]:
        is_own = blocks[block_id].key is None and blocks[block_id].ref_count == 1
        assert is_own or seq.siblings, f"{seq} will write to cached block {block_id}"


def check_prefix_cache(cache: PrefixCache, blocks: Iterable[Block]) -> dict[BlockKey, int]:
    """Assert that exactly the blocks with keys can be found; return their identities."""
    identities = {block.key: block.identity for block in blocks if block.key is not None}
    assert {key: block.identity for key, block in cache.blocks.items()} == identities
    for key, block in cache.blocks.items():
        assert block.key == key, f"block {block.block_id}: wrong cache entry"
        assert block.identity > key[0], f"block {block.block_id} is older than its parent"
    if cache._evicted is not None:
        check_evicted(cache._evicted, identities)
    return identities


def check_evicted(evicted: EvictedPrefixes, cached: dict[BlockKey, int]) -> None:
    """Assert that exactly the needed entries exist, given the identities of cached blocks."""
    keys = [*cached, *evicted._identities]
    assert evicted._num_children == Counter(parent for parent, _, _ in keys), "children are miscounted"
    assert evicted._keys == {identity: key for key, identity in evicted._identities.items()}
    assert not evicted._identities.keys() & cached.keys(), "a block is cached and evicted"
    assert all(evicted._num_children[identity] for identity in evicted._keys), "nothing follows an evicted block"


def check_host(host: HostCache, identities: dict[BlockKey, int]) -> None:
    """Assert that each slot is free or holds one block, given the identities of cached blocks."""
    slots = host._free_slots + [copy.slot for copy in host._copies.values()]
    assert sorted(slots) == list(range(host._num_used_slots)), "a slot is lost, or holds two blocks"
    for key, copy in host._copies.items():
        assert identities.get(key, copy.identity) == copy.identity, "a block has two identities"
        assert not key[1] or not key[2].startswith(b"state"), "a state within a block is kept"
