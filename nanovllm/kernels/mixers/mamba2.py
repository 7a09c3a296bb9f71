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

import torch
from torch.nn import functional

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.mixers.causal_conv import (
    ConvState,
    causal_conv,
    causal_conv_drafts,
    causal_conv_step,
    store_rings,
)
from nanovllm.kernels.mixers.state_pool import PoolView, place
from nanovllm.kernels.mixers.state_rows import TILE, DraftedStateRows, StateRows, StateTiles

_STEP_COLUMNS, _SCAN_COLUMNS = 32, 64
"""Inputs of a head in a program, at most."""


@dataclass(frozen=True)
class StateSpace:
    """A layer's parameters and the places of its states, for one rank.

    Attributes:
        num_heads, head_size: heads of inputs.
        num_groups, state_size: of keys and queries; each group serves consecutive heads.
        conv_weight: [channels, width], conv_bias: [channels] or None; channels are inputs, keys, queries.
        a_log, dt_bias, d: [num_heads] float32; the step size of a token is softplus(dt + dt_bias).
        step_limits: least and largest step size.
        norm_weight: [num_heads * head_size], eps: of the gated output's norm over the heads of a group; None: no norm.
        conv: where the convolution's inputs are kept.
        pool: the states' memory as float32.
        first: index of the layer's first element in a state; its states are [num_heads, state_size, head_size].
        kept: in engines with drafts, the convolution's outputs and the step sizes of tokens; see `DraftedStateRows`.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    d: torch.Tensor
    step_limits: tuple[float, float]
    norm_weight: torch.Tensor | None
    eps: float
    conv: ConvState
    pool: PoolView
    first: int
    kept: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a sequence's state in the layer."""
        return self.num_heads, self.state_size, self.head_size

    @property
    def sizes(self) -> dict[str, int]:
        """Arguments of kernels."""
        return {"HEADS": self.num_heads, "GROUPS": self.num_groups, "STATE": self.state_size, "SIZE": self.head_size}

    def step_sizes(self, dt: torch.Tensor) -> torch.Tensor:
        """Return step sizes in float32; dt: [num_tokens, num_heads]."""
        return functional.softplus(dt.float() + self.dt_bias).clamp(*self.step_limits)

    def scan(self, channels: torch.Tensor, dt: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the tokens of a tile in plain torch.

        Args:
            channels: [num_tokens, channels], after the convolution.
            dt: [num_tokens, num_heads], before `step_sizes`.
            state: before the first token, float32.

        Returns:
            [num_tokens, num_heads, head_size] float32, and the state after the last token.
        """
        inner, keys = self.num_heads * self.head_size, self.num_groups * self.state_size
        x, b, c = channels.float().split([inner, keys, keys], 1)
        x = x.unflatten(1, (self.num_heads, self.head_size)).transpose(0, 1)
        b, c = (
            part.unflatten(1, (self.num_groups, -1)).repeat_interleave(self.num_heads // self.num_groups, 1)
            for part in (b, c)
        )
        b, c, steps = b.transpose(0, 1), c.transpose(0, 1), self.step_sizes(dt).T
        total = (-self.a_log.exp().unsqueeze(1) * steps).cumsum(1)
        ratios = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
        u = x * steps.unsqueeze(2)
        out = total.exp().unsqueeze(2) * (c @ state) + ((c @ b.transpose(1, 2)) * ratios) @ u
        out = out + self.d[:, None, None] * x
        to_end = (total[:, -1:] - total).exp().unsqueeze(2)
        return out.transpose(0, 1), total[:, -1, None, None].exp() * state + (b * to_end).transpose(1, 2) @ u

    def gated_norm(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return `norm(out * silu(z))` in plain torch; both [num_tokens, num_heads * head_size], z's dtype."""
        wide = out.to(z.dtype).float() * functional.silu(z.float())
        if self.norm_weight is not None:
            groups = wide.unflatten(1, (self.num_groups, -1))
            groups = groups * torch.rsqrt(groups.square().mean(2, keepdim=True) + self.eps)
            wide = groups.flatten(1) * self.norm_weight.float()
        return wide.to(z.dtype)


def mamba2_step_ref(
    space: StateSpace, x: torch.Tensor, dt: torch.Tensor, z: torch.Tensor, rows: StateRows | DraftedStateRows
) -> torch.Tensor:
    """Plain torch form of `mamba2_step`."""
    if isinstance(rows, DraftedStateRows):
        return _plain_drafts(space, x, dt, z, rows)
    channels = causal_conv_step(x, space.conv_weight, space.conv_bias, space.conv, rows)
    out = torch.zeros(len(x), *space.shape[::2], device=x.device)
    for row in (rows.writes[:, 0] >= 0).nonzero().squeeze(1).tolist():
        own, state = slice(row, row + 1), space.pool.read(space.first, space.shape, rows.reads[row])
        out[own], state = space.scan(channels[own], dt[own], state)
        space.pool.write(space.first, state, rows.writes[row])
    return space.gated_norm(out.flatten(1), z)


def _plain_drafts(
    space: StateSpace, x: torch.Tensor, dt: torch.Tensor, z: torch.Tensor, rows: DraftedStateRows
) -> torch.Tensor:
    out, kept = torch.zeros(len(x), *space.shape[::2], device=x.device), space.kept
    assert kept is not None
    causal_conv_drafts(x, space.conv_weight, space.conv_bias, space.conv, rows, gates=dt, kept=kept)
    for row, (_, _, num_pending, num_new) in enumerate(rows.rows.tolist()):
        if num_new:
            channels, own_dt = rows.kept_tokens(kept, row).split([x.shape[1], space.num_heads], 1)
            state = space.pool.read(space.first, space.shape, rows.tables[row])
            if num_stored := rows.num_stored(row):
                _, stored = space.scan(channels[:num_stored], own_dt[:num_stored], state)
                space.pool.write(space.first, stored, rows.tables[row])
            out[rows.new_tokens(row)] = space.scan(channels, own_dt, state)[0][num_pending:]
    return space.gated_norm(out.flatten(1), z)


def mamba2_prompt_ref(
    space: StateSpace, x: torch.Tensor, dt: torch.Tensor, z: torch.Tensor, tiles: StateTiles
) -> torch.Tensor:
    """Plain torch form of `mamba2_prompt`."""
    channels = causal_conv(x, space.conv_weight, space.conv_bias, space.conv, tiles)
    store_rings(x, space.conv_weight.shape[1], space.conv, tiles)
    out = torch.zeros(len(x), *space.shape[::2], device=x.device)
    # All chunks read what they start from before a state is written.
    states = [
        space.pool.read(space.first, space.shape, tiles.tables[chunk[2]]) if chunk[2] >= 0
        else torch.zeros(space.shape, device=x.device) for chunk in tiles.chunks.tolist()
    ]  # fmt: skip
    for first, count, chunk, write in tiles.tiles.tolist():
        if count:
            part = slice(first, first + count)
            out[part], states[chunk] = space.scan(channels[part], dt[part], states[chunk])
            if write >= 0:
                space.pool.write(space.first, states[chunk], tiles.tables[write])
    return space.gated_norm(out.flatten(1), z)


@jit
def _step_size(dt, bias, least, most):
    dt += bias
    return tl.minimum(tl.maximum(tl.where(dt > 20, dt, tl.log(1 + tl.exp(dt))), least), most)


@jit
def _state_ptrs(pool_ptr, table_ptr, lines, columns, part_stride, PARTS: tl.constexpr, PART_SIZE: tl.constexpr):
    """Return pointers to slices of rows of a state, [lines, columns]; lines: where they begin in it."""
    blocks = tl.load(table_ptr + lines // (PARTS * PART_SIZE))
    starts = tl.multiple_of(place(lines, blocks, part_stride, PARTS, PART_SIZE), 16)
    return pool_ptr + starts[:, None] + columns[None, :]


@jit(unaligned=["dt_ptr", "reads_ptr", "writes_ptr"])
def _mamba2_step_kernel(
    conv_ptr, dt_ptr, out_ptr, a_log_ptr, dt_bias_ptr, d_ptr, pool_ptr, reads_ptr, writes_ptr, first, least, most,
    dt_stride, table_stride, part_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    keys, columns = tl.arange(0, STATE), tl.arange(0, COLUMNS)
    read_ptr, write_ptr = reads_ptr + row * table_stride, writes_ptr + row * table_stride
    target = tl.load(write_ptr)
    inputs = head * SIZE + part * COLUMNS + columns
    out_ptr += row * (HEADS * SIZE)
    if target < 0:
        wait_for_previous(PDL)
        tl.store(out_ptr + inputs, tl.zeros([COLUMNS], out_ptr.dtype.element_ty))
    else:
        # Slices of rows of a state. No kernel of this layer's projections writes to it.
        lines = first + (head * STATE + keys) * SIZE + part * COLUMNS
        state = tl.load(_state_ptrs(pool_ptr, read_ptr, lines, columns, part_stride, PARTS, PART_SIZE))
        target_ptrs = _state_ptrs(pool_ptr, write_ptr, lines, columns, part_stride, PARTS, PART_SIZE)
        wait_for_previous(PDL)
        conv_ptr += row * (HEADS * SIZE + 2 * GROUPS * STATE)
        key_ptr = conv_ptr + HEADS * SIZE + head // (HEADS // GROUPS) * STATE
        x = tl.load(conv_ptr + inputs).to(tl.float32)
        b = tl.load(key_ptr + keys).to(tl.float32)
        c = tl.load(key_ptr + GROUPS * STATE + keys).to(tl.float32)
        dt = tl.load(dt_ptr + row * dt_stride + head).to(tl.float32)
        dt = _step_size(dt, tl.load(dt_bias_ptr + head), least, most)
        state = state * tl.exp(-tl.exp(tl.load(a_log_ptr + head)) * dt) + b[:, None] * (x * dt)[None, :]
        tl.store(target_ptrs, state)
        out = tl.sum(state * c[:, None], axis=0) + tl.load(d_ptr + head) * x
        tl.store(out_ptr + inputs, out.to(out_ptr.dtype.element_ty))


@jit(unaligned=["rows_ptr", "tables_ptr"])
def _mamba2_drafts_kernel(
    kept_ptr, out_ptr, a_log_ptr, dt_bias_ptr, d_ptr, pool_ptr, rows_ptr, tables_ptr, first, least, most,
    table_stride, part_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    PER_ROW: tl.constexpr, ENTRIES: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    keys, columns = tl.arange(0, STATE), tl.arange(0, COLUMNS)
    slot, position = tl.load(rows_ptr + row * 4).to(tl.int64), tl.load(rows_ptr + row * 4 + 1)
    num_pending, num_new = tl.load(rows_ptr + row * 4 + 2), tl.load(rows_ptr + row * 4 + 3)
    inputs, num_absent = head * SIZE + part * COLUMNS + columns, PER_ROW - num_new
    num_stored = num_pending + (num_new if PER_ROW == 1 else 0)
    if num_new == 0:
        wait_for_previous(PDL)
    else:
        # Slices of rows of a state. No kernel of this layer's projections writes to it.
        lines = first + (head * STATE + keys) * SIZE + part * COLUMNS
        table_ptr = tables_ptr + row * table_stride
        state_ptrs = _state_ptrs(pool_ptr, table_ptr, lines, columns, part_stride, PARTS, PART_SIZE)
        state = tl.load(state_ptrs)
        wait_for_previous(PDL)
        a, bias, d = -tl.exp(tl.load(a_log_ptr + head)), tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
        for index in range(num_pending + num_new):
            entry = slot * ENTRIES + (position - num_pending + index) % ENTRIES
            token_ptr = kept_ptr + entry * (HEADS * SIZE + 2 * GROUPS * STATE + HEADS)
            key_ptrs = token_ptr + HEADS * SIZE + head // (HEADS // GROUPS) * STATE + keys
            x = tl.load(token_ptr + inputs).to(tl.float32)
            b = tl.load(key_ptrs).to(tl.float32)
            c = tl.load(key_ptrs + GROUPS * STATE).to(tl.float32)
            dt = tl.load(token_ptr + HEADS * SIZE + 2 * GROUPS * STATE + head).to(tl.float32)
            dt = _step_size(dt, bias, least, most)
            state = state * tl.exp(a * dt) + b[:, None] * (x * dt)[None, :]
            if index + 1 == num_stored:
                tl.store(state_ptrs, state)
            if index >= num_pending:
                token = row * PER_ROW + num_absent + index - num_pending
                out = tl.sum(state * c[:, None], axis=0) + d * x
                tl.store(out_ptr + token * (HEADS * SIZE) + inputs, out.to(out_ptr.dtype.element_ty))
    for index in range(num_absent):
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
        state = tl.load(_state_ptrs(pool_ptr, table_ptr, lines, columns, part_stride, PARTS, PART_SIZE))
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
            tl.store(_state_ptrs(pool_ptr, table_ptr, lines, columns, part_stride, PARTS, PART_SIZE), state)


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


def _gated_norm(space: StateSpace, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Compute `StateSpace.gated_norm` of contiguous outputs."""
    normed, size = torch.empty_like(out), out.shape[1] // space.num_groups
    block = triton.next_power_of_2(size)
    _gated_group_norm_kernel[(len(out), space.num_groups)](
        out, z, space.norm_weight, normed, space.eps, z.stride(0), SIZE=size, GROUPS=space.num_groups,
        BLOCK=block, num_warps=min(8, max(1, block // 512)), **pdl_options(out.device),
    )  # fmt: skip
    return normed


def mamba2_step(
    space: StateSpace, x: torch.Tensor, dt: torch.Tensor, z: torch.Tensor, rows: StateRows | DraftedStateRows
) -> torch.Tensor:
    """Compute one token of each of several sequences, or several drafted ones, and their states.

    Three kernels: the convolution; one for each row, head and slice of its inputs; and the norm of the outputs.

    Args:
        space: the layer's.
        x: [num_tokens, channels]; the convolution's inputs.
        dt: [num_tokens, num_heads]; step sizes before their function.
        z: [num_tokens, num_heads * head_size]; the output's gate.
        rows: the states.

    Returns:
        Like z; zeros for padding, and for what is not new.
    """
    if not uses_triton(x.device):
        return mamba2_step_ref(space, x, dt, z, rows)
    out, columns = torch.empty(z.shape, dtype=z.dtype, device=z.device), _columns(space, _STEP_COLUMNS)
    assert dt.stride(1) == z.stride(1) == 1
    if isinstance(rows, StateRows):
        conv = causal_conv_step(x, space.conv_weight, space.conv_bias, space.conv, rows)
        _mamba2_step_kernel[(len(x), space.num_heads, space.head_size // columns)](
            conv, dt, out, space.a_log, space.dt_bias, space.d, space.pool.elements, rows.reads, rows.writes,
            space.first, space.step_limits[0], space.step_limits[1], dt.stride(0), rows.reads.stride(0),
            COLUMNS=columns, num_warps=4, **space.sizes, **space.pool.sizes, **pdl_options(x.device),
        )  # fmt: skip
    else:
        assert space.kept is not None
        kept = causal_conv_drafts(x, space.conv_weight, space.conv_bias, space.conv, rows, gates=dt, kept=space.kept)
        _mamba2_drafts_kernel[(len(rows.rows), space.num_heads, space.head_size // columns)](
            kept, out, space.a_log, space.dt_bias, space.d, space.pool.elements, rows.rows, rows.tables, space.first,
            space.step_limits[0], space.step_limits[1], rows.tables.stride(0), COLUMNS=columns, PER_ROW=rows.per_row,
            ENTRIES=kept.shape[1], num_warps=4, **space.sizes, **space.pool.sizes, **pdl_options(x.device),
        )  # fmt: skip
    return _gated_norm(space, out, z)


def mamba2_prompt(
    space: StateSpace, x: torch.Tensor, dt: torch.Tensor, z: torch.Tensor, tiles: StateTiles
) -> torch.Tensor:
    """Compute the prompt tokens of a step, and the states after them; arguments as of `mamba2_step`.

    Four kernels: the convolution, and what it keeps; the scan of each chunk, head and slice of its inputs over the
    chunk's tiles; and the norm of the outputs.
    """
    if not uses_triton(x.device):
        return mamba2_prompt_ref(space, x, dt, z, tiles)
    conv = causal_conv(x, space.conv_weight, space.conv_bias, space.conv, tiles)
    store_rings(x, space.conv_weight.shape[1], space.conv, tiles)
    out, columns = torch.empty(z.shape, dtype=z.dtype, device=z.device), _columns(space, _SCAN_COLUMNS)
    assert dt.stride(1) == z.stride(1) == 1
    _mamba2_scan_kernel[(len(tiles.chunks), space.num_heads, space.head_size // columns)](
        conv, dt, out, space.a_log, space.dt_bias, space.d, space.pool.elements, tiles.tiles, tiles.chunks,
        tiles.tables, space.first, space.step_limits[0], space.step_limits[1], dt.stride(0), tiles.tables.stride(0),
        COLUMNS=columns, TILE=TILE, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=8, num_stages=1,
        **space.sizes, **space.pool.sizes, **pdl_options(x.device),
    )  # fmt: skip
    return _gated_norm(space, out, z)


def _columns(space: StateSpace, most: int) -> int:
    """Return the inputs of a head in a program: a power of two that divides them."""
    return min(space.head_size & -space.head_size, most)
