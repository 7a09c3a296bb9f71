"""Sizes that steps are padded to, and when their graphs are captured."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from nanovllm.attention.triton import FEW_SEQS
from nanovllm.engine import cuda_graph
from nanovllm.engine.cuda_graph import Ladder, StepGraphs, decode_ladder, mixed_ladder
from nanovllm.engine.input_buffers import StepShape
from nanovllm.kernels.skinny_linear import MAX_SKINNY_ROWS


def make_ladder(
    max_num_seqs: int, max_num_batched_tokens: int, shares_prefixes: bool, whole_contexts: bool = False
) -> Ladder:
    shapes = decode_ladder(max_num_seqs, shares_prefixes)
    return Ladder(shapes + mixed_ladder(max_num_seqs, max_num_batched_tokens, shares_prefixes), whole_contexts)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 33, 100, 512])
@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_every_decode_step_fits_and_the_ladder_ends_at_the_most(max_num_seqs: int, shares_prefixes: bool) -> None:
    ladder = make_ladder(max_num_seqs, 16384, shares_prefixes)
    for sharing in (False, True)[: 1 + shares_prefixes]:
        for rows in range(1, max_num_seqs + 1):
            rung = ladder.fit(StepShape(rows, shares_prefixes=sharing))
            assert rung is not None and rows <= rung.num_decodes <= max_num_seqs and not rung.num_chunks
            assert rung.shares_prefixes == sharing, "a step that shares nothing is not made to pay for it"
        assert ladder.fit(StepShape(max_num_seqs + 1, shares_prefixes=sharing)) is None
    if not shares_prefixes:
        assert ladder.fit(StepShape(1, shares_prefixes=True)) is None


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_whole_contexts_have_the_sizes_that_others_have(shares_prefixes: bool) -> None:
    without, ladder = (make_ladder(512, 16384, shares_prefixes, whole) for whole in (False, True))
    for rows, tokens, chunks in ((1, 0, 0), (33, 0, 0), (512, 0, 0), (0, 50, 2), (100, 2000, 32)):
        shape = StepShape(rows, tokens, chunks)
        other = replace(shape, whole_contexts=True)
        rung = ladder.fit(shape)
        assert rung is not None and rung == without.fit(shape)
        assert ladder.fit(other) == replace(rung, whole_contexts=True) and without.fit(other) is None
        sharing = ladder.fit(replace(other, shares_prefixes=True))
        assert sharing is None or (shares_prefixes and sharing.shares_prefixes and sharing.whole_contexts)
    assert ladder.shapes[-1].shares_prefixes == shares_prefixes


def test_the_smallest_that_fits_is_taken() -> None:
    ladder = make_ladder(512, 16384, True)
    for shape in (StepShape(0, 1, 1), StepShape(70, 700, 3), StepShape(512, 300, 32), StepShape(65, 10, 2, True)):
        rung = ladder.fit(shape)
        assert rung is not None
        fitting = [
            other
            for other in ladder.shapes
            if other.num_chunks >= shape.num_chunks
            and other.num_decodes >= shape.num_decodes
            and other.num_tokens >= shape.num_tokens
            and other.shares_prefixes >= shape.shares_prefixes
        ]
        size = rung.num_decodes + rung.num_tokens
        assert rung in fitting and all(size <= other.num_decodes + other.num_tokens for other in fitting)
    assert ladder.fit(StepShape(0, 5000, 1)) is None and ladder.fit(StepShape(0, 64, 33)) is None


@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize("whole_contexts", [False, True])
def test_samples_take_every_kind_of_kernel(shares_prefixes: bool, whole_contexts: bool) -> None:
    def way(shape: StepShape) -> tuple[bool, bool, bool]:
        return bool(shape.num_chunks), shape.shares_prefixes, shape.whole_contexts

    ladder = make_ladder(512, 16384, shares_prefixes, whole_contexts)
    samples = ladder.samples()
    assert set(samples) <= set(ladder.shapes) and len(samples) == len(set(samples)) < len(ladder.shapes) / 4
    ways = {way(shape) for shape in samples}
    assert ways == {way(shape) for shape in ladder.shapes}
    assert len(ways) == 2 * (1 + shares_prefixes) * (1 + whole_contexts)
    for kind in {way for way in ways if not way[0]}:
        rows = {shape.num_decodes for shape in samples if way(shape) == kind}
        assert 512 in rows and any(n <= FEW_SEQS for n in rows) and any(FEW_SEQS < n < 512 for n in rows)
        assert kind[1] or (1 in rows and any(MAX_SKINNY_ROWS < n <= FEW_SEQS for n in rows))
    # Kernels but attention's are found in steps of one kind.
    rows = {shape.num_decodes for shape in samples if way(shape) == (False, False, False)}
    assert any(2 <= n <= MAX_SKINNY_ROWS for n in rows)


def test_few_sizes_and_none_have_samples() -> None:
    assert make_ladder(1, 64, False).samples() and not Ladder([]).samples()


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph; notes in `log` what is done with it."""

    log: ClassVar[list[str]] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.log.append("begin")

    def capture_end(self) -> None:
        self.log.append("end")

    def replay(self) -> None:
        self.log.append("replay")

    def reset(self) -> None:
        self.log.append("reset")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to graphs, on a machine without a device."""
    monkeypatch.setattr(FakeGraph, "log", [])
    monkeypatch.setattr(cuda_graph, "_idle_streams", {})
    for name, value in {
        "CUDAGraph": FakeGraph, "Stream": object, "stream": lambda stream: nullcontext(), "current_device": lambda: 0,
        "graph_pool_handle": object,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return FakeGraph.log


def test_a_shape_is_launched_then_captured_then_replayed(log: list[str]) -> None:
    graphs, small, large = StepGraphs(), StepShape(1), StepShape(2)
    for shape in (small, small, small, large):
        graphs.run(shape, lambda: log.append("step"))
    assert log == ["step", "begin", "step", "end", "replay", "replay", "step"]
    graphs.close()
    assert log[-1] == "reset"
    assert StepGraphs()._stream is graphs._stream
    assert StepGraphs()._stream is not graphs._stream, "it has another owner now"


def test_a_broken_capture_takes_the_other_graphs_along(log: list[str]) -> None:
    graphs, small, large = StepGraphs(), StepShape(1), StepShape(2)

    def step() -> None:
        log.append("step")
        if failing:
            raise RuntimeError("out of memory")

    failing = False
    for shape in (small, small, large):
        graphs.run(shape, step)
    pool, failing = graphs._pool, True
    log.clear()
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.run(large, step)
    assert log == ["begin", "step", "end", "reset", "reset"] and graphs._pool is not pool
    failing = False
    log.clear()
    graphs.run(small, step)
    graphs.run(large, step)
    assert log == ["begin", "step", "end", "replay"] * 2
