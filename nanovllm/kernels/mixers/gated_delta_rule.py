"""The gated delta rule, token by token and in tiles of prompts.

With a decay a in (0, 1], a step size b, a key k, a query q, a value v and a state S, [key_size, value_size], a token
computes (Yang et al. 2024, arXiv:2412.06464)

    S <- a S;  u = b (v - S' k);  S <- S + k u';  o = S' q

In a tile that begins with the state S_0, let A_t be the product of the first t decays. Then the u of its tokens solve a
lower triangular system (arXiv:2406.06484),

    u_t + b_t sum_{s<t} (A_t / A_s) (k_t' k_s) u_s = b_t v_t - b_t A_t S_0' k_t,

whose inverse T needs no state, so it is computed for all tiles at once; the tiles of a chunk then follow one another,
each with u = T b (v - A k S_0). Ratios of decays are exponentials of differences of logarithms. Everything is
computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional
from typing_extensions import override

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, wait_for_previous
from nanovllm.kernels.mixers.causal_conv import state_ptrs, store_ring
from nanovllm.kernels.mixers.recurrence import Recurrence
from nanovllm.kernels.mixers.states import TILE, StateRows, StateTiles

_EPS = 1e-6
"""Added to the squared length of queries and keys."""
_COLUMNS = 32
"""Values of a slice of a state. Few, so that many programs of a multiprocessor hide each other's latency."""
_FEW_TOKENS = 8
"""Tokens up to which a program normalises 4 heads of outputs, instead of 16."""
_FEWEST_HEADS = 128
"""Heads of all rows from which on a program takes all slices of its head, of twice the values, one after the other."""


@dataclass(frozen=True, kw_only=True)
class DeltaRule(Recurrence):
    """The rule of a layer; channels are queries, keys, values, and gates are step sizes, then decays, of heads.

    The decay of a token is exp(-exp(a_log) * softplus(a + dt_bias)), its step size sigmoid(b). A state is
    [heads of values, key_size, value_size].

    Attributes:
        num_key_heads: heads of queries and keys, each for a group of consecutive heads of values.
        norm_weight: [value_size].
    """

    stores_inputs = True

    num_key_heads: int
    norm_weight: torch.Tensor

    @property
    def sizes(self) -> dict[str, int]:
        """Arguments of kernels."""
        heads, key, value = self.state.shape
        return {"KEY_HEADS": self.num_key_heads, "GROUP": heads // self.num_key_heads, "KEY": key, "VALUE": value}

    def heads(self, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys, normalised and scaled, and values, [heads of values, num_tokens, size] float32."""
        heads, key_size, value_size = self.state.shape
        key_dim = self.num_key_heads * key_size
        q, k, v = channels.float().split([key_dim, key_dim, heads * value_size], 1)
        q, k = (x.unflatten(1, (self.num_key_heads, key_size)) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (q, k))
        q, k = (x.repeat_interleave(heads // self.num_key_heads, 1) for x in (q * key_size**-0.5, k))
        return q.transpose(0, 1), k.transpose(0, 1), v.unflatten(1, (heads, value_size)).transpose(0, 1)

    @override
    def scan(
        self, channels: torch.Tensor, gates: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.heads(channels)
        b, a = gates.float().chunk(2, 1)
        b, log_decay = b.sigmoid().T.unsqueeze(-1), -self.a_log.exp() * functional.softplus(a + self.dt_bias)
        total = log_decay.T.cumsum(-1)
        ratios = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        decays = total.exp().unsqueeze(-1)
        system = (b * (k @ k.transpose(1, 2)) * ratios).tril(-1)
        target = b * (v - decays * (k @ state))
        updates = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
        out = decays * (q @ state) + ((q @ k.transpose(1, 2)) * ratios) @ updates
        to_end = (total[:, -1:] - total).exp().unsqueeze(-1)
        return out.transpose(0, 1), decays[:, -1:] * state + (k * to_end).transpose(1, 2) @ updates

    @override
    def gated_norm_ref(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        # `norm(out) * silu(z)`
        wide = out.to(z.dtype).float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.norm_weight.float() * functional.silu(z.float())).to(z.dtype)

    @override
    def run_rows(self, tokens: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, rows: StateRows) -> None:
        (heads, _, value), num_rows, pdl = self.state.shape, len(rows.tables), pdl_options(out.device)
        if rows.slots is not None:
            columns = min(value, _COLUMNS)
            _delta_rule_drafts_kernel[(num_rows, heads, value // columns)](
                tokens, out, self.a_log, self.dt_bias, slots_ptr=rows.slots, positions_ptr=rows.positions,
                num_pending_ptr=rows.num_pending, num_new_ptr=rows.num_new, tables_ptr=rows.tables,
                table_stride=rows.tables.stride(0), COLUMNS=columns, PER_ROW=rows.per_row, ENTRIES=tokens.shape[1],
                num_warps=4, **self.sizes, **self.state.arguments, **pdl,
            )  # fmt: skip
            return
        assert gates.stride(1) == 1
        takes_all = num_rows * heads >= _FEWEST_HEADS
        columns = min(value, 2 * _COLUMNS if takes_all else _COLUMNS)
        num_slices = value // columns
        in_turn = num_slices if takes_all else 1
        b, a = gates.split(heads, 1)
        _delta_rule_step_kernel[(num_rows, heads, num_slices // in_turn)](
            tokens, a, b, out, self.a_log, self.dt_bias, tables_ptr=rows.tables, a_stride=a.stride(0),
            b_stride=b.stride(0), table_stride=rows.tables.stride(0), COLUMNS=columns, SLICES=in_turn, num_warps=4,
            **self.sizes, **self.state.arguments, **pdl,
        )  # fmt: skip

    @override
    def run_tiles(
        self, x: torch.Tensor, channels: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, tiles: StateTiles
    ) -> None:
        # For each tile and head what needs no state; then the scan of each chunk, head and slice over its tiles.
        num_tiles, pdl = len(tiles.tiles), pdl_options(x.device)
        heads, _, value = self.state.shape
        b, a = gates.split(heads, 1)
        columns = min(value, _COLUMNS)
        options = {**self.sizes, "TILE": TILE, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32", **pdl}
        inverse = torch.empty(num_tiles, heads, TILE, TILE, dtype=torch.float32, device=x.device)
        scores, factors = torch.empty_like(inverse, dtype=x.dtype), torch.empty_like(inverse[:, :, :4])
        _delta_rule_tiles_kernel[(num_tiles, heads)](
            channels, a, b, self.a_log, self.dt_bias, inverse, scores, factors, tiles.tiles, a.stride(0), b.stride(0),
            num_warps=4, **options,
        )  # fmt: skip
        ring, num_slices = self.conv.sizes, heads * (value // columns)
        _delta_rule_scan_kernel[(value // columns, heads, len(tiles.chunks))](
            x, channels, inverse, scores, factors, out, ring["pool_ptr"], tiles_ptr=tiles.tiles,
            chunks_ptr=tiles.chunks, tables_ptr=tiles.tables, ring_first=ring["first"], x_stride=x.stride(0),
            table_stride=tiles.tables.stride(0), ring_stride=ring["part_stride"], RING_PART=ring["PART_SIZE"],
            RING=ring["RING"], WIDTH=ring["WIDTH"], SLICE=triton.next_power_of_2(-(-x.shape[1] // num_slices)),
            COLUMNS=columns, num_warps=4, **options, **self.state.arguments,
        )  # fmt: skip

    @override
    def gated_norm(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        normed, (num_tokens, heads, value) = torch.empty_like(out), out.shape
        block = 4 if num_tokens <= _FEW_TOKENS else 16
        assert z.stride(2) == 1 and z.stride(1) == value
        _gated_norm_kernel[(num_tokens, triton.cdiv(heads, block))](
            out, z, self.norm_weight, normed, self.eps, z.stride(0), HEADS=heads, BLOCK=block, SIZE=value,
            num_warps=4, **pdl_options(out.device),
        )  # fmt: skip
        return normed


@jit
def _softplus(x):
    return tl.where(x > 20, x, tl.log(1 + tl.exp(x)))


@jit(unaligned=["a_ptr", "b_ptr", "tables_ptr"])
def _delta_rule_step_kernel(
    conv_ptr, a_ptr, b_ptr, out_ptr, a_log_ptr, dt_bias_ptr, pool_ptr, tables_ptr, first, a_stride, b_stride,
    table_stride, part_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr,
    SLICES: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key_head = head // GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + KEY_HEADS * GROUP * VALUE
    keys, values = tl.arange(0, KEY), part * (SLICES * COLUMNS) + tl.arange(0, COLUMNS)
    table_ptr, places = tables_ptr + row * table_stride, (row * (KEY_HEADS * GROUP) + head) * VALUE + values
    if tl.load(table_ptr) < 0:
        wait_for_previous(PDL)
        for index in tl.static_range(SLICES):
            tl.store(out_ptr + places + index * COLUMNS, tl.zeros([COLUMNS], out_ptr.dtype.element_ty))
    else:
        # Rows of a state, which begin anywhere in a block. No kernel since the last step writes to it.
        lines = first + (head * KEY + keys) * VALUE
        own_ptrs = state_ptrs(pool_ptr, table_ptr, lines, values, part_stride, PARTS, PART_SIZE)
        following = tl.load(own_ptrs)
        wait_for_previous(PDL)
        conv_ptr += row * CHANNELS
        value_ptrs = conv_ptr + 2 * KEY_HEADS * KEY + head * VALUE + values
        q = tl.load(conv_ptr + key_head * KEY + keys).to(tl.float32)
        k = tl.load(conv_ptr + (KEY_HEADS + key_head) * KEY + keys).to(tl.float32)
        q = q * (tl.rsqrt(tl.sum(q * q) + 1e-6) * (KEY**-0.5))
        k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
        a = tl.load(a_ptr + row * a_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head).to(tl.float32)
        decay = tl.exp(-tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) * _softplus(a))
        beta = tl.sigmoid(tl.load(b_ptr + row * b_stride + head).to(tl.float32))
        for index in tl.static_range(SLICES):
            state = following * decay
            if index + 1 < SLICES:
                # A slice is on its way while the one before is computed.
                following = tl.load(own_ptrs + (index + 1) * COLUMNS)
            v = tl.load(value_ptrs + index * COLUMNS).to(tl.float32)
            update = beta * (v - tl.sum(state * k[:, None], axis=0))
            state += k[:, None] * update[None, :]
            tl.store(own_ptrs + index * COLUMNS, state)
            out = tl.sum(state * q[:, None], axis=0)
            tl.store(out_ptr + places + index * COLUMNS, out.to(out_ptr.dtype.element_ty))


@jit(unaligned=["slots_ptr", "positions_ptr", "num_pending_ptr", "num_new_ptr", "tables_ptr"])
def _delta_rule_drafts_kernel(
    kept_ptr, out_ptr, a_log_ptr, dt_bias_ptr, pool_ptr, slots_ptr, positions_ptr, num_pending_ptr, num_new_ptr,
    tables_ptr, first, table_stride, part_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr,
    PER_ROW: tl.constexpr, ENTRIES: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    keys, values = tl.arange(0, KEY), part * COLUMNS + tl.arange(0, COLUMNS)
    slot, position = tl.load(slots_ptr + row).to(tl.int64), tl.load(positions_ptr + row)
    num_pending, num_new = tl.load(num_pending_ptr + row), tl.load(num_new_ptr + row)
    num_stored = num_pending + (num_new if PER_ROW == 1 else 0)
    if num_new == 0:
        wait_for_previous(PDL)
    else:
        # Rows of a state, which begin anywhere in a block. No kernel since the last step writes to it.
        lines, table_ptr = first + (head * KEY + keys) * VALUE, tables_ptr + row * table_stride
        own_ptrs = state_ptrs(pool_ptr, table_ptr, lines, values, part_stride, PARTS, PART_SIZE)
        state = tl.load(own_ptrs)
        rate, bias = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32)), tl.load(dt_bias_ptr + head).to(tl.float32)
        wait_for_previous(PDL)
        for index in range(num_pending + num_new):
            entry = slot * ENTRIES + (position - num_pending + index) % ENTRIES
            token_ptr = kept_ptr + entry * (CHANNELS + 2 * HEADS)
            q = tl.load(token_ptr + head // GROUP * KEY + keys).to(tl.float32)
            k = tl.load(token_ptr + (KEY_HEADS + head // GROUP) * KEY + keys).to(tl.float32)
            q = q * (tl.rsqrt(tl.sum(q * q) + 1e-6) * (KEY**-0.5))
            k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
            a = tl.load(token_ptr + CHANNELS + HEADS + head).to(tl.float32) + bias
            decay = tl.exp(rate * _softplus(a))
            beta = tl.sigmoid(tl.load(token_ptr + CHANNELS + head).to(tl.float32))
            v = tl.load(token_ptr + 2 * KEY_HEADS * KEY + head * VALUE + values).to(tl.float32)
            state *= decay
            update = beta * (v - tl.sum(state * k[:, None], axis=0))
            state += k[:, None] * update[None, :]
            if index + 1 == num_stored:
                tl.store(own_ptrs, state)
            if index >= num_pending:
                token = row * PER_ROW + index - num_pending
                out = tl.sum(state * q[:, None], axis=0)
                tl.store(out_ptr + (token * HEADS + head) * VALUE + values, out.to(out_ptr.dtype.element_ty))
    for index in range(num_new, PER_ROW):
        out_ptrs = out_ptr + ((row * PER_ROW + index) * HEADS + head) * VALUE + values
        tl.store(out_ptrs, tl.zeros([COLUMNS], out_ptr.dtype.element_ty))


@jit
def _inverse(system_ptr, system, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of I + system, a strictly lower triangular [TILE, TILE] float32 matrix, which is stored too.

    Its diagonal blocks of 16 rows are inverted by forward substitution. With D of these and L of the other blocks, the
    inverse is (I + D L)^-1 D, and D L is nilpotent of order TILE / 16 = 4.
    """
    BLOCKS: tl.constexpr = TILE // 16
    index, inner = tl.arange(0, TILE), tl.arange(0, 16)
    # Column c of the inverse of block b in row 16 b + c, so that sums need no other thread's values.
    columns = tl.where(index[:, None] % 16 == inner[None, :], 1.0, 0.0)
    first = system_ptr + index // 16 * (16 * TILE + 16)
    for i in tl.static_range(1, 16):
        line = tl.load(first[:, None] + i * TILE + inner[None, :])
        columns = tl.where(inner[None, :] == i, columns - tl.sum(line * columns, axis=1)[:, None], columns)
    wide = tl.reshape(tl.broadcast_to(columns[:, None, :], [TILE, BLOCKS, 16]), [TILE, TILE])
    is_diagonal = index[:, None] // 16 == index[None, :] // 16
    diagonal = tl.trans(tl.where(is_diagonal, wide, 0.0))
    power = tl.dot(diagonal, tl.where(is_diagonal, 0.0, system), input_precision=PRECISION)
    square = tl.dot(power, power, input_precision=PRECISION)
    once = diagonal + tl.dot(square, diagonal, input_precision=PRECISION)
    return once - tl.dot(power, once, input_precision=PRECISION)


@jit(unaligned=["a_ptr", "b_ptr", "tiles_ptr"])
def _delta_rule_tiles_kernel(
    conv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, inverse_ptr, scores_ptr, factors_ptr, tiles_ptr, a_stride, b_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + KEY_HEADS * GROUP * VALUE
    first_token, count = tl.load(tiles_ptr + tile * 4), tl.load(tiles_ptr + tile * 4 + 1)
    index, keys = tl.arange(0, TILE), tl.arange(0, KEY)
    mask = index < count
    tokens = (first_token + index).to(tl.int64)
    wait_for_previous(PDL)
    if count > 0:
        channels = conv_ptr + tokens[:, None] * CHANNELS + head // GROUP * KEY + keys[None, :]
        q = tl.load(channels, mask=mask[:, None], other=0.0).to(tl.float32)
        k = tl.load(channels + KEY_HEADS * KEY, mask=mask[:, None], other=0.0).to(tl.float32)
        q_scale = tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6) * (KEY**-0.5)
        k_scale = tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6)
        a = tl.load(a_ptr + tokens * a_stride + head, mask=mask, other=0.0).to(tl.float32)
        a += tl.load(dt_bias_ptr + head).to(tl.float32)
        # Tokens beyond the tile's end keep the state as it is.
        log_decay = tl.where(mask, -tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) * _softplus(a), 0.0)
        total = tl.cumsum(log_decay, axis=0)
        beta = tl.sigmoid(tl.load(b_ptr + tokens * b_stride + head, mask=mask, other=0.0).to(tl.float32))
        beta = tl.where(mask, beta, 0.0)
        causal = index[:, None] >= index[None, :]
        ratios = tl.exp(tl.where(causal, total[:, None] - total[None, :], float("-inf"))) * k_scale[None, :]
        similar = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        system = tl.where(index[:, None] > index[None, :], (beta * k_scale)[:, None] * similar * ratios, 0.0)
        rows = tile.to(tl.int64) * (KEY_HEADS * GROUP) + head
        places = (rows * TILE + index)[:, None] * TILE + index[None, :]
        tl.store(inverse_ptr + places, system)
        tl.debug_barrier()
        inverse = _inverse(inverse_ptr + rows * (TILE * TILE), system, TILE, PRECISION)
        # All threads have read the system.
        tl.debug_barrier()
        tl.store(inverse_ptr + places, inverse * beta[None, :])
        asked = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        tl.store(scores_ptr + places, (q_scale[:, None] * asked * ratios).to(scores_ptr.dtype.element_ty))
        # Not the sum of decays, which is rounded otherwise.
        last = tl.sum(tl.where(index == TILE - 1, total, 0.0), axis=0)
        factors = factors_ptr + rows * (4 * TILE) + index
        tl.store(factors, tl.exp(total) * k_scale)
        tl.store(factors + TILE, tl.exp(total) * q_scale)
        tl.store(factors + 2 * TILE, tl.exp(last - total) * k_scale)
        tl.store(factors + 3 * TILE, tl.exp(last) + tl.zeros([TILE], tl.float32))


@jit(unaligned=["tiles_ptr", "chunks_ptr", "tables_ptr"])
def _delta_rule_scan_kernel(
    x_ptr, conv_ptr, inverse_ptr, scores_ptr, factors_ptr, out_ptr, ring_ptr, pool_ptr,
    tiles_ptr, chunks_ptr, tables_ptr, ring_first, first, x_stride, table_stride, ring_stride, part_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr,
    SLICE: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr, RING_PART: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    chunk_ptr = chunks_ptr + chunk * 5
    chunk_first, position, read = tl.load(chunk_ptr), tl.load(chunk_ptr + 1), tl.load(chunk_ptr + 2)
    first_tile, num_tiles = tl.load(chunk_ptr + 3), tl.load(chunk_ptr + 4)
    index, keys, values = tl.arange(0, TILE), tl.arange(0, KEY), part * COLUMNS + tl.arange(0, COLUMNS)
    # The inputs of the convolution that this program keeps.
    number = head * (VALUE // COLUMNS) + part
    kept = number * SLICE + tl.arange(0, SLICE)
    lines = first + (head * KEY + keys) * VALUE
    state = tl.zeros([KEY, COLUMNS], tl.float32)
    wait_for_previous(PDL)
    if (read >= 0) & (num_tiles > 0):
        table_ptr = tables_ptr + read * table_stride
        state = tl.load(state_ptrs(pool_ptr, table_ptr, lines, values, part_stride, PARTS, PART_SIZE))
    for tile in range(first_tile, first_tile + num_tiles):
        first_token, count = tl.load(tiles_ptr + tile * 4), tl.load(tiles_ptr + tile * 4 + 1)
        write = tl.load(tiles_ptr + tile * 4 + 3)
        mask = (index < count)[:, None]
        tokens = (first_token + index).to(tl.int64)
        channels = conv_ptr + tokens[:, None] * CHANNELS
        q = tl.load(channels + head // GROUP * KEY + keys[None, :], mask=mask, other=0.0).to(tl.float32)
        k = tl.load(channels + (KEY_HEADS + head // GROUP) * KEY + keys[None, :], mask=mask, other=0.0).to(tl.float32)
        v = tl.load(channels + 2 * KEY_HEADS * KEY + head * VALUE + values[None, :], mask=mask, other=0.0)
        rows = tl.cast(tile, tl.int64) * HEADS + head
        places = (rows * TILE + index)[:, None] * TILE + index[None, :]
        factor_ptr = factors_ptr + rows * (4 * TILE) + index
        # All products in one precision: Triton 3.6 compiles some in bfloat16 beside these to wrong code.
        before = tl.dot(k, state, input_precision=PRECISION)
        updates = v.to(tl.float32) - tl.load(factor_ptr)[:, None] * before
        updates = tl.dot(tl.load(inverse_ptr + places), updates, input_precision=PRECISION)
        out = tl.load(factor_ptr + TILE)[:, None] * tl.dot(q, state, input_precision=PRECISION)
        out += tl.dot(tl.load(scores_ptr + places).to(tl.float32), updates, input_precision=PRECISION)
        target = (tokens * HEADS + head)[:, None] * VALUE + values[None, :]
        tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=mask)
        updates *= tl.load(factor_ptr + 2 * TILE)[:, None]
        grown = tl.dot(tl.trans(k), updates, input_precision=PRECISION)
        state = state * tl.load(factors_ptr + rows * (4 * TILE) + 3 * TILE) + grown
        if write >= 0:
            table_ptr = tables_ptr + write * table_stride
            tl.store(state_ptrs(pool_ptr, table_ptr, lines, values, part_stride, PARTS, PART_SIZE), state)
            store_ring(x_ptr, ring_ptr, tables_ptr, write, first_token + count, kept, kept < CHANNELS, chunk_first,
                       position, read, ring_first, x_stride, table_stride, ring_stride,
                       CHANNELS, WIDTH, RING, PARTS, RING_PART)  # fmt: skip


@jit
def _gated_norm_kernel(
    x_ptr, z_ptr, weight_ptr, out_ptr, eps, z_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads, values = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, SIZE)[None, :]
    weight = tl.load(weight_ptr + values).to(tl.float32)
    wait_for_previous(PDL)
    places, mask = heads * SIZE + values, (heads < HEADS) & (values >= 0)
    x = tl.load(x_ptr + token * (HEADS * SIZE) + places, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + token * z_stride + places, mask=mask, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None] * weight
    out = x * z / (1 + tl.exp(-z))
    tl.store(out_ptr + token * (HEADS * SIZE) + places, out.to(out_ptr.dtype.element_ty), mask=mask)
