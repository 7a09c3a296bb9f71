"""The blocks that a sequence has of one group of layers."""

from __future__ import annotations

from collections.abc import Iterable


class BlockTable(list[int]):
    """Block ids by their index in the sequence.

    Attributes:
        num_released: leading entries that mean nothing: the blocks are outside the window, and the sequence has them no
            more.
        registered_identity: in the prefix cache, that of the block at the end of `Sequence.num_registered_blocks`.
    """

    __slots__ = ("num_released", "registered_identity")

    def __init__(self, block_ids: Iterable[int], num_released: int, registered_identity: int | str) -> None:
        super().__init__(block_ids)
        self.num_released = num_released
        self.registered_identity = registered_identity

    @property
    def held(self) -> list[int]:
        """The blocks that the sequence has."""
        return self[self.num_released :]
