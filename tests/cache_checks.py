"""The promises of the engine's block manager, checked between any two steps; O(blocks)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.cache_policy import PagedPolicy
from nanovllm.engine.host_cache import HostCache
from nanovllm.engine.prefix_cache import Block, BlockTable
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
            # A reset takes the keys of blocks in use.
            is_forgotten = all(user.num_resets < manager._cache.num_resets for user in users)
            assert is_shared or is_forgotten, f"block {block.block_id} shared unregistered"
    found = {block.key: block for block in manager.blocks if block.key is not None}
    assert manager._cache.blocks == found, "the prefix cache does not have exactly the blocks with keys"
    if manager.host is not None:
        check_host(manager.host)
    check_states(manager)
    for seq in sequences:
        for group, table in enumerate(seq.block_tables):
            check_table(manager, seq, group, table)


def check_states(manager: BlockManager) -> None:
    """Assert that the free queues follow the ranks, and that states are whole."""
    parts: defaultdict[tuple[bytes, str], list[Block]] = defaultdict(list)
    for block in manager._cache.blocks.values():
        if block.is_state and block.key is not None:
            parts[block.key[:2]].append(block)
        assert block.ref_count or block.block_id in manager._free._queues[block.rank]
    assert sum(map(len, parts.values())) == manager._cache.num_state_blocks
    assert all(len(blocks) == manager._num_state_blocks for blocks in parts.values()), "a part of a state is kept"


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
    most_released = min(first, seq.num_registered_blocks) if manager._can_register(seq) else first
    assert table.num_released <= most_released, f"{seq} has released a block too early"
    # A chunk that begins inside a registered block does not store.
    num_kept = seq.num_registered_blocks if seq.is_behind else 0
    for block_id in table[max(num_kept, seq.num_computed_tokens // manager.block_size) :]:
        is_own = blocks[block_id].key is None and blocks[block_id].ref_count == 1
        assert is_own or seq.siblings, f"{seq} will write to cached block {block_id}"


def check_host(host: HostCache) -> None:
    """Assert that each slot is free or holds one block."""
    slots = host._free_slots + [copy.slot for copy in host._copies.values()]
    assert sorted(slots) == list(range(host._num_used_slots)), "a slot is lost, or holds two blocks"
    assert not any(key[1] == "inner" for key in host._copies), "a state within a block is kept"
