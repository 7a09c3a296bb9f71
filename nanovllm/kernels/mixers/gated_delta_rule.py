"""The gated delta rule, token by token and in tiles of prompts.

With a decay a in (0, 1], a step size b, a key k, a query q, a value v and a state S, [key_size, value_size], a token
computes (Yang et al. 2024, arXiv:2412.06464)

    S <- a S;  u = b (v - S' k);  S <- S + k u';  o = S' q

In a tile that begins with the state S_0, let A_t be the product of the first t decays. Then the u of its tokens solve a
lower triangular system (arXiv:2406.06484),

    u_t + b_t sum_{s<t} (A_t / A_s) (k_t' k_s) u_s = b_t v_t - b_t A_t S_0' k_t,

whose inverse T needs no state, so it is computed for all tiles at once; the tiles of a chunk then follow one another,
each with u = T b v - (T b A k) S_0. Ratios of decays are exponentials of differences of logarithms. Everything is
computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.mixers.causal_conv import (
    ConvState,
    causal_conv,
    conv_inputs,
    convolve,
    store_ring,
    store_rings_ref,
)
from nanovllm.kernels.mixers.state_pool import PoolView, place
from nanovllm.kernels.mixers.state_rows import TILE, StateRows, StateTiles

_EPS = 1e-6
"""Added to the squared length of queries and keys."""
_COLUMNS = 32
"""Values of a program. Few, so that many programs of a multiprocessor hide the latency of each other's loads."""


@dataclass(frozen=True)
class DeltaRule:
    """A layer's parameters and the places of its states, for one rank.

    Attributes:
        num_key_heads, key_size, num_value_heads, value_size: heads of queries and keys, each for a group of consecutive
            heads of values.
        conv_weight: [channels, width]; channels are queries, keys, values.
        a_log, dt_bias: [num_value_heads]; the decay of a token is exp(-exp(a_log) * softplus(a + dt_bias)).
        norm_weight: [value_size], eps: of the output's norm.
        conv: where the convolution's inputs are kept.
        pool: the states' memory as float32.
        first: index of the layer's first element in a state; its states are [num_value_heads, key_size, value_size].
    """

    num_key_heads: int
    key_size: int
    num_value_heads: int
    value_size: int
    conv_weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    eps: float
    conv: ConvState
    pool: PoolView
    first: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a sequence's state in the layer."""
        return self.num_value_heads, self.key_size, self.value_size

    def log_decay(self, a: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of decays in float32; a: [num_tokens, num_value_heads]."""
        return -self.a_log.float().exp() * functional.softplus(a.float() + self.dt_bias.float())

    def heads(self, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys, normalised and scaled, and values, [num_tokens, num_value_heads, size] float32."""
        key_dim, value_dim = self.num_key_heads * self.key_size, self.num_value_heads * self.value_size
        q, k, v = channels.float().split([key_dim, key_dim, value_dim], -1)
        q, k = (x.view(len(x), self.num_key_heads, self.key_size) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (q, k))
        group = self.num_value_heads // self.num_key_heads
        q, k = (x.repeat_interleave(group, 1) for x in (q * self.key_size**-0.5, k))
        return q, k, v.view(len(v), self.num_value_heads, self.value_size)

    def gated_norm(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return `norm(out) * silu(z)`; both [num_tokens, num_value_heads, value_size], z's dtype."""
        wide = out.to(z.dtype).float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.norm_weight.float() * functional.silu(z.float())).to(z.dtype)


def delta_rule_step_ref(
    rule: DeltaRule, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, z: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """Plain torch form of `delta_rule_step`."""
    out = torch.zeros_like(z)
    index = (rows.writes[:, 0] >= 0).nonzero().squeeze(1).tolist()
    if not index:
        return out
    width, channels, ring_pool = rule.conv_weight.shape[1], x.shape[1], rule.conv.pool
    positions, tables = rows.positions.tolist(), [(rows.reads[i], rows.writes[i]) for i in index]
    before = [conv_inputs(x, rule.conv, rows.reads[i], positions[i], width) for i in index]
    windows = torch.cat((torch.stack(before), x[index].unsqueeze(1)), 1).transpose(1, 2)
    state = torch.stack([rule.pool.read(rule.first, rule.shape, read) for read, _ in tables])
    q, k, v = rule.heads(convolve(windows, rule.conv_weight, None))
    state = state * rule.log_decay(a[index]).exp()[..., None, None]
    update = b[index].float().sigmoid().unsqueeze(-1) * (v - torch.einsum("rhkv,rhk->rhv", state, k))
    state = state + k.unsqueeze(-1) * update.unsqueeze(-2)
    out[index] = rule.gated_norm(torch.einsum("rhkv,rhk->rhv", state, q), z[index])
    for i, (_, write), window, new in zip(index, tables, windows, state, strict=True):
        rule.pool.write(rule.first, new, write)
        for at, row in zip(range(positions[i] - width + 1, positions[i] + 1), window.T, strict=True):
            if at >= 0:
                ring_pool.write(rule.conv.first + at % width * channels, row, write)
    return out


def delta_rule_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the tokens of a tile.

    Args:
        q, k, v: [num_tokens, heads, size]; queries and keys normalised, queries scaled.
        log_decay, beta: [num_tokens, heads].
        state: [heads, key_size, value_size]; before the first token.

    Returns:
        [num_tokens, heads, value_size], and the state after the last token.
    """
    # [heads, tokens, size] each.
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    b, total = beta.T.unsqueeze(-1), log_decay.T.cumsum(-1)
    ratios = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    decays = total.exp().unsqueeze(-1)
    system = (b * (k @ k.transpose(1, 2)) * ratios).tril(-1)
    target = b * (v - decays * (k @ state))
    updates = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    out = decays * (q @ state) + ((q @ k.transpose(1, 2)) * ratios) @ updates
    to_end = (total[:, -1:] - total).exp().unsqueeze(-1)
    return out.transpose(0, 1), decays[:, -1:] * state + (k * to_end).transpose(1, 2) @ updates


def delta_rule_prompt_ref(
    rule: DeltaRule, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, z: torch.Tensor, tiles: StateTiles
) -> torch.Tensor:
    """Plain torch form of `delta_rule_prompt`."""
    out = torch.zeros(len(x), rule.num_value_heads, rule.value_size, device=x.device)
    q, k, v = rule.heads(causal_conv(x, rule.conv_weight, None, rule.conv, tiles))
    log_decay, beta = rule.log_decay(a), b.float().sigmoid()
    chunks = tiles.chunks.tolist()
    # All chunks read what they start from before a state is written.
    states = [
        rule.pool.read(rule.first, rule.shape, tiles.tables[chunk[2]]) if chunk[2] >= 0
        else torch.zeros(rule.shape, device=x.device) for chunk in chunks
    ]  # fmt: skip
    store_rings_ref(x, rule.conv_weight.shape[1], rule.conv, tiles)
    for first, count, chunk, write in tiles.tiles.tolist():
        if count:
            part = slice(first, first + count)
            out[part], states[chunk] = delta_rule_chunk(
                q[part], k[part], v[part], log_decay[part], beta[part], states[chunk]
            )
            if write >= 0:
                rule.pool.write(rule.first, states[chunk], tiles.tables[write])
    return rule.gated_norm(out, z)


@jit
def _unit(x):
    """Divide rows by their length."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@jit
def _softplus(x):
    return tl.where(x > 20, x, tl.log(1 + tl.exp(x)))


@jit
def _ring_conv(
    x_ptr, weight_ptr, state_ptr, read_ptr, write_ptr, position, channels, first, part_stride, stores, is_apart,
    dtype: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr,
):  # fmt: skip
    """Return a row's outputs of the convolution, [channels] float32; if it `stores`, keep its inputs in its state."""
    kept = channels < tl.where(stores, CHANNELS, 0)
    x = tl.load(x_ptr + channels).to(tl.float32)
    total = x * tl.load(weight_ptr + channels * WIDTH + (WIDTH - 1)).to(tl.float32)
    index = first + position % WIDTH * CHANNELS + channels
    block = tl.load(write_ptr + index // (PARTS * PART_SIZE))
    places = place(index, block, part_stride, PARTS, PART_SIZE)
    tl.store(state_ptr + places, x.to(state_ptr.dtype.element_ty), mask=kept)
    for back in tl.static_range(1, WIDTH):
        at = position - back
        index = first + tl.maximum(at, 0) % WIDTH * CHANNELS + channels
        there = channels < tl.where(at >= 0, CHANNELS, 0)
        moved = channels < tl.where((at >= 0) & stores & is_apart, CHANNELS, 0)
        block = tl.load(read_ptr + index // (PARTS * PART_SIZE))
        before = tl.load(state_ptr + place(index, block, part_stride, PARTS, PART_SIZE), mask=there, other=0.0)
        total += before.to(tl.float32) * tl.load(weight_ptr + channels * WIDTH + (WIDTH - 1 - back)).to(tl.float32)
        block = tl.load(write_ptr + index // (PARTS * PART_SIZE))
        tl.store(state_ptr + place(index, block, part_stride, PARTS, PART_SIZE), before, mask=moved)
    return (total / (1 + tl.exp(-total))).to(dtype).to(tl.float32)


@jit(unaligned=["a_ptr", "b_ptr", "positions_ptr", "reads_ptr", "writes_ptr"])
def _delta_rule_step_kernel(
    x_ptr, a_ptr, b_ptr, out_ptr, conv_weight_ptr, a_log_ptr, dt_bias_ptr, ring_ptr, pool_ptr,
    positions_ptr, reads_ptr, writes_ptr, ring_first, first,
    x_stride, a_stride, b_stride, table_stride, ring_stride, part_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, RING_SIZE: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key_head = head // GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + KEY_HEADS * GROUP * VALUE
    keys, values = tl.arange(0, KEY), part * COLUMNS + tl.arange(0, COLUMNS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    read_ptr, write_ptr = reads_ptr + row * table_stride, writes_ptr + row * table_stride
    position, target = tl.load(positions_ptr + row), tl.load(write_ptr)
    places = (row * (KEY_HEADS * GROUP) + head) * VALUE + values
    if target < 0:
        wait_for_previous(PDL)
        tl.store(out_ptr + places, tl.zeros([COLUMNS], dtype))
    else:
        # Rows of a state, which begin anywhere in a block. No kernel of this layer's projections writes to it.
        state_rows = first + (head * KEY + keys) * VALUE
        blocks = tl.load(read_ptr + state_rows // (PARTS * PART_SIZE))
        sources = tl.multiple_of(place(state_rows, blocks, part_stride, PARTS, PART_SIZE), 16)
        state = tl.load(pool_ptr + sources[:, None] + values[None, :])
        blocks = tl.load(write_ptr + state_rows // (PARTS * PART_SIZE))
        targets = tl.multiple_of(place(state_rows, blocks, part_stride, PARTS, PART_SIZE), 16)
        is_apart = tl.load(read_ptr) != target
        # One program keeps the inputs of a group's queries and keys.
        stores = (head % GROUP == 0) & (part == 0)
        wait_for_previous(PDL)
        x_ptr += row * x_stride
        q = _ring_conv(x_ptr, conv_weight_ptr, ring_ptr, read_ptr, write_ptr, position, key_head * KEY + keys,
                       ring_first, ring_stride, stores, is_apart, dtype, CHANNELS, WIDTH, PARTS, RING_SIZE)  # fmt: skip
        k = _ring_conv(x_ptr, conv_weight_ptr, ring_ptr, read_ptr, write_ptr, position,
                       (KEY_HEADS + key_head) * KEY + keys,
                       ring_first, ring_stride, stores, is_apart, dtype, CHANNELS, WIDTH, PARTS, RING_SIZE)  # fmt: skip
        v = _ring_conv(x_ptr, conv_weight_ptr, ring_ptr, read_ptr, write_ptr, position,
                       2 * KEY_HEADS * KEY + head * VALUE + values,
                       ring_first, ring_stride, part >= 0, is_apart, dtype,
                       CHANNELS, WIDTH, PARTS, RING_SIZE)  # fmt: skip
        q = q * (tl.rsqrt(tl.sum(q * q) + 1e-6) * (KEY**-0.5))
        k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
        a = tl.load(a_ptr + row * a_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head).to(tl.float32)
        decay = tl.exp(-tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) * _softplus(a))
        beta = tl.sigmoid(tl.load(b_ptr + row * b_stride + head).to(tl.float32))
        state *= decay
        update = beta * (v - tl.sum(state * k[:, None], axis=0))
        state += k[:, None] * update[None, :]
        tl.store(pool_ptr + targets[:, None] + values[None, :], state)
        tl.store(out_ptr + places, tl.sum(state * q[:, None], axis=0).to(dtype))


def delta_rule_step(
    rule: DeltaRule, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, z: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """Compute one token of each of several sequences, and their states.

    Two kernels: one for each row, head and slice of values; and the norm of the outputs.

    Args:
        rule: the layer's.
        x: [num_rows, channels]; the convolution's inputs.
        a, b: [num_rows, num_value_heads]; decay and step size before their functions.
        z: [num_rows, num_value_heads, value_size]; the output's gate.
        rows: the states.

    Returns:
        Like z; zeros for padding.
    """
    if not uses_triton(x.device):
        return delta_rule_step_ref(rule, x, a, b, z, rows)
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    group, columns = rule.num_value_heads // rule.num_key_heads, min(rule.value_size, _COLUMNS)
    assert all(tensor.stride(-1) == 1 for tensor in (x, a, b, z)) and z.stride(1) == rule.value_size
    ring, pool = rule.conv.pool.sizes, rule.pool.sizes
    _delta_rule_step_kernel[(len(x), rule.num_value_heads, rule.value_size // columns)](
        x, a, b, out, rule.conv_weight, rule.a_log, rule.dt_bias,
        rule.conv.pool.elements, rule.pool.elements, rows.positions, rows.reads, rows.writes,
        rule.conv.first, rule.first, x.stride(0), a.stride(0), b.stride(0), rows.reads.stride(0),
        ring["part_stride"], KEY_HEADS=rule.num_key_heads, GROUP=group, KEY=rule.key_size, VALUE=rule.value_size,
        COLUMNS=columns, WIDTH=rule.conv_weight.shape[1], RING_SIZE=ring["PART_SIZE"], num_warps=4,
        **pool, **pdl_options(x.device),
    )  # fmt: skip
    return _gated_norm(rule, out, z)


@jit
def _inverse(system, TILE: tl.constexpr, precision: tl.constexpr):
    """Return the inverse of I + system, a strictly lower triangular [TILE, TILE] matrix, in float32.

    Its diagonal blocks of 16 rows are inverted by forward substitution. With D of these and L of the other blocks, the
    inverse is (I + D L)^-1 D, and D L is nilpotent of order TILE / 16 = 4.
    """
    BLOCKS: tl.constexpr = TILE // 16
    index = tl.arange(0, TILE)
    rows, columns = index[:, None] // 16, index[None, :] // 16
    square = tl.reshape(tl.where(rows == columns, system, 0.0), [BLOCKS, 16, BLOCKS, 16])
    # [BLOCKS, 16, 16]: all other blocks are zeros.
    small = -tl.sum(square, axis=2)
    row = tl.arange(0, 16)
    inverse = small
    for i in tl.static_range(2, 16):
        this = row[None, :, None] == i
        # [BLOCKS, 16]: row i of the system, whose product with the rows before it is added to it.
        line = tl.sum(tl.where(this, small, 0.0), axis=1)
        product = tl.sum(line[:, :, None] * tl.where(row[None, :, None] < i, inverse, 0.0), axis=1)
        inverse = tl.where(this, (line + product)[:, None, :], inverse)
    inverse = inverse + tl.where(row[None, :, None] == row[None, None, :], 1.0, 0.0)
    block = tl.arange(0, BLOCKS)
    placed = tl.where(block[:, None, None, None] == block[None, None, :, None], inverse[:, :, None, :], 0.0)
    diagonal = tl.reshape(placed, [TILE, TILE])
    rest = tl.where(rows > columns, system, 0.0)
    power = tl.dot(diagonal, rest, input_precision=precision)
    square = tl.dot(power, power, input_precision=precision)
    once = diagonal + tl.dot(square, diagonal, input_precision=precision)
    return once - tl.dot(power, once, input_precision=precision)


@jit(do_not_specialize=["num_tokens"], unaligned=["a_ptr", "b_ptr", "tiles_ptr"])
def _delta_rule_tiles_kernel(
    conv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, q_ptr, k_ptr, u_ptr, w_ptr, scores_ptr, decay_ptr, tiles_ptr,
    num_tokens, a_stride, b_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, key_head = tl.program_id(0), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + KEY_HEADS * GROUP * VALUE
    first_token, count = tl.load(tiles_ptr + tile * 4), tl.load(tiles_ptr + tile * 4 + 1)
    index, keys, values = tl.arange(0, TILE), tl.arange(0, KEY), tl.arange(0, VALUE)
    mask = index < count
    tokens = (first_token + index).to(tl.int64)
    wait_for_previous(PDL)
    if count > 0:
        channels = conv_ptr + tokens[:, None] * CHANNELS + key_head * KEY + keys[None, :]
        q = tl.load(channels, mask=mask[:, None], other=0.0).to(tl.float32)
        k = tl.load(channels + KEY_HEADS * KEY, mask=mask[:, None], other=0.0).to(tl.float32)
        q, k = _unit(q) * (KEY**-0.5), _unit(k)
        places = (tokens * KEY_HEADS + key_head)[:, None] * KEY + keys[None, :]
        tl.store(q_ptr + places, q.to(q_ptr.dtype.element_ty), mask=mask[:, None])
        tl.store(k_ptr + places, k.to(k_ptr.dtype.element_ty), mask=mask[:, None])
        similar = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        asked = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        for member in range(GROUP):
            head = key_head * GROUP + member
            a = tl.load(a_ptr + tokens * a_stride + head, mask=mask, other=0.0).to(tl.float32)
            a += tl.load(dt_bias_ptr + head).to(tl.float32)
            # Tokens beyond the tile's end keep the state as it is.
            log_decay = tl.where(mask, -tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) * _softplus(a), 0.0)
            total = tl.cumsum(log_decay, axis=0)
            beta = tl.sigmoid(tl.load(b_ptr + tokens * b_stride + head, mask=mask, other=0.0).to(tl.float32))
            beta = tl.where(mask, beta, 0.0)
            causal = index[:, None] >= index[None, :]
            ratios = tl.exp(tl.where(causal, total[:, None] - total[None, :], float("-inf")))
            system = tl.where(index[:, None] > index[None, :], beta[:, None] * similar * ratios, 0.0)
            inverse = _inverse(system, TILE, PRECISION)
            v = tl.load(conv_ptr + tokens[:, None] * CHANNELS + 2 * KEY_HEADS * KEY + head * VALUE + values[None, :],
                        mask=mask[:, None], other=0.0).to(tl.float32)  # fmt: skip
            u = tl.dot(inverse, beta[:, None] * v, input_precision=PRECISION)
            w = tl.dot(inverse, (beta * tl.exp(total))[:, None] * k, input_precision=PRECISION)
            rows = tile.to(tl.int64) * (KEY_HEADS * GROUP) + head
            lines = (rows * TILE + index)[:, None]
            tl.store(u_ptr + lines * VALUE + values[None, :], u.to(u_ptr.dtype.element_ty))
            tl.store(w_ptr + lines * KEY + keys[None, :], w.to(w_ptr.dtype.element_ty))
            tl.store(scores_ptr + lines * TILE + index[None, :], (asked * ratios).to(scores_ptr.dtype.element_ty))
            tl.store(decay_ptr + rows * TILE + index, total)


@jit(unaligned=["tiles_ptr", "chunks_ptr", "tables_ptr"])
def _delta_rule_scan_kernel(
    x_ptr, q_ptr, k_ptr, u_ptr, w_ptr, scores_ptr, decay_ptr, out_ptr, ring_ptr, pool_ptr,
    tiles_ptr, chunks_ptr, tables_ptr, ring_first, first, x_stride, table_stride, ring_stride, part_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr,
    SLICE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
    PARTS: tl.constexpr, RING_SIZE: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    chunk_ptr = chunks_ptr + chunk * 5
    chunk_first, position, read = tl.load(chunk_ptr), tl.load(chunk_ptr + 1), tl.load(chunk_ptr + 2)
    first_tile, num_tiles = tl.load(chunk_ptr + 3), tl.load(chunk_ptr + 4)
    index, keys, values = tl.arange(0, TILE), tl.arange(0, KEY), part * COLUMNS + tl.arange(0, COLUMNS)
    # The inputs of the convolution that this program keeps.
    number = head * (VALUE // COLUMNS) + part
    kept = number * SLICE + tl.arange(0, SLICE)
    state_rows = first + (head * KEY + keys) * VALUE
    state = tl.zeros([KEY, COLUMNS], tl.float32)
    wait_for_previous(PDL)
    if (read >= 0) & (num_tiles > 0):
        blocks = tl.load(tables_ptr + read * table_stride + state_rows // (PARTS * PART_SIZE))
        sources = tl.multiple_of(place(state_rows, blocks, part_stride, PARTS, PART_SIZE), 16)
        state = tl.load(pool_ptr + sources[:, None] + values[None, :])
    for tile in range(first_tile, first_tile + num_tiles):
        first_token, count = tl.load(tiles_ptr + tile * 4), tl.load(tiles_ptr + tile * 4 + 1)
        write = tl.load(tiles_ptr + tile * 4 + 3)
        mask = (index < count)[:, None]
        tokens = (first_token + index).to(tl.int64)
        lines = (tl.cast(tile, tl.int64) * HEADS + head) * TILE + index
        total = tl.load(decay_ptr + lines)
        last = tl.load(decay_ptr + (tl.cast(tile, tl.int64) * HEADS + head) * TILE + TILE - 1)
        places = (tokens * KEY_HEADS + head // GROUP)[:, None] * KEY + keys[None, :]
        q = tl.load(q_ptr + places, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + places, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + lines[:, None] * KEY + keys[None, :]).to(tl.float32)
        u = tl.load(u_ptr + lines[:, None] * VALUE + values[None, :]).to(tl.float32)
        scores = tl.load(scores_ptr + lines[:, None] * TILE + index[None, :]).to(tl.float32)
        u -= tl.dot(w, state, input_precision=PRECISION)
        out = tl.dot(q * tl.exp(total)[:, None], state, input_precision=PRECISION)
        out += tl.dot(scores, u, input_precision=PRECISION)
        target = (tokens * HEADS + head)[:, None] * VALUE + values[None, :]
        tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=mask)
        grown = tl.dot(tl.trans(k * tl.exp(last - total)[:, None]), u, input_precision=PRECISION)
        state = state * tl.exp(last) + grown
        if write >= 0:
            blocks = tl.load(tables_ptr + write * table_stride + state_rows // (PARTS * PART_SIZE))
            targets = tl.multiple_of(place(state_rows, blocks, part_stride, PARTS, PART_SIZE), 16)
            tl.store(pool_ptr + targets[:, None] + values[None, :], state)
            store_ring(x_ptr, ring_ptr, tables_ptr, write, first_token + count, kept, kept < CHANNELS, chunk_first,
                       position, read, ring_first, x_stride, table_stride, ring_stride,
                       CHANNELS, WIDTH, PARTS, RING_SIZE)  # fmt: skip


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


def delta_rule_prompt(
    rule: DeltaRule, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, z: torch.Tensor, tiles: StateTiles
) -> torch.Tensor:
    """Compute the prompt tokens of a step, and the states after them; arguments as of `delta_rule_step`.

    Four kernels: the convolution; for each tile and head what needs no state; the scan of each chunk, head and slice of
    values over its tiles; and the norm of the outputs.
    """
    if not uses_triton(x.device):
        return delta_rule_prompt_ref(rule, x, a, b, z, tiles)
    conv = causal_conv(x, rule.conv_weight, None, rule.conv, tiles)
    num_tokens, num_tiles, dtype = len(x), len(tiles.tiles), x.dtype
    heads, key, value = rule.shape
    group, columns = heads // rule.num_key_heads, min(value, _COLUMNS)
    precision = "ieee" if dtype == torch.float32 else "tf32"

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    q, k = empty(num_tokens, rule.num_key_heads, key), empty(num_tokens, rule.num_key_heads, key)
    u, w = empty(num_tiles, heads, TILE, value), empty(num_tiles, heads, TILE, key)
    scores, out = empty(num_tiles, heads, TILE, TILE), empty(num_tokens, heads, value)
    decay = torch.empty(num_tiles, heads, TILE, dtype=torch.float32, device=x.device)
    shape = {"KEY_HEADS": rule.num_key_heads, "GROUP": group, "KEY": key, "VALUE": value, "TILE": TILE}
    _delta_rule_tiles_kernel[(num_tiles, rule.num_key_heads)](
        conv, a, b, rule.a_log, rule.dt_bias, q, k, u, w, scores, decay, tiles.tiles, num_tokens,
        a.stride(0), b.stride(0), PRECISION=precision, num_warps=8, **shape, **pdl_options(x.device),
    )  # fmt: skip
    num_slices = heads * (value // columns)
    ring = rule.conv.pool.sizes
    _delta_rule_scan_kernel[(len(tiles.chunks), heads, value // columns)](
        x, q, k, u, w, scores, decay, out, rule.conv.pool.elements, rule.pool.elements,
        tiles.tiles, tiles.chunks, tiles.tables, rule.conv.first, rule.first, x.stride(0), tiles.tables.stride(0),
        ring["part_stride"], COLUMNS=columns, SLICE=triton.next_power_of_2(-(-x.shape[1] // num_slices)),
        WIDTH=rule.conv_weight.shape[1], PRECISION=precision, RING_SIZE=ring["PART_SIZE"],
        num_warps=4, **shape, **rule.pool.sizes, **pdl_options(x.device),
    )  # fmt: skip
    return _gated_norm(rule, out, z)


def _gated_norm(rule: DeltaRule, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Compute `DeltaRule.gated_norm` of contiguous outputs."""
    normed = torch.empty_like(out)
    num_tokens, heads, value = out.shape
    _gated_norm_kernel[(num_tokens, triton.cdiv(heads, 16))](
        out, z, rule.norm_weight, normed, rule.eps, z.stride(0), HEADS=heads, BLOCK=16, SIZE=value,
        num_warps=4, **pdl_options(out.device),
    )  # fmt: skip
    return normed
