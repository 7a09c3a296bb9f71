"""Whole steps as CUDA graphs, one for each of the capture sizes; a step is padded up to the next size.

A size is captured when a second step needs it, which takes some 25 ms: few programs need them all.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar, cast

import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.triton import FEW_SEQS
from nanovllm.config import Config
from nanovllm.kernels.linear.skinny_linear import MAX_SKINNY_ROWS
from nanovllm.runner.batch import StepShape

T = TypeVar("T")
_MIXED_DECODES = (8, 64, 128, 256)
_MIXED_TOKENS = (64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048)
"""Larger steps keep the device busy for longer than the host takes to launch them kernel by kernel. With half as many
sizes, 18% of the rows of bench.py's `many` were padding, and with these 7%."""
_MIXED_CHUNKS = 32
_SHARING_DECODES = (32, 64, 96, 128)
_SHARING_MIXED_DECODES = (64, 256)
_SHARING_MIXED_TOKENS = (256, 2048)
"""With shared prefixes fewer: they pay with many rows only, and by more than the padding costs."""
_KERNEL_ROWS = (1, 2, MAX_SKINNY_ROWS + 1, 33, FEW_SEQS + 1, 129, 193)
_KERNEL_TOKENS = (1, 65)
"""Decode rows, and prompt tokens, at which the choice of kernels or of their tiles changes."""
_ATTENTION_ROWS = (1, 17, FEW_SEQS + 1)
"""Decode rows at which the choice of attention kernels changes. With 8 KV heads, 17 rows launch more programs than an
H200 has multiprocessors; with 2 KV heads, 65 do."""

_idle_streams: dict[int, list[torch.cuda.Stream]] = {}
"""By device: streams that engines which have ended captured on."""


def decode_sizes(max_num_seqs: int, uses_cascade: bool) -> list[StepShape]:
    """Sizes of decode steps: 1, 2, 4, every 8 rows up to 64, every 16 beyond, and exactly the most at the end."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs + 1, 16)]
    sharing = [*_SHARING_DECODES, *range(192, max_num_seqs + 1, 64)]
    shapes = [StepShape(size) for size in _up_to(sizes, max_num_seqs)]
    if uses_cascade:
        shapes += [StepShape(size, uses_cascade=True) for size in _up_to(sharing, max_num_seqs)]
    return shapes


def mixed_sizes(max_num_seqs: int, max_num_batched_tokens: int, uses_cascade: bool) -> list[StepShape]:
    """Sizes of steps with prompt tokens."""
    chunks = min(_MIXED_CHUNKS, max_num_seqs)
    sizes = [*product(_MIXED_TOKENS, _up_to(_MIXED_DECODES, max_num_seqs), [False])]
    if uses_cascade:
        sizes += product(_SHARING_MIXED_TOKENS, _up_to(_SHARING_MIXED_DECODES, max_num_seqs), [True])
    return [
        StepShape(num_decodes, num_tokens, chunks, sharing)
        for num_tokens, num_decodes, sharing in sizes
        if num_tokens < 2 * max_num_batched_tokens
    ]


def _up_to(sizes: Iterable[int], most: int) -> list[int]:
    """Return the sizes below `most`, and `most`."""
    return [*(size for size in sizes if size < most), most]


def _cost(shape: StepShape) -> tuple[int, bool, bool]:
    """Return the key that orders shapes: tokens; then cascade attention and split-KV, which take more memory."""
    return shape.num_prompt_tokens + shape.num_decodes, shape.uses_cascade, not shape.single_split


class CaptureSizes:
    """Sizes that steps are padded to, with graphs and without, so that both run the same kernels on the same rows.

    Args:
        shapes: the sizes.
        supports_single_split: whether the backend does; each size then serves both ways.
    """

    def __init__(self, shapes: list[StepShape], supports_single_split: bool = False) -> None:
        whole = [replace(shape, single_split=True) for shape in shapes if supports_single_split]
        self.shapes = sorted([*shapes, *whole], key=_cost)
        self._costs = [_cost(shape) for shape in self.shapes]

    def fit(self, shape: StepShape) -> StepShape | None:
        """The smallest shape that a step fits into; None if there is none."""
        # Smaller ones do not hold it.
        for size in self.shapes[bisect_left(self._costs, _cost(shape)) :]:
            if (
                bool(size.num_chunks) == bool(shape.num_chunks)
                and size.num_decodes >= shape.num_decodes
                and size.num_prompt_tokens >= shape.num_prompt_tokens
                and size.num_chunks >= shape.num_chunks
                and size.uses_cascade >= shape.uses_cascade
                and size.single_split == shape.single_split
            ):
                return size
        return None

    def representatives(self) -> list[StepShape]:
        """Return shapes that together launch every kernel variant: small ones, and the largest of each kind."""
        prompts = [(0, 0), *((num_tokens, 1) for num_tokens in _KERNEL_TOKENS)]
        shapes = [StepShape(rows, *prompt) for prompt in prompts for rows in _KERNEL_ROWS]
        # All but attention is the same whichever way its rows go.
        ways = ((False, True), (True, False), (True, True))
        shapes += [StepShape(rows, *prompt, *way) for way in ways for prompt in prompts for rows in _ATTENTION_ROWS]
        fitting = [self.fit(shape) for shape in shapes]
        largest = {(bool(shape.num_chunks), shape.uses_cascade, shape.single_split): shape for shape in self.shapes}
        return list(dict.fromkeys(size for size in [*fitting, *largest.values()] if size is not None))


def make_capture_sizes(config: Config, backend: AttentionBackend, is_cuda: bool, uses_cascade: bool) -> CaptureSizes:
    """Return what the steps of an engine are padded to, also if `enforce_eager` captures none of them."""
    shapes = []
    if is_cuda and backend.supports_cuda_graph:
        shapes += decode_sizes(config.max_num_running, uses_cascade)
        if backend.supports_mixed_graph:
            shapes += mixed_sizes(config.max_num_running, config.max_num_batched_tokens, uses_cascade)
    return CaptureSizes(shapes, backend.supports_single_split)


class StepGraphs:
    """Steps as graphs, captured as they are needed."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        # With what the captured call returned: tensors that each replay fills anew.
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # The default stream cannot be captured. What cuBLAS works in is the stream's: the next engine gets both.
        self._idle_streams = _idle_streams.setdefault(torch.cuda.current_device(), [])
        self._stream = self._idle_streams.pop() if self._idle_streams else torch.cuda.Stream()

    def run(self, key: Hashable, step: Callable[[], T]) -> T:
        """Queue a step, or a part of one, and return what it returns.

        Args:
            key: steps of one key launch the same kernels, and read and write the same memory.
            step: launches the kernels. The first step of a key runs eagerly, since modules cannot be loaded during a
                capture; the second is captured and replayed; later ones are replayed without calling `step`.
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
        # What the collector frees may wait for the device, which breaks a capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                # Other threads may go on using the device.
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
        """Let go of all graphs, and leave the stream to the next engine."""
        self.clear()
        self._idle_streams.append(self._stream)
