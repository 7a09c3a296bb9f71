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

from nanovllm.kernels._triton import jit, pdl_options, tl, triton, uses_triton, wait_for_previous
from nanovllm.kernels.mixers.causal_conv import (
    ConvState,
    causal_conv,
    causal_conv_drafts,
    causal_conv_step,
    store_ring,
    store_rings_ref,
)
from nanovllm.kernels.mixers.state_pool import PoolView, place
from nanovllm.kernels.mixers.state_rows import TILE, DraftedStateRows, StateRows, StateTiles

_EPS = 1e-6
"""Added to the squared length of queries and keys."""
_COLUMNS = 32
"""Values of a slice of a state. Few, so that many programs of a multiprocessor hide each other's latency."""
_FEW_TOKENS = 8
"""Tokens up to which a program normalises 4 heads of outputs, instead of 16."""
_FEWEST_HEADS = 128
"""Heads of all rows from which on a program takes all slices of its head, of twice the values, one after the other."""


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
        kept: in engines with drafts, the convolution's outputs and the gates of tokens; see `DraftedStateRows`.
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
    kept: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a sequence's state in the layer."""
        return self.num_value_heads, self.key_size, self.value_size

    def log_decay(self, a: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of decays in float32; a: [num_tokens, num_value_heads]."""
        return -self.a_log.float().exp() * functional.softplus(a.float() + self.dt_bias.float())

    def gates(self, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logarithms of decays, and step sizes, [num_tokens, num_value_heads] float32."""
        b, a = gates.split(self.num_value_heads, 1)
        return self.log_decay(a), b.float().sigmoid()

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
    rule: DeltaRule, x: torch.Tensor, gates: torch.Tensor, z: torch.Tensor, rows: StateRows | DraftedStateRows
) -> torch.Tensor:
    """Plain torch form of `delta_rule_step`."""
    if isinstance(rows, DraftedStateRows):
        return _plain_drafts(rule, x, gates, z, rows)
    out = torch.zeros_like(z)
    conv = causal_conv_step(x, rule.conv_weight, None, rule.conv, rows)
    index = (rows.writes[:, 0] >= 0).nonzero().squeeze(1).tolist()
    if not index:
        return out
    state = torch.stack([rule.pool.read(rule.first, rule.shape, rows.reads[i]) for i in index])
    q, k, v = rule.heads(conv[index])
    log_decay, beta = rule.gates(gates[index])
    state = state * log_decay.exp()[..., None, None]
    update = beta.unsqueeze(-1) * (v - torch.einsum("rhkv,rhk->rhv", state, k))
    state = state + k.unsqueeze(-1) * update.unsqueeze(-2)
    out[index] = rule.gated_norm(torch.einsum("rhkv,rhk->rhv", state, q), z[index])
    for i, new in zip(index, state, strict=True):
        rule.pool.write(rule.first, new, rows.writes[i])
    return out


def _plain_drafts(
    rule: DeltaRule, x: torch.Tensor, gates: torch.Tensor, z: torch.Tensor, rows: DraftedStateRows
) -> torch.Tensor:
    out, kept = torch.zeros_like(z), rule.kept
    assert kept is not None
    causal_conv_drafts(x, rule.conv_weight, None, rule.conv, rows, gates=gates, kept=kept)
    for row, (_, _, num_pending, num_new) in enumerate(rows.rows.tolist()):
        if num_new:
            tokens, new = rows.kept_tokens(kept, row), rows.new_tokens(row)
            state = rule.pool.read(rule.first, rule.shape, rows.tables[row])
            if num_stored := rows.num_stored(row):
                rule.pool.write(rule.first, _go_on(rule, tokens[:num_stored], state)[1], rows.tables[row])
            out[new] = rule.gated_norm(_go_on(rule, tokens, state)[0][num_pending:], z[new])
    return out


def _go_on(rule: DeltaRule, tokens: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute tokens as they are kept; see `delta_rule_chunk`."""
    channels, gates = tokens.split([len(rule.conv_weight), 2 * rule.num_value_heads], 1)
    return delta_rule_chunk(*rule.heads(channels), *rule.gates(gates), state)


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
    rule: DeltaRule, x: torch.Tensor, gates: torch.Tensor, z: torch.Tensor, tiles: StateTiles
) -> torch.Tensor:
    """Plain torch form of `delta_rule_prompt`."""
    out = torch.zeros(len(x), rule.num_value_heads, rule.value_size, device=x.device)
    q, k, v = rule.heads(causal_conv(x, rule.conv_weight, None, rule.conv, tiles))
    log_decay, beta = rule.gates(gates)
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
def _softplus(x):
    return tl.where(x > 20, x, tl.log(1 + tl.exp(x)))


@jit(unaligned=["a_ptr", "b_ptr", "reads_ptr", "writes_ptr"])
def _delta_rule_step_kernel(
    conv_ptr, a_ptr, b_ptr, out_ptr, a_log_ptr, dt_bias_ptr, pool_ptr, reads_ptr, writes_ptr, first,
    a_stride, b_stride, table_stride, part_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr,
    SLICES: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    key_head = head // GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + KEY_HEADS * GROUP * VALUE
    keys, values = tl.arange(0, KEY), part * (SLICES * COLUMNS) + tl.arange(0, COLUMNS)
    read_ptr, write_ptr = reads_ptr + row * table_stride, writes_ptr + row * table_stride
    places = (row * (KEY_HEADS * GROUP) + head) * VALUE + values
    if tl.load(write_ptr) < 0:
        wait_for_previous(PDL)
        for index in tl.static_range(SLICES):
            tl.store(out_ptr + places + index * COLUMNS, tl.zeros([COLUMNS], out_ptr.dtype.element_ty))
    else:
        # Rows of a state, which begin anywhere in a block. No kernel since the last step writes to it.
        state_rows = first + (head * KEY + keys) * VALUE
        blocks = tl.load(read_ptr + state_rows // (PARTS * PART_SIZE))
        sources = tl.multiple_of(place(state_rows, blocks, part_stride, PARTS, PART_SIZE), 16)
        source_ptrs = pool_ptr + sources[:, None] + values[None, :]
        following = tl.load(source_ptrs)
        blocks = tl.load(write_ptr + state_rows // (PARTS * PART_SIZE))
        targets = tl.multiple_of(place(state_rows, blocks, part_stride, PARTS, PART_SIZE), 16)
        target_ptrs = pool_ptr + targets[:, None] + values[None, :]
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
                following = tl.load(source_ptrs + (index + 1) * COLUMNS)
            v = tl.load(value_ptrs + index * COLUMNS).to(tl.float32)
            update = beta * (v - tl.sum(state * k[:, None], axis=0))
            state += k[:, None] * update[None, :]
            tl.store(target_ptrs + index * COLUMNS, state)
            out = tl.sum(state * q[:, None], axis=0)
            tl.store(out_ptr + places + index * COLUMNS, out.to(out_ptr.dtype.element_ty))


@jit(unaligned=["rows_ptr", "tables_ptr"])
def _delta_rule_drafts_kernel(
    kept_ptr, out_ptr, a_log_ptr, dt_bias_ptr, pool_ptr, rows_ptr, tables_ptr, first, table_stride, part_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr,
    PER_ROW: tl.constexpr, ENTRIES: tl.constexpr, PARTS: tl.constexpr, PART_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    keys, values = tl.arange(0, KEY), part * COLUMNS + tl.arange(0, COLUMNS)
    slot, position = tl.load(rows_ptr + row * 4).to(tl.int64), tl.load(rows_ptr + row * 4 + 1)
    num_pending, num_new = tl.load(rows_ptr + row * 4 + 2), tl.load(rows_ptr + row * 4 + 3)
    num_absent = PER_ROW - num_new
    num_stored = num_pending + (num_new if PER_ROW == 1 else 0)
    if num_new == 0:
        wait_for_previous(PDL)
    else:
        # Rows of a state, which begin anywhere in a block. No kernel since the last step writes to it.
        state_rows = first + (head * KEY + keys) * VALUE
        blocks = tl.load(tables_ptr + row * table_stride + state_rows // (PARTS * PART_SIZE))
        places = tl.multiple_of(place(state_rows, blocks, part_stride, PARTS, PART_SIZE), 16)
        state_ptrs = pool_ptr + places[:, None] + values[None, :]
        state = tl.load(state_ptrs)
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
                tl.store(state_ptrs, state)
            if index >= num_pending:
                token = row * PER_ROW + num_absent + index - num_pending
                out = tl.sum(state * q[:, None], axis=0)
                tl.store(out_ptr + (token * HEADS + head) * VALUE + values, out.to(out_ptr.dtype.element_ty))
    for index in range(num_absent):
        out_ptrs = out_ptr + ((row * PER_ROW + index) * HEADS + head) * VALUE + values
        tl.store(out_ptrs, tl.zeros([COLUMNS], out_ptr.dtype.element_ty))


def delta_rule_step(
    rule: DeltaRule, x: torch.Tensor, gates: torch.Tensor, z: torch.Tensor, rows: StateRows | DraftedStateRows
) -> torch.Tensor:
    """Compute one token of each of several sequences, or several drafted ones, and their states.

    Three kernels: the convolution; the rule, by a program for each row and head, or slice of its values; and the norm
    of the outputs.

    Args:
        rule: the layer's.
        x: [num_tokens, channels]; the convolution's inputs.
        gates: [num_tokens, 2 * num_value_heads]; step sizes, then decays, before their functions.
        z: [num_tokens, num_value_heads, value_size]; the output's gate.
        rows: the states.

    Returns:
        Like z; zeros for padding, and for what is not new.
    """
    if not uses_triton(x.device):
        return delta_rule_step_ref(rule, x, gates, z, rows)
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    assert gates.stride(1) == z.stride(2) == 1 and z.stride(1) == rule.value_size
    if isinstance(rows, StateRows):
        _step_rows(rule, x, gates, out, rows)
    else:
        _step_drafts(rule, x, gates, out, rows)
    return _gated_norm(rule, out, z)


def _step_rows(rule: DeltaRule, x: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, rows: StateRows) -> None:
    conv = causal_conv_step(x, rule.conv_weight, None, rule.conv, rows)
    takes_all = len(x) * rule.num_value_heads >= _FEWEST_HEADS
    columns = min(rule.value_size, 2 * _COLUMNS if takes_all else _COLUMNS)
    num_slices = rule.value_size // columns
    in_turn = num_slices if takes_all else 1
    b, a = gates.split(rule.num_value_heads, 1)
    _delta_rule_step_kernel[(len(x), rule.num_value_heads, num_slices // in_turn)](
        conv, a, b, out, rule.a_log, rule.dt_bias, rule.pool.elements, rows.reads, rows.writes, rule.first,
        a.stride(0), b.stride(0), rows.reads.stride(0), KEY_HEADS=rule.num_key_heads,
        GROUP=rule.num_value_heads // rule.num_key_heads, KEY=rule.key_size, VALUE=rule.value_size, COLUMNS=columns,
        SLICES=in_turn, num_warps=4, **rule.pool.sizes, **pdl_options(x.device),
    )  # fmt: skip


def _step_drafts(
    rule: DeltaRule, x: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, rows: DraftedStateRows
) -> None:
    assert rule.kept is not None
    kept = causal_conv_drafts(x, rule.conv_weight, None, rule.conv, rows, gates=gates, kept=rule.kept)
    columns = min(rule.value_size, _COLUMNS)
    _delta_rule_drafts_kernel[(len(rows.rows), rule.num_value_heads, rule.value_size // columns)](
        kept, out, rule.a_log, rule.dt_bias, rule.pool.elements, rows.rows, rows.tables, rule.first,
        rows.tables.stride(0), KEY_HEADS=rule.num_key_heads, GROUP=rule.num_value_heads // rule.num_key_heads,
        KEY=rule.key_size, VALUE=rule.value_size, COLUMNS=columns, PER_ROW=rows.per_row, ENTRIES=kept.shape[1],
        num_warps=4, **rule.pool.sizes, **pdl_options(x.device),
    )  # fmt: skip


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
            blocks = tl.load(tables_ptr + write * table_stride + state_rows // (PARTS * PART_SIZE))
            targets = tl.multiple_of(place(state_rows, blocks, part_stride, PARTS, PART_SIZE), 16)
            tl.store(pool_ptr + targets[:, None] + values[None, :], state)
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


def delta_rule_prompt(
    rule: DeltaRule, x: torch.Tensor, gates: torch.Tensor, z: torch.Tensor, tiles: StateTiles
) -> torch.Tensor:
    """Compute the prompt tokens of a step, and the states after them; arguments as of `delta_rule_step`.

    Four kernels: the convolution; for each tile and head what needs no state; the scan of each chunk, head and slice of
    values over its tiles; and the norm of the outputs.
    """
    if not uses_triton(x.device):
        return delta_rule_prompt_ref(rule, x, gates, z, tiles)
    conv = causal_conv(x, rule.conv_weight, None, rule.conv, tiles)
    num_tiles, dtype, device = len(tiles.tiles), x.dtype, x.device
    heads, key, value = rule.shape
    b, a = gates.split(heads, 1)
    columns = min(value, _COLUMNS)
    shape = {
        "KEY_HEADS": rule.num_key_heads, "GROUP": heads // rule.num_key_heads, "KEY": key, "VALUE": value, "TILE": TILE,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }  # fmt: skip
    inverse = torch.empty(num_tiles, heads, TILE, TILE, dtype=torch.float32, device=device)
    scores, factors = torch.empty_like(inverse, dtype=dtype), torch.empty_like(inverse[:, :, :4])
    _delta_rule_tiles_kernel[(num_tiles, heads)](
        conv, a, b, rule.a_log, rule.dt_bias, inverse, scores, factors, tiles.tiles, a.stride(0), b.stride(0),
        num_warps=4, **shape, **pdl_options(device),
    )  # fmt: skip
    out = torch.empty(len(x), heads, value, dtype=dtype, device=device)
    num_slices, ring = heads * (value // columns), rule.conv.pool.sizes
    _delta_rule_scan_kernel[(value // columns, heads, len(tiles.chunks))](
        x, conv, inverse, scores, factors, out, rule.conv.pool.elements, rule.pool.elements,
        tiles.tiles, tiles.chunks, tiles.tables, rule.conv.first, rule.first, x.stride(0), tiles.tables.stride(0),
        ring["part_stride"], COLUMNS=columns, SLICE=triton.next_power_of_2(-(-x.shape[1] // num_slices)),
        WIDTH=rule.conv_weight.shape[1], RING=rule.conv.size, RING_PART=ring["PART_SIZE"],
        num_warps=4, **shape, **rule.pool.sizes, **pdl_options(device),
    )  # fmt: skip
    return _gated_norm(rule, out, z)


def _gated_norm(rule: DeltaRule, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Compute `DeltaRule.gated_norm` of contiguous outputs."""
    normed = torch.empty_like(out)
    num_tokens, heads, value = out.shape
    block = 4 if num_tokens <= _FEW_TOKENS else 16
    _gated_norm_kernel[(num_tokens, triton.cdiv(heads, block))](
        out, z, rule.norm_weight, normed, rule.eps, z.stride(0), HEADS=heads, BLOCK=block, SIZE=value,
        num_warps=4, **pdl_options(out.device),
    )  # fmt: skip
    return normed
