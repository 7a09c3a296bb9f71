"""Mamba-2: its kernels against its plain torch form, which `test_hybrid.py` compares with transformers'."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch

from nanovllm.kernels.mixers import causal_conv
from nanovllm.kernels.mixers.mamba2 import StateSpace
from nanovllm.kernels.mixers.states import ConvState, StatePool, StateRows
from tests.test_delta_rule import (
    DTYPES,
    LENGTHS,
    NUM_STATES,
    SAME_BITS,
    WIDTH,
    Chunk,
    Stepped,
    check_drafted_rows,
    make_tiles,
)
from tests.test_kernels import DEVICE, GPU, check_error

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_space(
    dtype: torch.dtype, heads: tuple[int, int], groups: tuple[int, int], has_norm: bool = True, num_drafts: int = 0
) -> tuple[StateSpace, torch.Tensor]:
    """A layer, and tables of states in a pool of small parts that begins as NaN."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    (num_heads, size), (num_groups, keys) = heads, groups
    inner, channels, parts = num_heads * size, num_heads * size + 2 * num_groups * keys, 3
    # The state begins, and its rows are cut, within parts.
    part_bytes, first = 4 * 64 * 5, 64
    ring = (first + inner * keys) * 4 // dtype.itemsize
    entries = WIDTH + num_drafts
    blocks = -(-(ring + entries * channels) * dtype.itemsize // (parts * part_bytes))
    pool = torch.full((parts, blocks * NUM_STATES, part_bytes), 255, dtype=torch.uint8, device=DEVICE)
    tables = torch.randperm(blocks * NUM_STATES, generator=generator).to(DEVICE, torch.int32).view(NUM_STATES, blocks)
    space = StateSpace(
        num_groups=num_groups, shape=(num_heads, keys, size), conv_weight=(randn(channels, WIDTH) * 0.5).to(dtype),
        conv_bias=randn(channels).to(dtype),
        # Decays near 1, which remember, and some that forget.
        a_log=torch.linspace(-4, 1, num_heads, device=DEVICE), dt_bias=randn(num_heads), d=randn(num_heads),
        step_limits=(0.2, 1.5), norm_weight=(1 + 0.1 * randn(inner)).to(dtype) if has_norm else None, eps=0.1,
        conv=ConvState(StatePool(pool).view(dtype), ring, entries), pool=StatePool(pool).view(torch.float32),
        first=first,
        kept=torch.full((4, 2 * (1 + num_drafts), channels + num_heads), torch.nan, dtype=dtype, device=DEVICE),
    )  # fmt: skip
    return space, tables


def random_inputs(space: StateSpace, num_tokens: int) -> Inputs:
    """Draw the outputs of a layer's projections, slices of one product."""
    (heads, _, size), channels = space.shape, len(space.conv_weight)
    made = torch.randn(num_tokens, heads * size + channels + heads, device=DEVICE).to(space.conv_weight.dtype)
    z, x, dt = made.split([heads * size, channels, heads], 1)
    return x, dt, z


def part(inputs: Inputs, index: slice) -> Inputs:
    x, dt, z = inputs
    return x[index], dt[index], z[index]


def wide(inputs: Inputs) -> Inputs:
    x, dt, z = inputs
    return x.float(), dt.float(), z.float()


class Run:
    """The same step by the kernels, in plain torch, and in float32."""

    def __init__(self, dtype: torch.dtype, heads: tuple[int, int], groups: tuple[int, int], has_norm: bool) -> None:
        made = [make_space(kind, heads, groups, has_norm) for kind in (dtype, dtype, torch.float32)]
        self.spaces, self.tables = [space for space, _ in made], [tables for _, tables in made]
        exact, (space, *_) = self.spaces[2], self.spaces
        for name in ("conv_weight", "conv_bias", "norm_weight"):
            if (values := getattr(exact, name)) is not None:
                values.copy_(getattr(space, name))

    def start(self, states: range) -> None:
        """Fill states."""
        for index in states:
            state = torch.randn(self.spaces[0].shape)
            ring = torch.randn(WIDTH, len(self.spaces[0].conv_weight)).to(self.spaces[0].conv_weight.dtype)
            for space, tables in zip(self.spaces, self.tables, strict=True):
                space.pool.write(space.first, state.to(DEVICE), tables[index])
                space.conv.pool.write(space.conv.first, ring.to(DEVICE, space.conv_weight.dtype), tables[index])

    def check_states(self, written: set[int]) -> None:
        for index in range(NUM_STATES):
            ring, _, exact_ring = (
                space.conv.pool.read(space.conv.first, (WIDTH, len(space.conv_weight)), tables[index]).float()
                for space, tables in zip(self.spaces, self.tables, strict=True)
            )
            assert torch.equal(ring.nan_to_num(7), exact_ring.nan_to_num(7)), index
            got, rounded, exact = (
                space.pool.read(space.first, space.shape, tables[index])
                for space, tables in zip(self.spaces, self.tables, strict=True)
            )
            if index in written:
                check_error(got, rounded, exact)
            else:
                assert torch.equal(got.nan_to_num(7), exact.nan_to_num(7)), index


SIZES = [((6, 16), (2, 32), True), ((2, 80), (2, 16), False), ((3, 64), (1, 128), True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "has_norm"), SIZES)
def test_prompts(
    dtype: torch.dtype, heads: tuple[int, int], groups: tuple[int, int], has_norm: bool, mixers_by_triton: None
) -> None:
    run, chunks = Run(dtype, heads, groups, has_norm), []
    lengths = LENGTHS if (heads[1] == 16 and dtype == torch.float32) or GPU else [2, 70]
    run.start(range(len(lengths)))
    for number, length in enumerate(lengths):
        continued, last = number % 2 == 1, number if number % 3 else 10 + number
        writes = {length: last} | ({max(1, length // 2): 17 + number} if length > 1 and number < 6 else {})
        chunks.append(Chunk(7 * number if continued else 0, length, number if continued else -1, writes))
    inputs = random_inputs(run.spaces[0], sum(lengths))
    tiles = [make_tiles(chunks, tables, padding=2) for tables in run.tables]
    out = run.spaces[0].prompt(*inputs, tiles[0])
    with patch.object(causal_conv, "uses_triton", lambda device: False):
        rounded = run.spaces[1].prompt_ref(*inputs, tiles[1])
        expected = run.spaces[2].prompt_ref(*wide(inputs), tiles[2])
    check_error(out, rounded, expected)
    run.check_states({write for chunk in chunks for write in chunk.writes.values()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "has_norm"), SIZES)
def test_decode_rows(
    dtype: torch.dtype, heads: tuple[int, int], groups: tuple[int, int], has_norm: bool, mixers_by_triton: None
) -> None:
    run = Run(dtype, heads, groups, has_norm)
    run.start(range(8))
    states, positions = [0, 1, 2, 3, 7, 5], [5, 64, 1, 2, 0, 1023]
    inputs, outs = random_inputs(run.spaces[0], 6), []
    for i, space in enumerate(run.spaces):
        tables, op = run.tables[i][states], space.step_ref if i else space.step
        tables[4] = -1
        rows = StateRows(torch.tensor(positions, dtype=torch.int32, device=DEVICE), tables)
        given = wide(inputs) if i == 2 else inputs
        with patch.object(causal_conv, "uses_triton", lambda device, number=i: number == 0):
            outs.append(op(*given, rows))
    assert not outs[0][4].any()
    check_error(*outs)
    run.check_states({0, 1, 2, 3, 5})


@pytest.mark.parametrize("by_kernels", [True, False])
def test_drafted_rows_are_decoded_tokens(by_kernels: bool, request: pytest.FixtureRequest) -> None:
    if by_kernels:
        request.getfixturevalue("mixers_by_triton")
    torch.manual_seed(0)
    num_drafts = 2
    made = [make_space(torch.float32, (2, 48), (2, 16), num_drafts=num_drafts) for _ in range(2)]
    for index in range(4):
        ring, state = torch.randn(WIDTH + num_drafts, len(made[0][0].conv_weight)), torch.randn(made[0][0].shape)
        for space, tables in made:
            space.pool.write(space.first, state.to(DEVICE), tables[index])
            space.conv.pool.write(space.conv.first, ring.to(DEVICE), tables[index])

    def stepped(space: StateSpace, tables: torch.Tensor) -> Stepped:
        def read(index: int, position: int) -> list[torch.Tensor]:
            before = torch.empty(0, len(space.conv_weight), device=DEVICE)
            inputs = causal_conv.conv_inputs(before, space.conv, tables[index], position, WIDTH)
            return [inputs, space.pool.read(space.first, space.shape, tables[index])]

        return Stepped(space.step, space.pool, tables, read)

    rtol = 2e-4 if GPU or not by_kernels else SAME_BITS
    draw = partial(random_inputs, made[0][0])
    check_drafted_rows(stepped(*made[0]), stepped(*made[1]), draw, num_drafts, rtol)
    assert made[0][0].kept is not None and made[0][0].kept[3].isnan().all()
