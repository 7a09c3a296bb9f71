"""Recurrences: their kernels against their plain torch forms, which `test_hybrid.py` compares with transformers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nanovllm.kernels.mixers import causal_conv, recurrence
from nanovllm.kernels.mixers import gated_delta_rule as delta
from nanovllm.kernels.mixers.causal_conv import CausalConv
from nanovllm.kernels.mixers.gated_delta_rule import DeltaRule
from nanovllm.kernels.mixers.mamba2 import StateSpace
from nanovllm.kernels.mixers.recurrence import Recurrence
from nanovllm.kernels.mixers.states import TILE, StateRows, StateTensor, StateTiles
from tests.test_kernels import DEVICE, GPU, check_error

WIDTH = 4
NUM_STATES = 24
SAME_BITS = 0.0
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32, torch.float16]
LENGTHS = [1, 2, 63, 64, 65, 128, 300, 4097] if GPU else [1, 2, 63, 64, 65, 130]
Draw = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a gated delta net."""

    key_heads: int
    group: int
    size: int

    @property
    def state(self) -> tuple[int, int, int]:
        return self.key_heads * self.group, self.size, self.size

    @property
    def channels(self) -> int:
        return self.key_heads * (2 + self.group) * self.size

    @property
    def others(self) -> tuple[int, tuple[int, ...]]:
        """Gates, and the shape of z, of a token."""
        return 2 * self.state[0], self.state[::2]

    def make(self, conv: CausalConv, dtype: torch.dtype, randn: Draw, **common: Any) -> Recurrence:
        norm_weight = 1 + 0.1 * randn(self.size)
        return DeltaRule(num_key_heads=self.key_heads, norm_weight=norm_weight, conv=conv, **common)


@dataclass(frozen=True)
class MambaSizes:
    """Sizes of a Mamba-2 mixer."""

    num_heads: int
    size: int
    num_groups: int
    keys: int
    has_norm: bool = True

    @property
    def state(self) -> tuple[int, int, int]:
        return self.num_heads, self.keys, self.size

    @property
    def channels(self) -> int:
        return self.num_heads * self.size + 2 * self.num_groups * self.keys

    @property
    def others(self) -> tuple[int, tuple[int, ...]]:
        return self.num_heads, (self.num_heads * self.size,)

    def make(self, conv: CausalConv, dtype: torch.dtype, randn: Draw, **common: Any) -> Recurrence:
        d, norm_weight, bias = randn(self.num_heads), 1 + 0.1 * randn(self.num_heads * self.size), randn(self.channels)
        return StateSpace(
            num_groups=self.num_groups, d=d, step_limits=(0.2, 1.5), conv=replace(conv, bias=bias.to(dtype)),
            norm_weight=norm_weight.to(dtype) if self.has_norm else None, **common,
        )  # fmt: skip


Sizes = DeltaSizes | MambaSizes
MAMBA = [MambaSizes(6, 16, 2, 32), MambaSizes(2, 80, 2, 16, has_norm=False), MambaSizes(3, 64, 1, 128)]


class Layer:
    """A layer's parameters, and states in a pool of small parts that begins as NaN."""

    def __init__(self, dtype: torch.dtype, sizes: Sizes, num_drafts: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE)

        self.dtype, self.sizes, heads = dtype, sizes, sizes.state[0]
        ring, kept = WIDTH + num_drafts, (NUM_STATES + 1, 2 * (1 + num_drafts), sizes.channels + sizes.others[0])
        # A part holds a few rows of a state, and the layer's states begin within one.
        part, parts = 12 * (sizes.size & -sizes.size), 4
        first = 5 * (sizes.size & -sizes.size)
        ring_first = (first + math.prod(sizes.state)) * 4 // dtype.itemsize
        blocks = -(-(ring_first + ring * sizes.channels) * dtype.itemsize // (4 * part * parts))
        num_blocks = blocks * NUM_STATES
        self.pool = torch.full((parts, num_blocks, 4 * part), 255, dtype=torch.uint8, device=DEVICE)
        order = torch.randperm(num_blocks, generator=generator).to(torch.int32)
        self.tables = order.view(NUM_STATES, blocks).to(DEVICE)
        weight = (randn(sizes.channels, WIDTH) * 0.5).to(dtype)
        inputs = StateTensor(self.pool.view(dtype), ring_first, (ring, sizes.channels))
        # Decays near 1, which remember, and some that forget; a large eps, so that the norm does not blow up the errors
        # of small outputs.
        self.rule = sizes.make(
            CausalConv(weight, None, inputs), dtype, randn, a_log=torch.linspace(-4, 1, heads, device=DEVICE),
            dt_bias=randn(heads), eps=0.1, state=StateTensor(self.pool.view(torch.float32), first, sizes.state),
            kept=torch.full(kept, torch.nan, dtype=dtype, device=DEVICE),
        )  # fmt: skip
        self.conv = self.rule.conv

    def copy(self, dtype: torch.dtype) -> Layer:
        """The same layer in another dtype, with states of its own."""
        other = Layer(dtype, self.sizes, self.conv.inputs.shape[0] - WIDTH)
        own, others = ((each.conv.weight, each.conv.bias, each.rule.norm_weight) for each in (self, other))
        for values, target in zip(own, others, strict=True):
            if values is not None and target is not None:
                target.copy_(values)
        for index in range(NUM_STATES):
            other.write(index, *self.read(index))
        return other

    def read(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.conv.inputs.read(self.tables[index]), self.rule.state.read(self.tables[index])

    def write(self, index: int, ring: torch.Tensor, state: torch.Tensor) -> None:
        self.conv.inputs.write(ring.to(DEVICE, self.dtype), self.tables[index])
        self.rule.state.write(state.to(DEVICE), self.tables[index])

    def fill(self, count: int) -> None:
        """Draw the first states."""
        for index in range(count):
            self.write(index, torch.randn(self.conv.inputs.shape), torch.randn(self.sizes.state))

    def inputs(self, num_tokens: int) -> list[torch.Tensor]:
        """Draw the convolution's inputs, gates and z of tokens, slices of one product."""
        num_gates, shape = self.sizes.others
        widths = [math.prod(shape), self.sizes.channels, num_gates]
        z, x, gates = torch.randn(num_tokens, sum(widths), device=DEVICE).to(self.dtype).split(widths, 1)
        return [x, gates, z.unflatten(1, shape)]


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


def cast(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, gates, z = inputs
    return x.to(dtype), gates.to(dtype), z.to(dtype)


@contextmanager
def using_triton(uses: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (causal_conv, recurrence):
            stack.enter_context(patch.object(module, "uses_triton", lambda device: uses))
        yield


class Compared:
    """A layer by its kernels, in plain torch, and in float32."""

    def __init__(self, layer: Layer) -> None:
        self.layers = layer, layer.copy(layer.dtype), layer.copy(torch.float32)

    def run(self, call: Callable[[Layer], torch.Tensor]) -> list[torch.Tensor]:
        """Return the results of a call for each, and compare them."""
        outs = []
        for layer in self.layers:
            with using_triton(layer is self.layers[0]):
                outs.append(call(layer))
        check_error(*outs)
        return outs

    def check_states(self, written: set[int]) -> None:
        for index in range(NUM_STATES):
            (ring, state), (_, rounded), (exact_ring, exact) = (layer.read(index) for layer in self.layers)
            assert torch.equal(ring.float().nan_to_num(7), exact_ring.nan_to_num(7)), index
            if index in written:
                check_error(state, rounded, exact)
            else:
                assert torch.equal(state.nan_to_num(7), exact.nan_to_num(7)), index


# Published models' heads take the interpreter half a minute.
MARKS = [] if GPU else [pytest.mark.compat]
PROMPTS = [DeltaSizes(2, 2, 16), pytest.param(DeltaSizes(2, 2, 128), marks=MARKS), *MAMBA]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [*PROMPTS, *([DeltaSizes(2, 2, 32), DeltaSizes(2, 2, 64)] if GPU else [])])
def test_prompts(dtype: torch.dtype, sizes: Sizes) -> None:
    layer = Layer(dtype, sizes)
    lengths = LENGTHS if (sizes == PROMPTS[0] and dtype == torch.float32) or GPU else [2, 70]
    layer.fill(len(lengths))
    chunks = []
    for number, length in enumerate(lengths):
        continued = number % 2 == 1
        # Some overwrite the state that they read; some write others on the way, one token after another.
        last = number if number % 3 else 10 + number
        writes = {length: last} | ({max(1, length // 2): 17 + number} if length > 1 and number < 6 else {})
        chunks.append(Chunk(7 * number if continued else 0, length, number if continued else -1, writes))
    compared, inputs = Compared(layer), layer.inputs(sum(lengths))
    compared.run(lambda each: each.rule.prompt(*cast(inputs, each.dtype), make_tiles(chunks, each.tables, padding=2)))
    compared.check_states({write for chunk in chunks for write in chunk.writes.values()})


ROWS = [(DeltaSizes(2, 3, 16), 1), (DeltaSizes(2, 3, 16), 10**9), *((sizes, 0) for sizes in MAMBA)]
LARGE_ROWS = [pytest.param(DeltaSizes(2, 3, 128), fewest, marks=MARKS) for fewest in (1, 10**9)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "fewest_heads"), [*ROWS, *LARGE_ROWS])
def test_decode_rows(dtype: torch.dtype, sizes: Sizes, fewest_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take the slices of their head's state in turn, or one each."""
    monkeypatch.setattr(delta, "_FEWEST_HEADS", fewest_heads)
    monkeypatch.setattr(delta, "_COLUMNS", sizes.size // 4)
    layer = Layer(dtype, sizes)
    layer.fill(8)
    states, positions = [0, 1, 2, 3, 7, 5], torch.tensor([5, 64, 1, 2, 0, 1023], dtype=torch.int32, device=DEVICE)
    compared, inputs = Compared(layer), layer.inputs(6)

    def step(each: Layer) -> torch.Tensor:
        tables = each.tables[states]
        tables[4] = -1
        return each.rule.step(*cast(inputs, each.dtype), StateRows(positions, tables))

    assert not compared.run(step)[0][4].any()
    compared.check_states({0, 1, 2, 3, 5})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("silu", [False, True])
def test_convolutions_alone(dtype: torch.dtype, silu: bool) -> None:
    """Prompts and decode rows, without a scan that stores their inputs."""
    layer = Layer(dtype, DeltaSizes(1, 3, 16))
    layer.fill(8)
    bias = torch.randn(layer.sizes.channels, device=DEVICE).to(dtype)
    # A chunk of three tokens that keeps a state after the first; states overwritten and not; no state.
    chunks = [Chunk(9, 3, 1, {1: 11, 3: 1}), Chunk(0, 130, -1, {64: 12, 130: 8}), Chunk(2, 70, 2, {70: 9})]
    states, positions = [3, 4, 5, 0, 6], torch.tensor([5, 64, 1, 0, 1023], dtype=torch.int32, device=DEVICE)
    x, compared = torch.randn(203, layer.sizes.channels, device=DEVICE).to(dtype), Compared(layer)

    def conv(each: Layer) -> CausalConv:
        return replace(each.conv, bias=bias.to(each.dtype), silu=silu)

    def step(each: Layer) -> torch.Tensor:
        tables = each.tables[states]
        tables[3] = -1
        return conv(each).step(x[:5].to(each.dtype), StateRows(positions, tables))

    compared.run(lambda each: conv(each).prompt(x.to(each.dtype), make_tiles(chunks, each.tables, padding=2)))
    assert not compared.run(step)[0][3].any()
    for index in range(NUM_STATES):
        ring, exact_ring = layer.read(index)[0].float(), compared.layers[2].read(index)[0]
        assert torch.equal(ring.nan_to_num(7), exact_ring.nan_to_num(7)), index
        assert ring.isfinite().any() == (index in {*range(13)} - {10}), index


@dataclass
class Stepped:
    """A layer's step, its states and their tables, and what the tokens from a position on read of one."""

    step: Callable[..., torch.Tensor]
    pool: torch.Tensor
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
    for per_row in (1 + num_drafts, 1 + num_drafts, 1, 1, 1 + num_drafts):
        slots = rng.sample(range(4), 4)
        counts = [0 if slot == padding else rng.randint(1, per_row) for slot in slots]
        ints = torch.tensor([slots, [positions[s] for s in slots], [pending[s] for s in slots]], device=DEVICE).int()
        is_new = torch.arange(per_row, device=DEVICE) < torch.tensor(counts, device=DEVICE).unsqueeze(1)
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
            own = [part.unflatten(0, is_new.shape)[row, :count] for part in new]
            pending[slot] = rng.randint(1, count)
            for i in range(count):
                # What is not accepted is decoded in a copy.
                state = slot + 10 * (i >= pending[slot])
                if i == pending[slot]:
                    plain.pool[:, plain.tables[state]] = plain.pool[:, plain.tables[slot]]
                at = torch.tensor([positions[slot] + i], dtype=torch.int32, device=DEVICE)
                one = StateRows(at, plain.tables[state : state + 1])
                expected = plain.step(*(part[i : i + 1] for part in own), one)
                close(out[row, i], expected.flatten())
            positions[slot] += pending[slot]
            if per_row == 1:
                # Nothing can be rejected.
                pending[slot] = 0
                close(drafted.read(slot, positions[slot]), plain.read(slot, positions[slot]))


@pytest.mark.parametrize("by_kernels", [True, False])
@pytest.mark.parametrize(
    ("sizes", "num_drafts"),
    [(DeltaSizes(2, 2, 16), 1), (DeltaSizes(2, 2, 16), 3), (MambaSizes(2, 48, 2, 16), 2), (None, 4)],
)
def test_drafted_rows_are_decoded_tokens(sizes: Sizes | None, num_drafts: int, by_kernels: bool) -> None:
    """Both recurrences, and a convolution alone."""
    torch.manual_seed(0)
    layer = Layer(torch.float32, sizes or DeltaSizes(2, 2, 16), num_drafts)
    layer.fill(4)
    assert layer.rule.kept is not None
    layer.rule.kept[3] = 1

    def stepped(layer: Layer) -> Stepped:
        def read(index: int, position: int) -> list[torch.Tensor]:
            before = layer.conv.inputs_before(position, layer.read(index)[0])
            return [before] if sizes is None else [before, layer.read(index)[1]]

        conv = replace(layer.conv, silu=False)
        return Stepped(conv.step if sizes is None else layer.rule.step, layer.pool, layer.tables, read)

    def draw(num_tokens: int) -> Sequence[torch.Tensor]:
        inputs = layer.inputs(num_tokens)
        return inputs[:1] if sizes is None else inputs

    with using_triton(by_kernels):
        other, rtol = layer.copy(torch.float32), 2e-4 if GPU or not by_kernels else SAME_BITS
        check_drafted_rows(stepped(layer), stepped(other), draw, num_drafts, rtol)
    assert (layer.rule.kept[3] == 1).all()
