"""The blocks that a sequence holds in a group of attention layers: of all its tokens, or of a sliding window."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nanovllm.engine.prefix_cache import FoundBlock
from nanovllm.runner.messages import PagedCache


class PagedPolicy:
    """Answers which blocks a sequence needs, which it can release, and how long a prefix it can start from.

    Args:
        kind: with the window, if there is one; then a sequence holds the blocks of the window and of its next chunk.
        block_size: tokens per block.
        max_chunk: most tokens of a sequence in one step.
    """

    def __init__(self, kind: PagedCache, block_size: int, max_chunk: int) -> None:
        # Whether a prefix can be usable with blocks missing.
        self.has_gaps = kind.window is not None
        # At least 2, so that the block before the next token is always held.
        self._window = sys.maxsize if kind.window is None else max(2, kind.window)
        self._block_size = block_size
        # Blocks needed to advance by one token, and by a whole chunk.
        self._fewest = self._num_spanned(self._window)
        self._most = self._num_spanned(self._window - 1 + max_chunk)

    def min_blocks(self, num_filled: int) -> int:
        """Return the fewest blocks with which a sequence that fills `num_filled` blocks can continue."""
        return min(num_filled, self._fewest)

    def needed(self, num_computed: int, num_filled: int, share: int) -> range:
        """Return the blocks, by their index in the table, that a sequence needs to compute its next tokens.

        Args:
            num_computed: its computed tokens.
            num_filled: blocks that all its tokens fill.
            share: blocks that it may have beyond `min_blocks`.
        """
        first = self.num_released(num_computed)
        return range(first, min(num_filled, first + min(self._most, self._fewest + share)))

    def num_released(self, num_computed: int) -> int:
        """Return the number of leading blocks that a sequence no longer needs."""
        return max(0, num_computed + 1 - self._window) // self._block_size

    def usable_prefix(self, blocks: Sequence[FoundBlock | None], length: int, num_tokens: int) -> int:
        """Return the most blocks, up to `length`, with which a sequence can start; None stands for a missing one."""
        # Every length from a missing block up to this one needs that block: its window begins no later.
        first = self.num_released(min(length * self._block_size, num_tokens - 1))
        return blocks.index(None, first, length) if None in blocks[first:length] else length

    def _num_spanned(self, num_tokens: int) -> int:
        """Return the most blocks that `num_tokens` consecutive tokens can span."""
        return (num_tokens + self._block_size - 2) // self._block_size + 1
