"""Which of its blocks a sequence holds: all, or where all layers have a sliding window, those of the window."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.engine.block import Block


class HeldBlocks:
    """Tells the blocks that sequences need.

    Args:
        num_blocks, block_size: blocks of the cache, and tokens of one.
        window: tokens that each layer sees at most, the query's own included; None if a layer sees all.
        max_chunk: most tokens of a sequence in one step.

    Attributes:
        most: most blocks that a sequence holds.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int | None, max_chunk: int) -> None:
        self._block_size = block_size
        # At least 2, so that the block before the next token is always held.
        self._window = None if window is None else max(2, window)
        self.most = num_blocks
        if self._window is not None:
            self.most = min(num_blocks, self._num_spanned(self._window - 1 + max_chunk))
        # Whether a sequence of any length fits into the cache: a window of it does.
        self.fits_any_length = self._window is not None and self._num_spanned(self._window) <= num_blocks

    @property
    def has_window(self) -> bool:
        """Whether blocks are released as a sequence goes on."""
        return self._window is not None

    def span(self, num_computed: int, num_tokens: int) -> tuple[int, int]:
        """Return the first block that a sequence of so many tokens needs, and the end of those to give it."""
        end = -(-num_tokens // self._block_size)
        if self._window is None:
            return 0, end
        first = max(0, num_computed + 1 - self._window) // self._block_size
        return first, min(end, first + self.most)

    def num_usable(self, matched: Sequence[Block | None], num_tokens: int) -> int:
        """Return the length of the longest prefix whose blocks are cached as far as the window of what follows goes."""
        num_usable = num_consecutive = 0
        for length, block in enumerate(matched, 1):
            num_consecutive = 0 if block is None else num_consecutive + 1
            first, _ = self.span(min(length * self._block_size, num_tokens - 1), num_tokens)
            if length - num_consecutive <= first:
                num_usable = length
        return num_usable

    def _num_spanned(self, num_tokens: int) -> int:
        """Return the most blocks in which so many consecutive tokens lie."""
        return (num_tokens + self._block_size - 2) // self._block_size + 1
