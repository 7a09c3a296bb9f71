"""Runs whole steps as CUDA graphs, one per capture size; a step is padded up to the next size.

A size is captured when a second step needs it, which takes some 25 ms: few programs need all sizes.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar, cast

import torch

from nanovllm.attention.backend import AttentionBackend, CaptureVariant
from nanovllm.config import Config
from nanovllm.models.base import CausalLM
from nanovllm.runner.batch import StepShape
from nanovllm.runner.messages import NO_ROWS

T = TypeVar("T")
_MIXED_DECODES = (8, 64, 128, 256)
_MIXED_TOKENS = (64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048)
"""Larger steps keep the device busy for longer than the host takes to launch them kernel by kernel. With half these
sizes, 18% of the rows of bench.py's `many` were padding, and with all of them 7%.
"""
_MIXED_CHUNKS = 32
_COARSE_DECODES = (32, 64, 96, 128)
_COARSE_MIXED_DECODES = (64, 256)
_COARSE_MIXED_TOKENS = (256, 2048)

_MAX_DRAFTED_TOKENS = 256
"""Tokens in decode rows with drafts: with more, they do not pay on any device so far."""

_idle_streams: dict[int, list[torch.cuda.Stream]] = {}
"""By device: capture streams of engines that have exited."""


def decode_sizes(max_num_seqs: int, variant: CaptureVariant) -> list[StepShape]:
    """Sizes of decode steps: 1, 2, 4, every 8 rows up to 64, every 16 beyond, and finally the exact maximum."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs + 1, 16)]
    if variant.is_coarse:
        sizes = [*_COARSE_DECODES, *range(192, max_num_seqs + 1, 64)]
    return [StepShape(size, variant=variant.variant) for size in _up_to(sizes, max_num_seqs)]


def mixed_sizes(max_num_seqs: int, max_num_batched_tokens: int, variant: CaptureVariant) -> list[StepShape]:
    """Sizes of steps with prompt tokens."""
    chunks = min(_MIXED_CHUNKS, max_num_seqs)
    tokens = _COARSE_MIXED_TOKENS if variant.is_coarse else _MIXED_TOKENS
    decodes = _COARSE_MIXED_DECODES if variant.is_coarse else _MIXED_DECODES
    return [
        StepShape(num_decodes, num_tokens, chunks, variant.variant)
        for num_tokens, num_decodes in product(tokens, _up_to(decodes, max_num_seqs))
        if num_tokens < 2 * max_num_batched_tokens
    ]


def max_draft_rows(config: Config) -> int:
    """Return the most rows of a step that may compute drafts; see `Runner`."""
    return min(config.max_num_running, _MAX_DRAFTED_TOKENS // (1 + config.num_drafts)) if config.num_drafts else 0


def drafted_sizes(config: Config, backend: AttentionBackend, undrafted: list[StepShape]) -> list[StepShape]:
    """Sizes of steps that make drafts, or whose rows compute some; `undrafted` are the sizes that do neither."""
    most, variant = max_draft_rows(config), backend.plan_host(NO_ROWS.slots, NO_ROWS.slots, NO_ROWS.slots[None]).variant
    # Steps of more rows make no drafts.
    few = dict.fromkeys(replace(shape, num_decodes=min(shape.num_decodes, most)) for shape in undrafted)
    found = [replace(shape, num_drafts=config.num_drafts) for shape in few if shape.variant == variant]
    return found + [replace(shape, drafts=True) for shape in (*few, *found)]


def _up_to(sizes: Iterable[int], most: int) -> list[int]:
    return [*(size for size in sizes if size < most), most]


class CaptureSizes:
    """Sizes (`shapes`) that steps are padded to, with graphs and without, so that both run the same kernels.

    Args:
        shapes, variants: the sizes; their variants, in order of the memory that they need.
        attention_rows, weight_rows, weight_tokens: numbers of decode rows, and of prompt tokens, at which the choice of
            kernels changes.
    """

    def __init__(
        self, shapes: list[StepShape], variants: Sequence[CaptureVariant] = (), attention_rows: Collection[int] = (),
        weight_rows: Collection[int] = (), weight_tokens: Collection[int] = (),
    ) -> None:  # fmt: skip
        self._variants = variants
        self._attention_rows = sorted(attention_rows)
        self._all_rows = sorted({*attention_rows, *weight_rows})
        # One prompt token is the smallest step with a prompt.
        self._all_prompt_tokens = sorted({0, 1, *weight_tokens})
        self._ranks = {item.variant: rank for rank, item in enumerate(variants)}
        self.shapes = sorted(shapes, key=self._cost)
        self._costs = [self._cost(shape) for shape in self.shapes]

    def _cost(self, shape: StepShape) -> tuple[int, int]:
        return shape.num_prompt_tokens + shape.num_row_tokens, self._ranks[shape.variant]

    def fit(self, shape: StepShape) -> StepShape | None:
        """The smallest shape that a step fits into; None if no shape is large enough."""
        if shape.variant not in self._ranks:
            return None
        # Cheaper shapes are too small.
        for size in self.shapes[bisect_left(self._costs, self._cost(shape)) :]:
            if (
                size.variant == shape.variant
                and bool(size.num_chunks) == bool(shape.num_chunks)
                and size.num_decodes >= shape.num_decodes
                and size.num_prompt_tokens >= shape.num_prompt_tokens
                and size.num_chunks >= shape.num_chunks
                and (size.num_drafts, size.drafts) == (shape.num_drafts, shape.drafts)
            ):
                return size
        return None

    def representatives(self) -> list[StepShape]:
        """Return shapes that together launch every kernel variant: small ones, and the largest of each kind."""
        found: list[StepShape | None] = []
        # Only attention differs between variants.
        usual = [item for item in self._variants if not item.is_coarse][-1:]
        for item in [*usual, *(item for item in self._variants if item not in usual)]:
            rows = self._all_rows if item in usual else self._attention_rows
            for num_tokens, num_decodes in product(self._all_prompt_tokens, rows):
                found.append(self.fit(StepShape(num_decodes, num_tokens, min(num_tokens, 1), item.variant)))
        drafted = [shape for shape in self.shapes if shape.num_drafts and shape.drafts]
        found += {(shape.num_decodes, bool(shape.num_chunks)): shape for shape in reversed(drafted)}.values()
        plain = [shape for shape in self.shapes if not shape.num_drafts and not shape.drafts]
        largest = {(bool(shape.num_chunks), shape.variant): shape for shape in plain}
        return list(dict.fromkeys(size for size in [*found, *largest.values()] if size is not None))


def make_capture_sizes(config: Config, backend: AttentionBackend, model: CausalLM, is_cuda: bool) -> CaptureSizes:
    """Return the sizes that steps of an engine are padded to, even if `enforce_eager` captures none."""
    shapes, variants = list[StepShape](), backend.variants()
    for variant in variants if is_cuda and backend.supports_cuda_graph else ():
        shapes += decode_sizes(config.max_num_running, variant)
        if backend.supports_mixed_graph:
            shapes += mixed_sizes(config.max_num_running, config.max_num_batched_tokens, variant)
    if shapes and config.num_drafts:
        shapes += drafted_sizes(config, backend, shapes)
    return CaptureSizes(shapes, variants, backend.kernel_rows, model.kernel_rows, model.kernel_tokens)


class StepGraphs:
    """Steps as graphs, captured when needed."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        # With the return value of the captured call: tensors that each replay fills anew.
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # The default stream cannot be captured. cuBLAS keeps its workspace per stream: the next engine reuses both.
        self._idle_streams = _idle_streams.setdefault(torch.cuda.current_device(), [])
        self._stream = self._idle_streams.pop() if self._idle_streams else torch.cuda.Stream()

    def run(self, key: Hashable, step: Callable[[], T]) -> T:
        """Queue a step, or a part of one, whose kernels `step` launches, and return its result.

        Steps of one key launch the same kernels on the same memory. The first runs eagerly, since modules cannot be
        loaded during a capture; the second is captured; it and later ones are replayed, without calling `step`.
        """
        if key not in self._seen:
            result = step()
            self._seen.add(key)
            return result
        if key not in self._graphs:
            self._graphs[key] = self._capture(step)
        graph, captured = self._graphs[key]
        graph.replay()
        return cast(T, captured)

    def _capture(self, step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        # Objects freed by the collector may wait for the device, which breaks a capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                # Other threads may continue to use the device.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = step()
                finally:
                    graph.capture_end()
        except BaseException:
            # A failed capture invalidates the pool, and with it the cuBLAS workspaces of all other graphs.
            graph.reset()
            self.clear()
            self._pool = torch.cuda.graph_pool_handle()
            raise
        finally:
            if collects:
                gc.enable()
        return graph, result

    def clear(self) -> None:
        """Reset all graphs: NCCL cannot destroy a communicator while a graph holds its calls."""
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def close(self) -> None:
        """Drop all graphs, and leave the stream to the next engine."""
        self.clear()
        self._idle_streams.append(self._stream)
