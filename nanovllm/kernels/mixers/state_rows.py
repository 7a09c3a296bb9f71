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
