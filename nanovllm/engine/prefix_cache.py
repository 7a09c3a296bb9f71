"""Finds blocks by what they hold.

A block's key is the *identity* of the block before it, and its own tokens, as bytes. Identities are serial numbers that
are never used again, so equal keys are equal prefixes (vLLM hashes both instead). The first block's parent is a *root*,
which is another one for each group of layers, with a salt, and after each reset.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import count

from nanovllm.engine.block import ROOT_IDENTITY, Block
from nanovllm.engine.evicted_prefixes import BlockKey, EvictedPrefixes, Identity


class PrefixCache:
    """The blocks that can be found, in use or not.

    Args:
        block_size: tokens of a block.
        num_groups: groups of layers.
        has_windows: whether the head of a prefix may be evicted before its tail, and be missing from what is found.

    Attributes:
        blocks: by key.
        num_resets: how often everything was forgotten.
    """

    def __init__(self, block_size: int, num_groups: int, has_windows: bool) -> None:
        self._block_size, self._num_groups = block_size, num_groups
        self.blocks: dict[BlockKey, Block] = {}
        self.num_resets = 0
        self._identities = count(ROOT_IDENTITY + 1)
        self._evicted = EvictedPrefixes() if has_windows else None

    def root(self, salt: str | None, num_resets: int, group: int) -> Identity:
        """Return the identity that first blocks have as their parent."""
        root = num_resets * self._num_groups + group
        return ROOT_IDENTITY - root if salt is None else f"{root} {salt}"

    def block_tokens(self, token_ids: array[int], index: int) -> bytes:
        """Return the tokens of a sequence's block."""
        return token_ids[index * self._block_size : (index + 1) * self._block_size].tobytes()

    def match(self, root: Identity, token_ids: array[int], most: int) -> list[Block | None]:
        """Return a prefix's leading blocks, `most` at most; None for one that was evicted while others follow it."""
        matched: list[Block | None] = []
        identity = root
        for i in range(most):
            key = identity, self.block_tokens(token_ids, i)
            block = self.blocks.get(key)
            if block is not None:
                identity = block.identity
            elif self._evicted is None or (evicted := self._evicted.find(key)) is None:
                break
            else:
                identity = evicted
            matched.append(block)
        return matched

    def add(self, block: Block, key: BlockKey, identity: int | None) -> None:
        """Let a block be found by a key; `identity` is that by which others follow it elsewhere, if they do."""
        block.key = key
        if self._evicted is not None:
            identity = self._evicted.on_registered(key)
        block.identity = next(self._identities) if identity is None else identity
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Let a block not be found any more, if it can be."""
        if block.key is not None:
            del self.blocks[block.key]
            if self._evicted is not None:
                self._evicted.on_evicted(block.key, block.identity)
            block.key = None

    def reset(self) -> None:
        """Forget all blocks but those in use, which keep their keys, and which nobody will find."""
        self.num_resets += 1
        self._evicted = None if self._evicted is None else EvictedPrefixes()
        for key, block in list(self.blocks.items()):
            if block.ref_count == 0:
                del self.blocks[key]
                block.key = None
            elif self._evicted is not None:
                self._evicted.on_registered(key)

    def check_integrity(self, blocks: Iterable[Block]) -> dict[BlockKey, int]:
        """Assert that exactly the blocks that have keys can be found; returns their identities. For tests."""
        identities = {block.key: block.identity for block in blocks if block.key is not None}
        assert {key: block.identity for key, block in self.blocks.items()} == identities
        for key, block in self.blocks.items():
            assert block.key == key, f"block {block.block_id}: wrong cache entry"
            is_older = not isinstance(key[0], str) and block.identity <= key[0]
            assert not is_older, f"block {block.block_id} is older than its parent"
        if self._evicted is not None:
            self._evicted.check_integrity(identities)
        return identities
