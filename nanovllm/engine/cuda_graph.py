"""The whole decode step as a CUDA graph, one for each rung of a ladder of batch sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch


def batch_size_ladder(max_batch_size: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, every 8 up to 64, every 16 beyond, and exactly the largest at the end."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, max_batch_size + 1, 16)]
    return [size for size in sizes if size < max_batch_size] + [max_batch_size]


class DecodeGraphs:
    """Captured decode steps.

    Args:
        decode: runs the decode step of its argument's number of rows, from static tensors to static tensors.
        sizes: numbers of rows, ascending.
    """

    def __init__(self, decode: Callable[[int], None], sizes: list[int]) -> None:
        self.sizes = sizes
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = None
        # The largest first: the others then fit into its memory.
        for size in reversed(sizes):
            decode(size)
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                decode(size)
            pool = pool or graph.pool()
            self._graphs[size] = graph
        torch.cuda.synchronize()

    def replay(self, size: int) -> None:
        """Queue the step of `size` rows, one of `sizes`."""
        self._graphs[size].replay()
