"""The common part of layers with a recurrence after a short convolution: the gated delta rule and Mamba-2.

Their plain torch forms of a step differ in the recurrence itself (`scan`) and the norm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import uses_triton
from nanovllm.kernels.mixers.causal_conv import causal_conv, causal_conv_rows, store_rings_ref
from nanovllm.kernels.mixers.states import ConvState, StatePool, StateRows, StateTiles


@dataclass(frozen=True, kw_only=True)
class Recurrence(ABC):
    """A layer's parameters and the places of its states, for one rank.

    Attributes:
        conv_weight: [channels, width], conv_bias: [channels] or None.
        a_log, dt_bias: [num_heads] float32; of the decays of heads.
        norm_weight: of the output's norm with a gate, and eps.
        conv: where the convolution's inputs are kept.
        pool: the states' memory as float32.
        first: index of the layer's first element in a state.
        shape: of a sequence's state in the layer, [num_heads, size, output size].
        kept: in engines with drafts, the convolution's outputs and the gates of tokens; see `StateRows`.
    """

    conv_weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor | None
    eps: float
    conv: ConvState
    pool: StatePool
    first: int
    shape: tuple[int, int, int]
    conv_bias: torch.Tensor | None = None
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
        """Compute decode rows after the convolution; tokens: its result."""

    @abstractmethod
    def run_tiles(
        self, x: torch.Tensor, channels: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, tiles: StateTiles
    ) -> None:
        """Compute prompt tokens after the convolution, and store the inputs of the convolution, x."""

    def step(self, x: torch.Tensor, gates: torch.Tensor, z: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """Compute the new tokens of decode rows, and their states; returns outputs like z, zeros where no token is new.

        x: [num_tokens, channels], the convolution's inputs; gates: [num_tokens, size], further inputs of the
        recurrence, before its activations; z: [num_tokens, ...], the output's gate.
        """
        if not uses_triton(x.device):
            return self.step_ref(x, gates, z, rows)
        tokens, out = self._convolve_rows(x, gates, rows), torch.empty(z.shape, dtype=z.dtype, device=z.device)
        self.run_rows(tokens, gates, out, rows)
        return self.gated_norm(out, z)

    def prompt(self, x: torch.Tensor, gates: torch.Tensor, z: torch.Tensor, tiles: StateTiles) -> torch.Tensor:
        """Compute the prompt tokens of a step, and the states after them; arguments as of `step`."""
        if not uses_triton(x.device):
            return self.prompt_ref(x, gates, z, tiles)
        channels = causal_conv(x, self.conv_weight, self.conv_bias, self.conv, tiles)
        out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        self.run_tiles(x, channels, gates, out, tiles)
        return self.gated_norm(out, z)

    def _convolve_rows(self, x: torch.Tensor, gates: torch.Tensor, rows: StateRows) -> torch.Tensor:
        kept = None if rows.slots is None else self.kept
        return causal_conv_rows(x, self.conv_weight, self.conv_bias, self.conv, rows, gates=gates, kept=kept)

    def step_ref(self, x: torch.Tensor, gates: torch.Tensor, z: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """Plain torch form of `step`."""
        out, result = torch.zeros(len(x), *self.shape[::2], device=x.device), self._convolve_rows(x, gates, rows)
        for table, position, new in rows.present():
            channels, own_gates, num_pending, num_stored = result[new], gates[new], 0, 1
            if rows.slots is not None and rows.num_pending is not None:
                row, num_new = new.start // rows.per_row, new.stop - new.start
                num_pending = int(rows.num_pending[row])
                num_stored = num_pending + num_new * (rows.per_row == 1)
                entries = torch.arange(position - num_pending, position + num_new, device=x.device) % result.shape[1]
                tokens = result[int(rows.slots[row]), entries]
                channels, own_gates = tokens[:, : x.shape[1]], tokens[:, x.shape[1] :]
            state = self.pool.read(self.first, self.shape, table)
            if num_stored:
                stored = self.scan(channels[:num_stored], own_gates[:num_stored], state)[1]
                self.pool.write(self.first, stored, table)
            out[new] = self.scan(channels, own_gates, state)[0][num_pending:]
        return self.gated_norm_ref(out, z)

    def prompt_ref(self, x: torch.Tensor, gates: torch.Tensor, z: torch.Tensor, tiles: StateTiles) -> torch.Tensor:
        """Plain torch form of `prompt`."""
        out = torch.zeros(len(x), *self.shape[::2], device=x.device)
        channels = causal_conv(x, self.conv_weight, self.conv_bias, self.conv, tiles)
        # All chunks read what they start from before a state is written.
        states = [
            torch.zeros(self.shape, device=x.device) if read < 0
            else self.pool.read(self.first, self.shape, tiles.tables[read]) for read in tiles.chunks[:, 2].tolist()
        ]  # fmt: skip
        store_rings_ref(x, self.conv_weight.shape[1], self.conv, tiles)
        for first, count, chunk, write in tiles.tiles.tolist():
            if count:
                part = slice(first, first + count)
                out[part], states[chunk] = self.scan(channels[part], gates[part], states[chunk])
                if write >= 0:
                    self.pool.write(self.first, states[chunk], tiles.tables[write])
        return self.gated_norm_ref(out, z)
