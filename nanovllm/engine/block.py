"""A block of the KV cache, as the host sees it."""

from __future__ import annotations

from nanovllm.engine.evicted_prefixes import BlockKey

ROOT_IDENTITY = 0
"""The identity of the block before a first one; see `PrefixCache.root`."""


class Block:
    """One page of the cache. `key` and `identity` are those of its content while it is in the prefix cache.

    `num_hits` is how often it was found there, whatever it held.
    """

    __slots__ = ("block_id", "identity", "key", "num_hits", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None
        self.identity = ROOT_IDENTITY
        self.num_hits = 0
