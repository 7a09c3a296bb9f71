"""Cache policies: how a sequence holds blocks of one group of layers, one class for each kind of cache.

Each answers four questions: which blocks a sequence needs for its next tokens, which it can release, how long a prefix
it can start from, and which blocks must be copied before it writes.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from typing_extensions import override

from nanovllm.engine.prefix_cache import FoundBlock
from nanovllm.runner.messages import PagedCache, StateCache


class CachePolicy(ABC):
    """Decides which blocks a sequence holds in one group of layers."""

    # Whether a prefix can be usable with blocks missing.
    has_gaps = True

    @abstractmethod
    def min_blocks(self, num_filled: int) -> int:
        """Return the fewest blocks with which a sequence that fills `num_filled` blocks can continue."""

    @abstractmethod
    def needed(self, num_computed: int, num_filled: int, share: int) -> range:
        """Return the blocks, by their index in the table, that a sequence needs to compute its next tokens.

        `num_filled` blocks hold all its tokens; `share` are the blocks that it may have beyond `min_blocks`.
        """

    def num_released(self, num_computed: int) -> int:
        """Return the number of leading blocks that a sequence no longer needs."""
        return 0

    @abstractmethod
    def usable_prefix(
        self, blocks: list[FoundBlock | None], length: int, num_tokens: int, has_state: Callable[[int], bool]
    ) -> int:
        """Return the most blocks, up to `length`, with which a sequence of `num_tokens` tokens can start.

        None stands for a missing block; `has_state` tells whether there is a state after a number of blocks.
        """

    @abstractmethod
    def copied(self, table: Sequence[int], first: int, is_shared: Callable[[int], bool]) -> list[int]:
        """Return the entries of a table to copy before the next token is written, whose keys go into block `first`."""


class PagedPolicy(CachePolicy):
    """A sequence holds the blocks of all its tokens, or of a sliding window and a next chunk of `max_chunk` tokens."""

    def __init__(self, kind: PagedCache, block_size: int, max_chunk: int) -> None:
        self.has_gaps = kind.window is not None
        # At least 2, so that the block before the next token is always held.
        self._window = sys.maxsize if kind.window is None else max(2, kind.window)
        self._block_size = block_size
        # Blocks needed to advance by one token, and by a whole chunk.
        self._fewest = self._num_spanned(self._window)
        self._most = self._num_spanned(self._window - 1 + max_chunk)

    @override
    def min_blocks(self, num_filled: int) -> int:
        return min(num_filled, self._fewest)

    @override
    def needed(self, num_computed: int, num_filled: int, share: int) -> range:
        first = self.num_released(num_computed)
        return range(first, min(num_filled, first + min(self._most, self._fewest + share)))

    @override
    def num_released(self, num_computed: int) -> int:
        return max(0, num_computed + 1 - self._window) // self._block_size

    @override
    def usable_prefix(
        self, blocks: list[FoundBlock | None], length: int, num_tokens: int, has_state: Callable[[int], bool]
    ) -> int:
        # Every length from a missing block up to this one needs that block: its window begins no later.
        first = self.num_released(min(length * self._block_size, num_tokens - 1))
        return blocks.index(None, first, length) if None in blocks[first:length] else length

    @override
    def copied(self, table: Sequence[int], first: int, is_shared: Callable[[int], bool]) -> list[int]:
        return [first] if first < len(table) and is_shared(table[first]) else []

    def _num_spanned(self, num_tokens: int) -> int:
        """Return the most blocks that `num_tokens` consecutive tokens can span."""
        return (num_tokens + self._block_size - 2) // self._block_size + 1


class StatePolicy(CachePolicy):
    """A sequence holds one state, of the tokens computed so far, in blocks of its own that steps overwrite."""

    def __init__(self, kind: StateCache, block_size: int) -> None:
        self.num_blocks, self._interval, self._block_size = kind.num_blocks, kind.interval, block_size

    @override
    def min_blocks(self, num_filled: int) -> int:
        return self.num_blocks

    @override
    def needed(self, num_computed: int, num_filled: int, share: int) -> range:
        return range(self.num_blocks)

    @override
    def usable_prefix(
        self, blocks: list[FoundBlock | None], length: int, num_tokens: int, has_state: Callable[[int], bool]
    ) -> int:
        # One token must be left to compute, from the state before it.
        length = min(length, (num_tokens - 1) // self._block_size)
        while length and not has_state(length):
            length -= 1
        return length

    @override
    def copied(self, table: Sequence[int], first: int, is_shared: Callable[[int], bool]) -> list[int]:
        return [index for index, block_id in enumerate(table) if is_shared(block_id)]

    def is_kept(self, num_blocks: int, num_prompt_tokens: int, branch: int) -> bool:
        """Whether the state after `num_blocks` blocks of a prompt is kept, for sequences that start with them.

        It is kept at regular intervals, at the last block end that leaves a token of the prompt to compute, and after
        `branch` blocks, where the prompt leaves cached keys: others may branch off there.
        """
        is_last = num_blocks == (num_prompt_tokens - 1) // self._block_size
        return num_blocks % self._interval == 0 or is_last or num_blocks == branch
