"""The gated delta rule: its kernels against its plain torch form, which `test_hybrid.py` compares with transformers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nanovllm.kernels.mixers import causal_conv
from nanovllm.kernels.mixers import gated_delta_rule as delta
from nanovllm.kernels.mixers.gated_delta_rule import DeltaRule
from nanovllm.kernels.mixers.states import TILE, ConvState, StatePool, StateRows, StateTiles
from tests.test_kernels import DEVICE, GPU, check_error

WIDTH = 4
NUM_STATES = 24
SAME_BITS = 0.0


class Layer:
    """A layer's parameters, and states in a pool of small parts that begins as NaN."""

    def __init__(self, dtype: torch.dtype, key_heads: int, group: int, size: int, num_drafts: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE)

        heads = key_heads * group
        self.dtype, self.channels, self.heads, self.size = dtype, (2 * key_heads + heads) * size, heads, size
        ring, kept = WIDTH + num_drafts, (NUM_STATES + 1, 2 * (1 + num_drafts), self.channels + 2 * heads)
        # A part holds a few rows of a state, and the layer's states begin within one.
        part_bytes, parts = 3 * size * 16, 4
        first = 5 * size
        ring_first = (first + heads * size * size) * 4 // dtype.itemsize
        state_bytes = (ring_first + ring * self.channels) * dtype.itemsize
        self.blocks = -(-state_bytes // (parts * part_bytes))
        num_blocks = self.blocks * NUM_STATES
        self.pool = StatePool(torch.full((parts, num_blocks, part_bytes), 255, dtype=torch.uint8, device=DEVICE))
        order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
        self.tables = order.view(NUM_STATES, self.blocks).to(DEVICE)
        # A large eps, so that the norm does not blow up the errors of small outputs.
        self.rule = DeltaRule(
            num_key_heads=key_heads, shape=(heads, size, size),
            conv_weight=(randn(self.channels, WIDTH) * 0.5).to(dtype),
            # Decays near 1, which remember, and some that forget.
            a_log=torch.linspace(-4, 1, heads, device=DEVICE), dt_bias=randn(heads),
            norm_weight=1 + 0.1 * randn(size), eps=0.1, conv=ConvState(self.pool.view(dtype), ring_first, ring),
            pool=self.pool.view(torch.float32), first=first,
            kept=torch.full(kept, torch.nan, dtype=dtype, device=DEVICE),
        )  # fmt: skip

    def copy(self, dtype: torch.dtype) -> Layer:
        """The same layer in another dtype, with states of its own."""
        num_drafts = self.rule.conv.size - WIDTH
        other = Layer(dtype, self.rule.num_key_heads, self.heads // self.rule.num_key_heads, self.size, num_drafts)
        other.rule.conv_weight.copy_(self.rule.conv_weight)
        for index in range(NUM_STATES):
            other.write(index, *self.read(index))
        return other

    def read(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rule = self.rule
        ring = rule.conv.pool.read(rule.conv.first, (rule.conv.size, self.channels), self.tables[index])
        return ring, rule.pool.read(rule.first, rule.shape, self.tables[index])

    def inputs_before(self, position: int, index: int) -> torch.Tensor:
        none = torch.empty(0, self.channels, device=DEVICE)
        return causal_conv.conv_inputs(none, self.rule.conv, self.tables[index], position, WIDTH)

    def write(self, index: int, ring: torch.Tensor, state: torch.Tensor) -> None:
        self.rule.conv.pool.write(self.rule.conv.first, ring.to(DEVICE, self.dtype), self.tables[index])
        self.rule.pool.write(self.rule.first, state.to(DEVICE), self.tables[index])


@dataclass
class Inputs:
    """Outputs of a layer's projections for consecutive tokens."""

    x: torch.Tensor
    gates: torch.Tensor
    z: torch.Tensor

    @classmethod
    def random(cls, layer: Layer, num_tokens: int) -> Inputs:
        shapes = (layer.channels,), (2 * layer.heads,), (layer.heads, layer.size)
        x, gates, z = (torch.randn(num_tokens, *shape, device=DEVICE).to(layer.dtype) for shape in shapes)
        return cls(x, gates, z)

    def at(self, index: slice | list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x[index], self.gates[index], self.z[index]


@dataclass
class Chunk:
    """Tokens of a sequence in one step: from a position, the state read, and states written at ends of some tokens."""

    position: int
    length: int
    read: int
    writes: dict[int, int]


def make_tiles(chunks: list[Chunk], tables: torch.Tensor, padding: int = 0) -> StateTiles:
    tiles, rows, first = list[list[int]](), list[list[int]](), 0
    for number, chunk in enumerate(chunks):
        first_tile, done = len(tiles), 0
        while done < chunk.length:
            ends = [end for end in chunk.writes if end > done]
            end = min([done + TILE, chunk.length, *ends])
            tiles.append([first + done, end - done, number, chunk.writes.get(end, -1)])
            done = end
        rows.append([first, chunk.position, chunk.read, first_tile, len(tiles) - first_tile])
        first += chunk.length
    tiles += [[0, 0, 0, -1]] * padding
    rows += [[0, 0, -1, 0, 0]] * padding
    tensors = [torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in (tiles, rows)]
    return StateTiles(tensors[0], tensors[1], tables)


DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32, torch.float16]
LENGTHS = [1, 2, 63, 64, 65, 128, 300, 4097] if GPU else [1, 2, 63, 64, 65, 130]
# Published models' heads take the interpreter half a minute.
PUBLISHED = pytest.param(128, marks=[] if GPU else [pytest.mark.compat])


def check_states(layer: Layer, same_dtype: Layer, exact: Layer, written: set[int]) -> None:
    for index in range(NUM_STATES):
        (ring, state), (_, rounded), (exact_ring, exact_state) = (
            each.read(index) for each in (layer, same_dtype, exact)
        )
        assert torch.equal(ring.float().nan_to_num(7), exact_ring.nan_to_num(7)), index
        if index in written:
            check_error(state, rounded, exact_state)
        else:
            assert torch.equal(state.nan_to_num(7), exact_state.nan_to_num(7)), index


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, PUBLISHED, *([32, 64] if GPU else [])])
def test_prompts(dtype: torch.dtype, size: int, mixers_by_triton: None) -> None:
    layer = Layer(dtype, 2, 2, size)
    lengths = LENGTHS if (size == 16 and dtype == torch.float32) or GPU else [2, 70]
    chunks = []
    for number, length in enumerate(lengths):
        continued = number % 2 == 1
        # Some overwrite the state that they read; some write others on the way, one token after another.
        last = number if number % 3 else 10 + number
        writes = {length: last} | ({max(1, length // 2): 17 + number} if length > 1 and number < 6 else {})
        chunks.append(Chunk(7 * number if continued else 0, length, number if continued else -1, writes))
        if continued:
            layer.write(number, torch.randn(WIDTH, layer.channels), torch.randn(layer.rule.shape))
    inputs = Inputs.random(layer, sum(lengths))
    same_dtype, exact = layer.copy(dtype), layer.copy(torch.float32)
    wide = Inputs(*(part.float() for part in inputs.at(slice(None))))
    tiles = [make_tiles(chunks, each.tables, padding=2) for each in (layer, same_dtype, exact)]
    out = layer.rule.prompt(*inputs.at(slice(None)), tiles[0])
    with patch.object(causal_conv, "uses_triton", lambda device: False):
        rounded = same_dtype.rule.prompt_ref(*inputs.at(slice(None)), tiles[1])
        expected = exact.rule.prompt_ref(*wide.at(slice(None)), tiles[2])
    check_error(out, rounded, expected)
    check_states(layer, same_dtype, exact, {write for chunk in chunks for write in chunk.writes.values()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, PUBLISHED])
@pytest.mark.parametrize("in_turn", [False, True])
def test_decode_rows(dtype: torch.dtype, size: int, in_turn: bool, mixers_by_triton: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(delta, "_FEWEST_HEADS", 1 if in_turn else 10**9)
    monkeypatch.setattr(delta, "_COLUMNS", size // 4)
    layer = Layer(dtype, 2, 3, size)
    for index in range(8):
        layer.write(index, torch.randn(WIDTH, layer.channels), torch.randn(layer.rule.shape))
    states, positions = [0, 1, 2, 3, 7, 5], [5, 64, 1, 2, 0, 1023]
    inputs = Inputs.random(layer, 6)
    same_dtype, exact = layer.copy(dtype), layer.copy(torch.float32)
    outs = []
    for each in (layer, same_dtype, exact):
        tables = each.tables[states]
        tables[4] = -1
        rows = StateRows(torch.tensor(positions, dtype=torch.int32, device=DEVICE), tables)
        given = inputs if each is not exact else Inputs(*(part.float() for part in inputs.at(slice(None))))
        with ExitStack() as stack:
            if each is not layer:
                stack.enter_context(patch.object(causal_conv, "uses_triton", lambda device: False))
            op = each.rule.step if each is layer else each.rule.step_ref
            outs.append(op(*given.at(slice(None)), rows))
    assert not outs[0][4].any()
    check_error(*outs)
    check_states(layer, same_dtype, exact, {0, 1, 2, 3, 5})


def check_rings(layer: Layer, exact: Layer, written: set[int]) -> None:
    for index in range(NUM_STATES):
        ring, exact_ring = layer.read(index)[0].float(), exact.read(index)[0]
        assert torch.equal(ring.nan_to_num(7), exact_ring.nan_to_num(7)), index
        assert ring.isfinite().any() == (index in written), index


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [False, True])
def test_convolutions_alone(dtype: torch.dtype, silu: bool, mixers_by_triton: None) -> None:
    """Prompts and decode rows, without a scan that stores their inputs."""
    layer = Layer(dtype, 1, 3, 16)
    for index in range(8):
        layer.write(index, torch.randn(WIDTH, layer.channels), torch.randn(layer.rule.shape))
    same_dtype, exact, bias = layer.copy(dtype), layer.copy(torch.float32), torch.randn(layer.channels, device=DEVICE)
    # A chunk of three tokens that keeps a state after the first; states overwritten and not; no state.
    chunks = [Chunk(9, 3, 1, {1: 11, 3: 1}), Chunk(0, 130, -1, {64: 12, 130: 8}), Chunk(2, 70, 2, {70: 9})]
    states, positions = [3, 4, 5, 0, 6], [5, 64, 1, 0, 1023]
    x = torch.randn(203, layer.channels, device=DEVICE).to(dtype)
    prompts, decodes = [], []
    for each, uses_triton in ((layer, True), (same_dtype, False), (exact, False)):
        given, rule, tiles = x.to(each.dtype), each.rule, make_tiles(chunks, each.tables, padding=2)
        tables = each.tables[states]
        tables[3] = -1
        rows = StateRows(torch.tensor(positions, dtype=torch.int32, device=DEVICE), tables)
        args = rule.conv_weight, bias.to(dtype).to(each.dtype), rule.conv
        with patch.object(causal_conv, "uses_triton", lambda device, value=uses_triton: value):
            prompts.append(causal_conv.causal_conv(given, *args, tiles, silu))
            causal_conv.store_rings(given, WIDTH, rule.conv, tiles)
            decodes.append(causal_conv.causal_conv_rows(given[:5], *args, rows, silu=silu))
    check_error(*prompts)
    check_error(*decodes)
    assert not decodes[0][3].any()
    check_rings(layer, exact, {*range(13)} - {10})


@dataclass
class Stepped:
    """A layer's step, its states and their tables, and what the tokens from a position on read of one."""

    step: Callable[..., torch.Tensor]
    pool: StatePool
    tables: torch.Tensor
    read: Callable[[int, int], list[torch.Tensor]]


def check_drafted_rows(
    drafted: Stepped, plain: Stepped, draw: Callable[[int], Sequence[torch.Tensor]], num_drafts: int, rtol: float
) -> None:
    """Assert that drafted rows have the outputs and the states of rows of one token.

    States 0 to 3 are equal in both; slot 3 is padding.
    """
    rng, padding, positions, pending = random.Random(num_drafts), 3, [5, 6, 7, 0], [0, 0, 0, 2]
    close = partial(torch.testing.assert_close, rtol=rtol, atol=rtol / 10)
    for per_row in (1 + num_drafts, 1 + num_drafts, 1, 1, 1 + num_drafts, 1 + num_drafts):
        slots = rng.sample(range(4), 4)
        counts = [0 if slot == padding else rng.randint(1, per_row) for slot in slots]
        ints = torch.tensor([slots, [positions[s] for s in slots], [pending[s] for s in slots]], device=DEVICE).int()
        is_new = torch.arange(per_row, device=DEVICE) >= per_row - torch.tensor(counts, device=DEVICE).unsqueeze(1)
        new = draw(len(slots) * per_row)
        rows = StateRows(ints[1], drafted.tables[slots], per_row, ints[0], ints[2], is_new.sum(1, dtype=torch.int32))
        out = drafted.step(*new, rows).view(*is_new.shape, -1)
        assert not out[~is_new].any()
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            if slot == padding:
                close(drafted.read(slot, WIDTH), plain.read(slot, WIDTH), rtol=0, atol=0)
                continue
            if per_row > 1:
                close(drafted.read(slot, positions[slot]), plain.read(slot, positions[slot]))
            own = [part.unflatten(0, is_new.shape)[row, per_row - count :] for part in new]
            pending[slot] = rng.randint(1, count)
            for i in range(count):
                # What is not accepted is decoded in a copy.
                state = slot + 10 * (i >= pending[slot])
                if i == pending[slot]:
                    plain.pool.elements[:, plain.tables[state]] = plain.pool.elements[:, plain.tables[slot]]
                at = torch.tensor([positions[slot] + i], dtype=torch.int32, device=DEVICE)
                one = StateRows(at, plain.tables[state : state + 1])
                expected = plain.step(*(part[i : i + 1] for part in own), one)
                close(out[row, per_row - count + i], expected.flatten())
            positions[slot] += pending[slot]
            if per_row == 1:
                # Nothing can be rejected.
                pending[slot] = 0
                close(drafted.read(slot, positions[slot]), plain.read(slot, positions[slot]))


def layer_with_drafts(num_drafts: int) -> Layer:
    """A layer with four states."""
    torch.manual_seed(0)
    layer = Layer(torch.float32, 2, 2, 16, num_drafts)
    for index in range(4):
        layer.write(index, torch.randn(WIDTH + num_drafts, layer.channels), torch.randn(layer.rule.shape))
    return layer


@pytest.mark.parametrize(("num_drafts", "by_kernels"), [(1, True), (3, True), (3, False)])
def test_drafted_rows_are_decoded_tokens(num_drafts: int, by_kernels: bool, request: pytest.FixtureRequest) -> None:
    if by_kernels:
        request.getfixturevalue("mixers_by_triton")
    layer = layer_with_drafts(num_drafts)
    assert layer.rule.kept is not None
    layer.rule.kept[3] = 1

    def stepped(layer: Layer) -> Stepped:
        def read(index: int, position: int) -> list[torch.Tensor]:
            return [layer.inputs_before(position, index), layer.read(index)[1]]

        return Stepped(layer.rule.step, layer.pool, layer.tables, read)

    def draw(num_tokens: int) -> tuple[torch.Tensor, ...]:
        return Inputs.random(layer, num_tokens).at(slice(None))

    rtol = 2e-4 if GPU or not by_kernels else SAME_BITS
    check_drafted_rows(stepped(layer), stepped(layer.copy(torch.float32)), draw, num_drafts, rtol)
    assert (layer.rule.kept[3] == 1).all()


@pytest.mark.parametrize("by_kernels", [True, False])
def test_drafted_rows_of_a_convolution_alone(by_kernels: bool, request: pytest.FixtureRequest) -> None:
    if by_kernels:
        request.getfixturevalue("mixers_by_triton")
    layer = layer_with_drafts(num_drafts=4)
    bias = torch.randn(layer.channels, device=DEVICE)

    def stepped(layer: Layer) -> Stepped:
        rule = layer.rule
        step = partial(causal_conv.causal_conv_rows, weight=rule.conv_weight, bias=bias, state=rule.conv, silu=False)
        return Stepped(
            lambda x, rows: step(x, rows=rows), layer.pool, layer.tables,
            lambda index, position: [layer.inputs_before(position, index)],
        )  # fmt: skip

    def draw(num_tokens: int) -> list[torch.Tensor]:
        return [torch.randn(num_tokens, layer.channels, device=DEVICE)]

    rtol = 2e-4 if GPU or not by_kernels else SAME_BITS
    check_drafted_rows(stepped(layer), stepped(layer.copy(torch.float32)), draw, 4, rtol)
