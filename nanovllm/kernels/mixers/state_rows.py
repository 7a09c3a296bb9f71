"""The states that the tokens of a step start from and leave, as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE = 64
"""Prompt tokens of a tile, at most."""


@dataclass
class StateRows:
    """Decode rows: one token each.

    Attributes:
        positions: [num_rows] int32; of the tokens in their sequences.
        reads, writes: [num_rows, blocks_per_state] int32; blocks of the state before the token, and of the state after
            it, which may be the same. A padding row has -1 in `writes`.
    """

    positions: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor


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


@dataclass
class DraftedStateRows:
    """Rows of drafted tokens, whose states are stored one step late, when it is known which drafts were right.

    A step without drafts has rows of one token, which is right, and stores the states after them at once.

    A step keeps what the recurrence of a layer reads of its tokens: of each slot in a ring, `[num_slots + 1, entries,
    size]`, in which the token at position p is entry `p % entries`. The next step computes the accepted ones again, and
    stores the state between them and its own. Wrong drafts are overwritten, there and among the convolution's inputs.

    Attributes:
        rows: [num_rows, 4] int32; slot, position of the first new token, accepted tokens before it that are not in the
            state, and number of new tokens (0: padding), which come last in a row.
        tables: [num_rows, blocks_per_state] int32; where the states are, and are stored.
        per_row: tokens of a row, new or not.
    """

    rows: torch.Tensor
    tables: torch.Tensor
    per_row: int

    def num_stored(self, row: int) -> int:
        """Return the accepted and new tokens of a row that its stored state includes."""
        num_pending, num_new = self.rows[row, 2:].tolist()
        return num_pending + num_new * (self.per_row == 1)

    def new_tokens(self, row: int) -> slice:
        """Return the new tokens of a row among the step's."""
        end = (row + 1) * self.per_row
        return slice(end - int(self.rows[row, 3]), end)

    def kept_tokens(self, kept: torch.Tensor, row: int) -> torch.Tensor:
        """Return what is kept of a row's tokens, the accepted ones and the new ones."""
        slot, position, num_pending, num_new = self.rows[row].tolist()
        return kept[slot, torch.arange(position - num_pending, position + num_new, device=kept.device) % kept.shape[1]]


def drafted_state_rows(
    slots: torch.Tensor, positions: torch.Tensor, num_pending: torch.Tensor, is_new: torch.Tensor, tables: torch.Tensor
) -> DraftedStateRows:
    """Lay out rows of drafted tokens.

    Args:
        slots, positions, num_pending: [num_rows] int32; see `DraftedStateRows`.
        is_new: [num_rows, tokens per row] bool; tokens that exist, which come last in a row. Padding has none.
        tables: [num_rows, blocks_per_state] int32.
    """
    rows = torch.stack((slots, positions, num_pending, is_new.sum(1, dtype=torch.int32)), 1)
    return DraftedStateRows(rows, tables, is_new.shape[1])
