"""The state space of Mamba-2, token by token and in tiles of prompts.

With a step size t > 0, a decay a = exp(-exp(a_log) t), an input x, a key b, a query c and a state S, [state_size,
head_size], a token computes (Dao and Gu 2024, arXiv:2405.21060)

    S <- a S + b (t x)';  o = S' c + d x

In a tile that begins with the state S_0, let A_t be the product of the first t decays. Then, with u = t x,

    o_t = A_t S_0' c_t + sum_{s<=t} (A_t / A_s) (c_t' b_s) u_s + d x_t.

Ratios of decays are exponentials of differences of logarithms. Everything is computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from typing_extensions import override

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.mixers.causal_conv import state_ptrs
from nanovllm.kernels.mixers.recurrence import Recurrence
from nanovllm.kernels.mixers.states import TILE, StateRows, StateTiles

_STEP_COLUMNS, _SCAN_COLUMNS = 32, 64
"""Inputs of a head in a program, at most."""


@dataclass(frozen=True, kw_only=True)
class StateSpace(Recurrence):
    """The state space of a layer; channels are inputs, keys, queries, and gates are step sizes of heads.

    The step size of a token is softplus(dt + dt_bias), within limits. A state is [num_heads, state_size, head_size].

    Attributes:
        num_groups: of keys and queries; each group serves consecutive heads.
        d: [num_heads] float32.
        step_limits: least and largest step size.
        norm_weight: [num_heads * head_size]; the norm is over the heads of a group. None: no norm.
    """

    num_groups: int
    d: torch.Tensor
    step_limits: tuple[float, float]

    @override
    def scan(
        self, channels: torch.Tensor, gates: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        heads, state_size, size = self.state.shape
        keys = self.num_groups * state_size
        x, b, c = channels.float().split([heads * size, keys, keys], 1)
        x = x.unflatten(1, (heads, size)).transpose(0, 1)
        b, c = (
            part.unflatten(1, (self.num_groups, -1)).repeat_interleave(heads // self.num_groups, 1).transpose(0, 1)
            for part in (b, c)
        )
        steps = functional.softplus(gates.float() + self.dt_bias).clamp(*self.step_limits).T
        total = (-self.a_log.exp().unsqueeze(1) * steps).cumsum(1)
        ratios = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
        u = x * steps.unsqueeze(2)
        out = total.exp().unsqueeze(2) * (c @ state) + ((c @ b.transpose(1, 2)) * ratios) @ u
        out = out + self.d[:, None, None] * x
        to_end = (total[:, -1:] - total).exp().unsqueeze(2)
        return out.transpose(0, 1), total[:, -1, None, None].exp() * state + (b * to_end).transpose(1, 2) @ u

    @override
    def gated_norm_ref(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        # `norm(out * silu(z))`
        wide = out.flatten(1).to(z.dtype).float() * functional.silu(z.float())
        if self.norm_weight is not None:
            groups = wide.unflatten(1, (self.num_groups, -1))
            groups = groups * torch.rsqrt(groups.square().mean(2, keepdim=True) + self.eps)
            wide = groups.flatten(1) * self.norm_weight.float()
        return wide.to(z.dtype)

    @override
    def run_rows(self, tokens: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, rows: StateRows) -> None:
        columns = self._columns(_STEP_COLUMNS)
        assert gates.stride(1) == 1
        _mamba2_step_kernel[(len(rows.tables), self.state.shape[0], self.state.shape[2] // columns)](
            tokens, gates, out, slots_ptr=rows.slots, positions_ptr=rows.positions, num_pending_ptr=rows.num_pending,
            num_new_ptr=rows.num_new, tables_ptr=rows.tables, table_stride=rows.tables.stride(0), COLUMNS=columns,
            PER_ROW=rows.per_row, ENTRIES=0 if rows.slots is None else tokens.shape[1], num_warps=4,
            **self._arguments(gates),
        )  # fmt: skip

    @override
    def run_tiles(
        self, x: torch.Tensor, channels: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, tiles: StateTiles
    ) -> None:
        columns = self._columns(_SCAN_COLUMNS)
        assert gates.stride(1) == 1
        _mamba2_scan_kernel[(len(tiles.chunks), self.state.shape[0], self.state.shape[2] // columns)](
            channels, gates, out, tiles_ptr=tiles.tiles, chunks_ptr=tiles.chunks, tables_ptr=tiles.tables,
            table_stride=tiles.tables.stride(0), COLUMNS=columns, TILE=TILE,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=8, num_stages=1,
            **self._arguments(gates),
        )  # fmt: skip

    def _arguments(self, gates: torch.Tensor) -> dict[str, Any]:
        """Return arguments that both kernels have."""
        return {
            "a_log_ptr": self.a_log, "dt_bias_ptr": self.dt_bias, "d_ptr": self.d, "least": self.step_limits[0],
            "most": self.step_limits[1], "dt_stride": gates.stride(0), "GROUPS": self.num_groups,
            **dict(zip(("HEADS", "STATE", "SIZE"), self.state.shape, strict=True)), **self.state.arguments,
            **pdl_options(gates.device),
        }  # fmt: skip

    @override
    def gated_norm(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        normed, size = torch.empty_like(out), out.shape[1] // self.num_groups
        block = triton.next_power_of_2(size)
        assert z.stride(1) == 1
        _gated_group_norm_kernel[(len(out), self.num_groups)](
            out, z, self.norm_weight, normed, self.eps, z.stride(0), SIZE=size, GROUPS=self.num_groups,
            BLOCK=block, num_warps=min(8, max(1, block // 512)), **pdl_options(out.device),
        )  # fmt: skip
        return normed

    def _columns(self, most: int) -> int:
        size = self.state.shape[2]
        return min(size & -size, most)


@jit
def _step_size(dt, bias, least, most):
    dt += bias
    return tl.minimum(tl.maximum(tl.where(dt > 20, dt, tl.log(1 + tl.exp(dt))), least), most)


@jit(unaligned=["dt_ptr", "slots_ptr", "positions_ptr", "num_pending_ptr", "num_new_ptr", "tables_ptr"])
def _mamba2_step_kernel(
    tokens_ptr, dt_ptr, out_ptr, a_log_ptr, dt_bias_ptr, d_ptr, pool_ptr, slots_ptr, positions_ptr, num_pending_ptr,
    num_new_ptr, tables_ptr, first, least, most, dt_stride, table_stride, part_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    PER_ROW: tl.constexpr, ENTRIES: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    keys, columns = tl.arange(0, STATE), tl.arange(0, COLUMNS)
    inputs, table_ptr = head * SIZE + part * COLUMNS + columns, tables_ptr + row * table_stride
    CHANNELS: tl.constexpr = HEADS * SIZE + 2 * GROUPS * STATE
    if ENTRIES > 0:
        slot, position = tl.load(slots_ptr + row).to(tl.int64), tl.load(positions_ptr + row)
        num_pending, num_new = tl.load(num_pending_ptr + row), tl.load(num_new_ptr + row)
        num_tokens, num_stored = num_pending + num_new, num_pending + (num_new if PER_ROW == 1 else 0)
    else:
        num_new = tl.where(tl.load(table_ptr) >= 0, 1, 0)
        num_pending, num_tokens, num_stored = 0, 1, 1
    if num_new == 0:
        wait_for_previous(PDL)
    else:
        # Slices of rows of a state. No kernel of this layer's projections writes to it.
        lines = first + (head * STATE + keys) * SIZE + part * COLUMNS
        own_ptrs = state_ptrs(pool_ptr, table_ptr, lines, columns, part_stride, PARTS, PART_SIZE)
        state = tl.load(own_ptrs)
        wait_for_previous(PDL)
        a, bias, d = -tl.exp(tl.load(a_log_ptr + head)), tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
        for index in range(num_tokens):
            token = row * PER_ROW + index - num_pending
            if ENTRIES > 0:
                entry = slot * ENTRIES + (position - num_pending + index) % ENTRIES
                token_ptr = tokens_ptr + entry * (CHANNELS + HEADS)
                dt = tl.load(token_ptr + CHANNELS + head)
            else:
                token_ptr = tokens_ptr + row * CHANNELS
                dt = tl.load(dt_ptr + row * dt_stride + head)
            dt = _step_size(dt.to(tl.float32), bias, least, most)
            key_ptrs = token_ptr + HEADS * SIZE + head // (HEADS // GROUPS) * STATE + keys
            x = tl.load(token_ptr + inputs).to(tl.float32)
            b = tl.load(key_ptrs).to(tl.float32)
            c = tl.load(key_ptrs + GROUPS * STATE).to(tl.float32)
            state = state * tl.exp(a * dt) + b[:, None] * (x * dt)[None, :]
            if index + 1 == num_stored:
                tl.store(own_ptrs, state)
            if index >= num_pending:
                out = tl.sum(state * c[:, None], axis=0) + d * x
                tl.store(out_ptr + token * (HEADS * SIZE) + inputs, out.to(out_ptr.dtype.element_ty))
    for index in range(num_new, PER_ROW):
        out_ptrs = out_ptr + (row * PER_ROW + index) * (HEADS * SIZE) + inputs
        tl.store(out_ptrs, tl.zeros([COLUMNS], out_ptr.dtype.element_ty))


@jit(unaligned=["dt_ptr", "tiles_ptr", "chunks_ptr", "tables_ptr"])
def _mamba2_scan_kernel(
    conv_ptr, dt_ptr, out_ptr, a_log_ptr, dt_bias_ptr, d_ptr, pool_ptr, tiles_ptr, chunks_ptr, tables_ptr,
    first, least, most, dt_stride, table_stride, part_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk_ptr, head, part = chunks_ptr + tl.program_id(0) * 5, tl.program_id(1), tl.program_id(2)
    read, first_tile, num_tiles = tl.load(chunk_ptr + 2), tl.load(chunk_ptr + 3), tl.load(chunk_ptr + 4)
    index, keys, columns = tl.arange(0, TILE), tl.arange(0, STATE), tl.arange(0, COLUMNS)
    causal = index[:, None] >= index[None, :]
    inputs = head * SIZE + part * COLUMNS + columns
    lines = first + (head * STATE + keys) * SIZE + part * COLUMNS
    state = tl.zeros([STATE, COLUMNS], tl.float32)
    a, bias, d = -tl.exp(tl.load(a_log_ptr + head)), tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
    wait_for_previous(PDL)
    if (read >= 0) & (num_tiles > 0):
        table_ptr = tables_ptr + read * table_stride
        state = tl.load(state_ptrs(pool_ptr, table_ptr, lines, columns, part_stride, PARTS, PART_SIZE))
    for tile in range(first_tile, first_tile + num_tiles):
        first_token, count = tl.load(tiles_ptr + tile * 4), tl.load(tiles_ptr + tile * 4 + 1)
        write, mask, tokens = tl.load(tiles_ptr + tile * 4 + 3), index < count, (first_token + index).to(tl.int64)
        token_ptrs = conv_ptr + tokens[:, None] * (HEADS * SIZE + 2 * GROUPS * STATE)
        key_ptrs = token_ptrs + HEADS * SIZE + head // (HEADS // GROUPS) * STATE + keys[None, :]
        x = tl.load(token_ptrs + inputs[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
        b = tl.load(key_ptrs, mask=mask[:, None], other=0.0).to(tl.float32)
        c = tl.load(key_ptrs + GROUPS * STATE, mask=mask[:, None], other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + tokens * dt_stride + head, mask=mask, other=0.0).to(tl.float32)
        # Tokens beyond the tile's end keep the state as it is.
        dt = tl.where(mask, _step_size(dt, bias, least, most), 0.0)
        total = tl.cumsum(a * dt, axis=0)
        # Not the sum of decays, which is rounded otherwise.
        last = tl.sum(tl.where(index == TILE - 1, total, 0.0), axis=0)
        ratios = tl.exp(tl.where(causal, total[:, None] - total[None, :], float("-inf")))
        u = x * dt[:, None]
        out = tl.dot(c * tl.exp(total)[:, None], state, input_precision=PRECISION) + d * x
        scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * ratios
        out += tl.dot(scores, u, input_precision=PRECISION)
        out_ptrs = out_ptr + tokens[:, None] * (HEADS * SIZE) + inputs[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask[:, None])
        grown = tl.dot(tl.trans(b * tl.exp(last - total)[:, None]), u, input_precision=PRECISION)
        state = state * tl.exp(last) + grown
        if write >= 0:
            table_ptr = tables_ptr + write * table_stride
            tl.store(state_ptrs(pool_ptr, table_ptr, lines, columns, part_stride, PARTS, PART_SIZE), state)


@jit
def _gated_group_norm_kernel(
    x_ptr, z_ptr, weight_ptr, out_ptr, eps, z_stride,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask, places = columns < SIZE, tl.program_id(1) * SIZE + columns
    wait_for_previous(PDL)
    x = tl.load(x_ptr + token * (GROUPS * SIZE) + places, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * z_stride + places, mask=mask, other=0.0).to(tl.float32)
    x *= z / (1 + tl.exp(-z))
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + places, mask=mask, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight
    tl.store(out_ptr + token * (GROUPS * SIZE) + places, x.to(out_ptr.dtype.element_ty), mask=mask)
