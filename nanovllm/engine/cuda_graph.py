"""Whole steps as CUDA graphs, one for each rung of a ladder of sizes; a step is padded up to the next rung.

A rung is captured when a second step needs it, which takes some 25 ms: few programs need them all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from nanovllm.attention.triton import FEW_SEQS
from nanovllm.engine.input_buffers import StepShape
from nanovllm.kernels.skinny_linear import MAX_SKINNY_ROWS

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
"""Decode rows, and prompt tokens, from which on other kernels serve, or others of `hopper_batch_linear`'s tiles."""
_ATTENTION_ROWS = (1, 17, FEW_SEQS + 1)
"""Decode rows from which on attention has other kernels; from 17 rows on 8 KV heads have more programs than an H200 has
multiprocessors, and from 65 on 2."""

_idle_streams: dict[int, list[torch.cuda.Stream]] = {}
"""By device: streams that engines which have ended captured on."""


def decode_ladder(max_num_seqs: int, shares_prefixes: bool) -> list[StepShape]:
    """Sizes of decode steps: 1, 2, 4, every 8 rows up to 64, every 16 beyond, and exactly the most at the end."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs + 1, 16)]
    sharing = [*_SHARING_DECODES, *range(192, max_num_seqs + 1, 64)]
    shapes = [StepShape(size) for size in _up_to(sizes, max_num_seqs)]
    if shares_prefixes:
        shapes += [StepShape(size, shares_prefixes=True) for size in _up_to(sharing, max_num_seqs)]
    return shapes


def mixed_ladder(max_num_seqs: int, max_num_batched_tokens: int, shares_prefixes: bool) -> list[StepShape]:
    """Sizes of steps with prompt tokens."""
    chunks = min(_MIXED_CHUNKS, max_num_seqs)
    ladders: list[tuple[tuple[int, ...], tuple[int, ...], bool]] = [(_MIXED_DECODES, _MIXED_TOKENS, False)]
    if shares_prefixes:
        ladders.append((_SHARING_MIXED_DECODES, _SHARING_MIXED_TOKENS, True))
    return [
        StepShape(num_decodes, num_tokens, chunks, sharing)
        for decodes, tokens, sharing in ladders
        for num_tokens in tokens
        if num_tokens < 2 * max_num_batched_tokens
        for num_decodes in _up_to(decodes, max_num_seqs)
    ]


def _up_to(sizes: Iterable[int], most: int) -> list[int]:
    """The sizes below `most`, and that."""
    return [*(size for size in sizes if size < most), most]


class Ladder:
    """Sizes that steps are padded to, with graphs and without, so that both run the same kernels on the same rows.

    Args:
        shapes: the sizes.
        supports_whole_contexts: whether the backend does; each size then serves both ways.
    """

    def __init__(self, shapes: list[StepShape], supports_whole_contexts: bool = False) -> None:
        whole = [replace(shape, whole_contexts=True) for shape in shapes if supports_whole_contexts]
        self.shapes = sorted([*shapes, *whole], key=_cost)

    def fit(self, shape: StepShape) -> StepShape | None:
        """The smallest shape that a step fits into; None if there is none."""
        for rung in self.shapes:
            if (
                bool(rung.num_chunks) == bool(shape.num_chunks)
                and rung.num_decodes >= shape.num_decodes
                and rung.num_tokens >= shape.num_tokens
                and rung.num_chunks >= shape.num_chunks
                and rung.shares_prefixes >= shape.shares_prefixes
                and rung.whole_contexts == shape.whole_contexts
            ):
                return rung
        return None

    def samples(self) -> list[StepShape]:
        """Some of the shapes, small ones and the largest of each kind, which take the kernels that all of them take."""
        prompts = [(0, 0), *((num_tokens, 1) for num_tokens in _KERNEL_TOKENS)]
        shapes = [StepShape(rows, *prompt) for prompt in prompts for rows in _KERNEL_ROWS]
        # All but attention is the same whichever way its rows go.
        ways = ((False, True), (True, False), (True, True))
        shapes += [StepShape(rows, *prompt, *way) for way in ways for prompt in prompts for rows in _ATTENTION_ROWS]
        rungs = [self.fit(shape) for shape in shapes]
        largest = {
            (bool(shape.num_chunks), shape.shares_prefixes, shape.whole_contexts): shape for shape in self.shapes
        }
        return list(dict.fromkeys(rung for rung in [*rungs, *largest.values()] if rung is not None))


class StepGraphs:
    """Steps as graphs, captured as they are needed."""

    def __init__(self) -> None:
        self._seen: set[StepShape] = set()
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # The default stream cannot be captured. What cuBLAS works in is the stream's: the next engine gets both.
        self._idle_streams = _idle_streams.setdefault(torch.cuda.current_device(), [])
        self._stream = self._idle_streams.pop() if self._idle_streams else torch.cuda.Stream()

    def run(self, shape: StepShape, step: Callable[[], None]) -> None:
        """Queue a step, which reads and writes the same memory as all others of its shape.

        The first of a shape is launched kernel by kernel: what is loaded at its first launch cannot be loaded in a
        capture. The second is captured.
        """
        if shape not in self._seen:
            step()
            self._seen.add(shape)
            return
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(step)
        self._graphs[shape].replay()

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # What the collector frees may wait for the device, which breaks a capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                # Other threads may go on using the device.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        except BaseException:
            # Torch takes nothing more into a pool whose capture was broken off, and gives up, with this graph, memory
            # that cuBLAS has in the others: they go too.
            graph.reset()
            self.clear()
            self._pool = torch.cuda.graph_pool_handle()
            raise
        finally:
            if collects:
                gc.enable()
        return graph

    def clear(self) -> None:
        """Let go of all graphs, whoever holds this object: NCCL ends no communicator while a graph has its calls."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def close(self) -> None:
        """The same, for good."""
        self.clear()
        self._idle_streams.append(self._stream)


def _cost(shape: StepShape) -> tuple[int, bool, bool]:
    """What to compare shapes by: their tokens; sharing prefixes, and contexts shared out, take memory of their own."""
    return shape.num_tokens + shape.num_decodes, shape.shares_prefixes, not shape.whole_contexts
