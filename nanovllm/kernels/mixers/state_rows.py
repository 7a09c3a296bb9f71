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
class ReplayRows:
    """Rows of drafted tokens whose states are stored one step late, when it is known which drafts were right.

    A step keeps the inputs of a row's tokens. The next one puts the accepted ones before its own, and stores the state
    between the two. So a row has `width` places, and uses the first ones.

    Attributes:
        slots: [num_rows] int64.
        sources: [num_rows * width] int64; for each place, its input among the kept and the new ones of all rows.
        kept: [num_rows, tokens per row] int64; the new ones among these, the first of each row first.
        outputs: [num_tokens] int64; the place of each token of the rows.
        is_padding: [num_tokens] bool.
        tiles: the rows' places; a tile of what is replayed, and a tile of what is new.
    """

    slots: torch.Tensor
    sources: torch.Tensor
    kept: torch.Tensor
    outputs: torch.Tensor
    is_padding: torch.Tensor
    tiles: StateTiles


def replay_rows(
    slots: torch.Tensor, is_new: torch.Tensor, positions: torch.Tensor, num_pending: torch.Tensor,
    *, most_pending: int, tables: torch.Tensor,
) -> ReplayRows:  # fmt: skip
    """Lay out rows of drafted tokens.

    Args:
        slots: [num_rows] int64.
        is_new: [num_rows, tokens per row] bool; tokens that exist, which come last in a row. Padding has none.
        positions: [num_rows] int32; of the first new token.
        num_pending: [num_rows] int32; accepted tokens that are not in the state yet.
        most_pending: tokens whose inputs are kept of a slot.
        tables: [num_rows, blocks_per_state] int32; where the states are, and are stored.
    """
    (num_rows, per_row), device = is_new.shape, slots.device
    width, num_new = most_pending + per_row, is_new.sum(1, dtype=torch.int32)
    rows, pending = torch.arange(num_rows, device=device).unsqueeze(1), num_pending.unsqueeze(1)
    absent = per_row - num_new.unsqueeze(1)
    places, columns = torch.arange(width, device=device), torch.arange(per_row, device=device)
    sources = torch.where(places < pending, places, places - pending + most_pending + absent).clamp(max=width - 1)
    kept = (columns + most_pending + absent).clamp(max=width - 1)
    outputs = (columns - absent + pending).clamp(min=0)
    first, row = (rows * width).squeeze(1).int(), rows.squeeze(1).int()
    replayed = torch.stack((first, num_pending, row, row.where(num_pending > 0, -1)), 1)
    new = torch.stack((first + num_pending, num_new, row, torch.full_like(row, -1)), 1)
    # A chunk has no tile without tokens.
    is_row, replays = num_new > 0, (num_pending > 0).int()
    first_tile, num_tiles = 2 * row + 1 - replays, (1 + replays) * is_row.int()
    chunks = torch.stack((first, positions - num_pending, row.where(is_row, -1), first_tile, num_tiles), 1)
    return ReplayRows(
        slots=slots,
        sources=(rows * width + sources).flatten(),
        kept=rows * width + kept,
        outputs=(rows * width + outputs).flatten(),
        is_padding=(~is_row).repeat_interleave(per_row, output_size=num_rows * per_row),
        tiles=StateTiles(torch.stack((replayed, new), 1).flatten(0, 1), chunks, tables.contiguous()),
    )
