"""Remembers which evicted blocks cached ones follow.

A cached block is found by the identity of the block before it. Where layers have sliding windows, the head of a prefix
is freed, and evicted, before its tail, which is all that a sequence with this prefix needs.
"""

from __future__ import annotations

from collections import Counter

Identity = int | str
BlockKey = tuple[Identity, bytes]
"""What a cached block holds: the identity of the block before it, and its tokens as bytes.

Equal keys mean equal prefixes, since identities are never used twice; a dict compares the keys behind their hashes.
"""


class EvictedPrefixes:
    """Keys and identities of evicted blocks, as long as a cached block follows. O(1) for each block."""

    def __init__(self) -> None:
        self._identities: dict[BlockKey, int] = {}
        self._keys: dict[Identity, BlockKey] = {}
        # By identity: cached and evicted blocks that follow it directly.
        self._num_children: Counter[Identity] = Counter()

    def find(self, key: BlockKey) -> int | None:
        """Return the identity of an evicted block."""
        return self._identities.get(key)

    def on_registered(self, key: BlockKey) -> int | None:
        """Take in that a block is cached; returns the identity by which others follow it already."""
        identity = self._identities.pop(key, None)
        if identity is None:
            self._num_children[key[0]] += 1
        else:
            del self._keys[identity]
        return identity

    def on_evicted(self, key: BlockKey, identity: int) -> None:
        """Take in that a block is evicted; forgets it, and what came before it, if nothing that is cached follows."""
        self._identities[key], self._keys[identity] = identity, key
        last: Identity = identity
        while not self._num_children[last] and last in self._keys:
            key = self._keys.pop(last)
            del self._identities[key]
            last = key[0]
            self._num_children[last] -= 1
            if not self._num_children[last]:
                del self._num_children[last]

    def check_integrity(self, cached: dict[BlockKey, int]) -> None:
        """Assert that exactly what is needed is here, given the identities of cached blocks; for tests."""
        keys = [*cached, *self._identities]
        assert self._num_children == Counter(parent for parent, _ in keys), "children are miscounted"
        assert self._keys == {identity: key for key, identity in self._identities.items()}
        assert not self._identities.keys() & cached.keys(), "a block is cached and evicted"
        assert all(self._num_children[identity] for identity in self._keys), "nothing follows an evicted block"
