"""Which of its blocks a sequence holds: all, or in groups of layers that have a sliding window, those of the window."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from nanovllm.engine.block import Block


class HeldBlocks:
    """Tells the blocks that sequences need, in each group of layers.

    Args:
        num_blocks, block_size: blocks of the cache, and tokens of one.
        windows: of each group, tokens that a layer sees at most, the query's own included; None if one sees all.
        max_chunk: most tokens of a sequence in one step.

    Attributes:
        num_groups: groups of layers.
        windowed: the groups in which blocks are released as a sequence goes on.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int | None], max_chunk: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self.num_groups = len(windows)
        self.windowed = [group for group, window in enumerate(windows) if window is not None]
        # At least 2, so that the block before the next token is always held.
        self._windows = [None if window is None else max(2, window) for window in windows]
        # Blocks that a long sequence needs to go on by a token, and by a whole chunk.
        self._fewest = [num_blocks + 1 if window is None else self._num_spanned(window) for window in self._windows]
        self._most = [self._num_spanned((window or 0) - 1 + max_chunk) for window in self._windows]

    def first(self, group: int, num_computed: int) -> int:
        """Return the first block that a sequence will still attend to in a group."""
        window = self._windows[group]
        return 0 if window is None else max(0, num_computed + 1 - window) // self._block_size

    def spans(self, num_computed: int, num_tokens: int) -> list[tuple[int, int]]:
        """Return, of each group, the first block that a sequence needs, and the end of those to give it.

        Where it has a window, these are as many as its next chunk takes, or as there would be for it if no other
        sequence had any.
        """
        num_filled = -(-num_tokens // self._block_size)
        if not self.windowed:
            return [(0, num_filled)] * self.num_groups
        share = max(0, self._num_blocks - self._num_needed(num_filled)) // len(self.windowed)
        spans = [(0, num_filled)] * self.num_groups
        for group in self.windowed:
            first = self.first(group, num_computed)
            spans[group] = first, min(num_filled, first + min(self._most[group], self._fewest[group] + share))
        return spans

    def num_usable(self, matched: Sequence[Sequence[Block | None]], num_tokens: int) -> int:
        """Return the length of the longest prefix that is cached as far as what follows sees, in each group.

        matched: of each group, its blocks, in none more than in the group before; None where one was evicted.
        """
        length = len(matched[-1])
        if not self.windowed:
            return length
        for group, blocks in enumerate(matched):
            if group not in self.windowed:
                length = _first_missing(blocks, 0, length)
        longer = -1
        while length != longer:
            longer = length
            for group in self.windowed:
                # Every length from a missing block up to this one needs that block: its window begins no later.
                first = self.first(group, min(length * self._block_size, num_tokens - 1))
                length = _first_missing(matched[group], first, length)
        return length

    def most(self, group: int) -> int:
        """Return the most blocks that a sequence holds in a group."""
        return min(self._num_blocks, self._most[group]) if group in self.windowed else self._num_blocks

    def most_tokens(self, max_model_len: int) -> int:
        """Return the most tokens, up to `max_model_len`, of a sequence that can be computed if it is alone."""
        lengths = range(-(-max_model_len // self._block_size) + 1)
        return (bisect_right(lengths, self._num_blocks, key=self._num_needed) - 1) * self._block_size

    def _num_needed(self, num_filled: int) -> int:
        """Return the blocks without which a sequence that fills so many in a group cannot go on."""
        return sum(min(num_filled, fewest) for fewest in self._fewest)

    def _num_spanned(self, num_tokens: int) -> int:
        """Return the most blocks in which so many consecutive tokens lie."""
        return (num_tokens + self._block_size - 2) // self._block_size + 1


def _first_missing(blocks: Sequence[Block | None], first: int, end: int) -> int:
    """Return the index of the first block from `first` on that was evicted, or `end` if none before it was."""
    return blocks.index(None, first, end) if None in blocks[first:end] else end
