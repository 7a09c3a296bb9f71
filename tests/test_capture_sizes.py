"""Sizes that steps are padded to, and when their graphs are captured."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from nanovllm.assets import BUNDLED_MODEL
from nanovllm.attention.backend import CaptureVariant, HostPlan
from nanovllm.attention.triton import DecodeVariant
from nanovllm.config import Config
from nanovllm.kernels.policy import FASTEST, FEW_SEQS, MAX_SKINNY_ROWS
from nanovllm.runner import cuda_graph
from nanovllm.runner.batch import StepShape
from nanovllm.runner.cuda_graph import CaptureSizes, StepGraphs, decode_sizes, mixed_sizes


def make_capture_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, uses_cascade: bool, single_split: bool = False
) -> CaptureSizes:
    """The sizes of `TritonBackend`."""
    splits, ways = (True, False) if single_split else (False,), (False, True) if uses_cascade else (False,)
    variants = [CaptureVariant(DecodeVariant(way, split), is_coarse=way) for way in ways for split in splits]
    shapes = [
        shape
        for variant in variants
        for shape in (
            *decode_sizes(max_num_seqs, variant), *mixed_sizes(max_num_seqs, max_num_batched_tokens, variant)
        )
    ]  # fmt: skip
    return CaptureSizes(shapes, variants, FASTEST.attention_rows, FASTEST.dense_rows, FASTEST.dense_tokens)


def variant_of(shape: StepShape) -> DecodeVariant:
    assert isinstance(shape.variant, DecodeVariant)
    return shape.variant


@pytest.mark.parametrize("max_num_seqs", [1, 3, 33, 100, 512])
@pytest.mark.parametrize("uses_cascade", [False, True])
def test_every_decode_step_fits_and_the_ladder_ends_at_the_most(max_num_seqs: int, uses_cascade: bool) -> None:
    capture_sizes = make_capture_sizes(max_num_seqs, 16384, uses_cascade)
    for sharing in (False, True)[: 1 + uses_cascade]:
        for rows in range(1, max_num_seqs + 1):
            size = capture_sizes.fit(StepShape(rows, variant=DecodeVariant(sharing)))
            assert size is not None and rows <= size.num_decodes <= max_num_seqs and not size.num_chunks
            assert variant_of(size).uses_cascade == sharing, "a step that shares nothing is not made to pay for it"
        assert capture_sizes.fit(StepShape(max_num_seqs + 1, variant=DecodeVariant(sharing))) is None
    if not uses_cascade:
        assert capture_sizes.fit(StepShape(1, variant=DecodeVariant(True))) is None


@pytest.mark.parametrize("uses_cascade", [False, True])
def test_whole_contexts_have_the_sizes_that_others_have(uses_cascade: bool) -> None:
    without, capture_sizes = (make_capture_sizes(512, 16384, uses_cascade, whole) for whole in (False, True))
    for rows, tokens, chunks in ((1, 0, 0), (33, 0, 0), (512, 0, 0), (0, 50, 2), (100, 2000, 32)):
        shape = StepShape(rows, tokens, chunks, DecodeVariant())
        other = replace(shape, variant=DecodeVariant(single_split=True))
        size = capture_sizes.fit(shape)
        assert size is not None and size == without.fit(shape)
        assert capture_sizes.fit(other) == replace(size, variant=other.variant) and without.fit(other) is None
        sharing = capture_sizes.fit(replace(other, variant=DecodeVariant(True, True)))
        assert sharing is None or (uses_cascade and sharing.variant == DecodeVariant(True, True))
    assert variant_of(capture_sizes.shapes[-1]).uses_cascade == uses_cascade


def test_the_smallest_that_fits_is_taken() -> None:
    capture_sizes = make_capture_sizes(512, 16384, True)
    for sizes in ((0, 1, 1, False), (70, 700, 3, False), (512, 300, 32, False), (65, 10, 2, True)):
        shape = StepShape(*sizes[:3], DecodeVariant(sizes[3]))
        size = capture_sizes.fit(shape)
        assert size is not None
        fitting = [
            other
            for other in capture_sizes.shapes
            if other.num_chunks >= shape.num_chunks
            and other.num_decodes >= shape.num_decodes
            and other.num_prompt_tokens >= shape.num_prompt_tokens
            and other.variant == shape.variant
        ]
        rows = size.num_decodes + size.num_prompt_tokens
        assert size in fitting and all(rows <= other.num_decodes + other.num_prompt_tokens for other in fitting)
    for tokens, chunks in ((5000, 1), (64, 33)):
        assert capture_sizes.fit(StepShape(0, tokens, chunks, DecodeVariant())) is None


@pytest.mark.parametrize("uses_cascade", [False, True])
@pytest.mark.parametrize("single_split", [False, True])
def test_samples_take_every_kind_of_kernel(uses_cascade: bool, single_split: bool) -> None:
    def way(shape: StepShape) -> tuple[bool, bool, bool]:
        return bool(shape.num_chunks), *variant_of(shape)

    capture_sizes = make_capture_sizes(512, 16384, uses_cascade, single_split)
    samples = capture_sizes.representatives()
    assert (
        set(samples) <= set(capture_sizes.shapes) and len(samples) == len(set(samples)) < len(capture_sizes.shapes) / 4
    )
    ways = {way(shape) for shape in samples}
    assert ways == {way(shape) for shape in capture_sizes.shapes}
    assert len(ways) == 2 * (1 + uses_cascade) * (1 + single_split)
    for kind in {way for way in ways if not way[0]}:
        rows = {shape.num_decodes for shape in samples if way(shape) == kind}
        assert 512 in rows and any(n <= FEW_SEQS for n in rows) and any(FEW_SEQS < n < 512 for n in rows)
        assert kind[1] or (1 in rows and any(MAX_SKINNY_ROWS < n <= FEW_SEQS for n in rows))
    # Kernels but attention's are found in steps of one kind.
    rows = {shape.num_decodes for shape in samples if way(shape) == (False, False, False)}
    assert any(2 <= n <= MAX_SKINNY_ROWS for n in rows)


def test_few_sizes_and_none_have_samples() -> None:
    assert make_capture_sizes(1, 64, False).representatives() and not CaptureSizes([]).representatives()


@pytest.mark.parametrize(("most_drafts", "most_rows"), [(4, 51), (15, 16)])
def test_steps_with_drafts_have_sizes_of_their_own(most_drafts: int, most_rows: int) -> None:
    """Rows verify drafts, the step makes some, or both."""
    variants = [CaptureVariant(DecodeVariant(way), is_coarse=way) for way in (False, True)]
    backend: Any = SimpleNamespace(
        variants=lambda: variants, supports_cuda_graph=True, supports_mixed_graph=True, kernel_rows=(),
        plan_host=lambda *_: HostPlan(DecodeVariant(), np.empty(0, np.int32)),
    )  # fmt: skip
    model: Any = SimpleNamespace(kernel_rows=(), kernel_tokens=())
    speculative_config = {"method": "ngram", "num_speculative_tokens": most_drafts}
    config = Config(BUNDLED_MODEL, max_num_seqs=256, speculative_config=speculative_config)
    capture_sizes = cuda_graph.make_capture_sizes(config, backend, model, is_cuda=True)
    most = cuda_graph.max_draft_rows(config)
    assert most == most_rows
    for rows, (num_tokens, num_chunks), drafts in product(range(1, most + 1), ((0, 0), (100, 32)), (False, True)):
        for num_drafts, way in ((most_drafts, False), (0, False), (0, True)):
            shape = StepShape(rows, num_tokens, num_chunks, DecodeVariant(way), num_drafts, drafts)
            size = capture_sizes.fit(shape)
            assert size is not None and (size.num_drafts, size.drafts) == (num_drafts, drafts), shape
            plain = capture_sizes.fit(replace(shape, num_drafts=0, drafts=False))
            assert plain is not None
            num_decodes = min(plain.num_decodes, most) if drafts else plain.num_decodes
            assert num_drafts or size == replace(plain, num_decodes=num_decodes, drafts=drafts)
    assert capture_sizes.fit(StepShape(most + 1, variant=DecodeVariant(), drafts=True)) is None
    found = capture_sizes.representatives()
    assert {(shape.num_drafts, shape.drafts) for shape in found} == {(0, False), (most_drafts, True)}


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
    """A log of what happens to graphs, on a machine without a device."""
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
