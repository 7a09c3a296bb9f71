"""The blocks that a sequence has of one group of layers."""

from __future__ import annotations


class BlockTable:
    """Blocks by their index in the sequence.

    Attributes:
        block_ids: the blocks; the released ones mean nothing.
        num_released: leading entries of `block_ids` that the sequence has no more: they are outside the window.
        registered_identity: that of the last registered block in the prefix cache; see `Sequence`.
    """

    __slots__ = ("block_ids", "num_released", "registered_identity")

    def __init__(self, block_ids: list[int], num_released: int, registered_identity: int | str) -> None:
        self.block_ids = block_ids
        self.num_released = num_released
        self.registered_identity = registered_identity

    @property
    def held(self) -> list[int]:
        """The blocks that the sequence has."""
        return self.block_ids[self.num_released :]
