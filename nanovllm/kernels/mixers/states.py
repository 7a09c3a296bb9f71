"""States of sequences in blocks of the paged cache, and the states that a step reads and writes.

A state is the bytes of `blocks_per_state` blocks, one after the other: first a block's part in the first layer's keys,
then its part in the second layer's, and so on, as the cache divides it. A layer's tensors lie at fixed offsets in a
state, and a table gives the blocks of each sequence's state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

TILE = 64
"""Prompt tokens of a tile, at most."""


@dataclass(frozen=True)
class StateTensor:
    """A layer's tensor in the states of all sequences.

    Attributes:
        pool: the memory of a cache in elements of the tensor, [parts, num_blocks, part_size], contiguous; a block has a
            part in each layer's keys and values.
        first: index of the tensor's first element in a state.
        shape: of the tensor in one state.
    """

    pool: torch.Tensor
    first: int
    shape: tuple[int, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a kernel that calls `causal_conv.place`."""
        parts, num_blocks, part_size = self.pool.shape
        return {
            "pool_ptr": self.pool, "first": self.first, "part_stride": num_blocks * part_size, "PARTS": parts,
            "PART_SIZE": part_size,
        }  # fmt: skip

    def read(self, table: torch.Tensor) -> torch.Tensor:
        """Return the tensor in a state; table: its blocks, [blocks_per_state]."""
        blocks, own = self._cover(table)
        return self.pool[:, blocks].transpose(0, 1).flatten()[own].view(self.shape)

    def write(self, values: torch.Tensor, table: torch.Tensor) -> None:
        """Overwrite the tensor in a state."""
        blocks, own = self._cover(table)
        elements = self.pool[:, blocks].transpose(0, 1).flatten()
        elements[own] = values.flatten()
        self.pool[:, blocks] = elements.view(len(blocks), len(self.pool), -1).transpose(0, 1)

    def _cover(self, table: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Return the blocks that hold the tensor, and its elements among theirs."""
        parts, _, part_size = self.pool.shape
        end, size = self.first + math.prod(self.shape), parts * part_size
        before = self.first // size
        return table[before : -(-end // size)].long(), slice(self.first - before * size, end - before * size)


@dataclass
class StateRows:
    """Decode rows, whose states are read and overwritten: one token each, or several in engines with drafts.

    With drafts, a row's state is stored one step late, when it is known which were right: a step keeps the inputs of a
    layer's recurrence in a ring for each slot, `[num_slots + 1, entries, size]`, with position p at entry `p %
    entries`, and the next one computes the accepted tokens again. Wrong drafts are overwritten, there and among the
    convolution's inputs. In a step without drafts the state after the row's token is stored at once.

    Attributes:
        positions: [num_rows] int32; of the first new token in its sequence.
        tables: [num_rows, blocks_per_state] int32; -1 for padding.
        per_row: tokens of a row, new or not; the new ones come first.
        slots, num_pending, num_new: [num_rows] int32; the slot, the accepted tokens that are not in the state, and the
            new ones (0: padding). None in engines without drafts, where a row has one new token.
    """

    positions: torch.Tensor
    tables: torch.Tensor
    per_row: int = 1
    slots: torch.Tensor | None = None
    num_pending: torch.Tensor | None = None
    num_new: torch.Tensor | None = None

    def present(self) -> Iterator[tuple[int, int, slice]]:
        """Yield each row but padding, its position, and its new tokens among the step's."""
        counts = (self.tables[:, 0] >= 0).tolist() if self.num_new is None else self.num_new.tolist()
        for row, (position, count) in enumerate(zip(self.positions.tolist(), counts, strict=True)):
            if count:
                yield row, position, slice(row * self.per_row, row * self.per_row + count)


@dataclass
class StateTiles:
    """Prompt tokens, in tiles of at most `TILE` that end where a state is written; on the device, for CUDA graphs.

    A chunk is consecutive tokens of one sequence in consecutive tiles.

    Attributes:
        tiles: [num_tiles, 4] int32; first token, number of tokens (0: padding), chunk, and row of `tables` in which the
            state after the tile is stored, or -1.
        chunks: [num_chunks, 5] int32; first token, position of that token in its sequence, row of `tables` of the state
            before it, or -1 for zeros, first tile, and number of tiles (0: padding).
        tables: [num_states, blocks_per_state] int32.
    """

    tiles: torch.Tensor
    chunks: torch.Tensor
    tables: torch.Tensor
