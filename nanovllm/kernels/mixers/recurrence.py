"""The common part of layers with a recurrence after a short convolution: the gated delta rule and Mamba-2."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from nanovllm.kernels._triton import uses_triton
from nanovllm.kernels.mixers.causal_conv import CausalConv
from nanovllm.kernels.mixers.states import StateRows, StateTensor, StateTiles


@dataclass(frozen=True, kw_only=True)
class Recurrence(ABC):
    """A layer's parameters and the places of its states, for one rank.

    Attributes:
        conv: the convolution.
        state: float32, [num_heads, size, output size] in one state.
        a_log, dt_bias: [num_heads] float32; of the decays of heads.
        norm_weight: of the output's norm with a gate, and eps.
        kept: in engines with drafts, the convolution's outputs and the gates of tokens; see `StateRows`.
        stores_inputs: whether `run_tiles` stores the convolution's inputs, too.
    """

    stores_inputs: ClassVar[bool] = False

    conv: CausalConv
    state: StateTensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor | None
    eps: float
    kept: torch.Tensor | None = None

    @abstractmethod
    def scan(
        self, channels: torch.Tensor, gates: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs of a tile, [num_tokens, num_heads, output size] float32, and the state after it.

        channels: [num_tokens, channels], after the convolution; gates: [num_tokens, size]; state: before it, float32.
        """

    @abstractmethod
    def gated_norm_ref(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return the norm of outputs with their gate in plain torch, like z."""

    @abstractmethod
    def gated_norm(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Compute `gated_norm_ref` of contiguous outputs."""

    @abstractmethod
    def run_rows(self, tokens: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, rows: StateRows) -> None:
        """Compute `run_rows_ref`."""

    @abstractmethod
    def run_tiles(
        self, x: torch.Tensor, channels: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, tiles: StateTiles
    ) -> None:
        """Compute `run_tiles_ref`; x: the convolution's inputs, see `stores_inputs`. Leaves padding as it is."""

    def step(self, x: torch.Tensor, gates: torch.Tensor, z: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """Compute the new tokens of decode rows, and their states; returns outputs like z, zeros where no token is new.

        x: [num_tokens, channels], the convolution's inputs; gates: [num_tokens, size], further inputs of the
        recurrence, before its activations; z: [num_tokens, ...], the output's gate.
        """
        tokens = self.conv.step(x, rows, gates, None if rows.slots is None else self.kept)
        out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        if not uses_triton(x.device):
            self.run_rows_ref(tokens, gates, out, rows)
            return self.gated_norm_ref(out, z)
        self.run_rows(tokens, gates, out, rows)
        return self.gated_norm(out, z)

    def prompt(self, x: torch.Tensor, gates: torch.Tensor, z: torch.Tensor, tiles: StateTiles) -> torch.Tensor:
        """Compute the prompt tokens of a step, and the states after them; arguments as of `step`."""
        channels = self.conv.prompt(x, tiles, stores=not self.stores_inputs)
        out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        if not uses_triton(x.device):
            self.run_tiles_ref(channels, gates, out, tiles)
            return self.gated_norm_ref(out, z)
        self.run_tiles(x, channels, gates, out, tiles)
        return self.gated_norm(out, z)

    def run_rows_ref(self, tokens: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, rows: StateRows) -> None:
        """Fill `out` with the outputs of decode rows before the norm; tokens: what the convolution returns."""
        out.zero_()
        for row, position, new in rows.present():
            channels, own_gates, num_pending, num_stored = tokens[new], gates[new], 0, 1
            if rows.slots is not None and rows.num_pending is not None:
                num_pending, num_new = int(rows.num_pending[row]), new.stop - new.start
                num_stored = num_pending + num_new * (rows.per_row == 1)
                entries = torch.arange(position - num_pending, position + num_new, device=out.device) % tokens.shape[1]
                kept = tokens[int(rows.slots[row]), entries]
                channels, own_gates = kept.split([kept.shape[1] - gates.shape[1], gates.shape[1]], 1)
            state = self.state.read(rows.tables[row])
            if num_stored:
                stored = self.scan(channels[:num_stored], own_gates[:num_stored], state)[1]
                self.state.write(stored, rows.tables[row])
            out[new] = self.scan(channels, own_gates, state)[0][num_pending:].reshape(out[new].shape)

    def run_tiles_ref(self, channels: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, tiles: StateTiles) -> None:
        """Fill `out` with the outputs of prompt tokens before the norm; channels: what the convolution returns."""
        out.zero_()
        # All chunks read what they start from before a state is written.
        states = [
            torch.zeros(self.state.shape, device=out.device) if read < 0 else self.state.read(tiles.tables[read])
            for read in tiles.chunks[:, 2].tolist()
        ]
        for first, count, chunk, write in tiles.tiles.tolist():
            if count:
                part = slice(first, first + count)
                outs, states[chunk] = self.scan(channels[part], gates[part], states[chunk])
                out[part] = outs.reshape(out[part].shape)
                if write >= 0:
                    self.state.write(states[chunk], tiles.tables[write])
