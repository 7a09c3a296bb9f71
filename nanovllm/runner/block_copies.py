"""Copies blocks of the KV cache to the host's memory and back while steps run.

On CUDA the copy engines do it, on a stream of their own, in one call a step and direction. Copies are made in the order
in which they are queued, so that they need not be told apart: what a slot holds is there before it is loaded. Steps and
copies wait for each other on the device:

- copies for the steps before them, which may still use the blocks;
- a step for what earlier ones load, and, if it is asked for, what it loads itself;
- a step for what is being saved of the blocks that it gets, which hardly ever happens: others are evicted first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nanovllm.runner.host_blocks import HostBlocks
from nanovllm.runner.messages import BlockTransfer, ScheduledBatch

_STREAM_ORDER = 1
"""Of the driver's `CUmemcpySrcAccessOrder`: sources are read in the order of the stream."""


class BlockCopies:
    """Copies blocks at once, by the CPU.

    Args:
        pages: the cache: keys of each layer, and values, [num_blocks, ...].
        host: the slots.
    """

    def __init__(self, pages: Sequence[torch.Tensor], host: HostBlocks) -> None:
        self.host = host
        self._pages = list(pages)
        self._page_bytes = [page[0].nbytes for page in pages]

    def begin_step(self, batch: ScheduledBatch) -> None:
        """Let a step, whose own copies are not queued yet, wait for copies of earlier ones."""

    def queue(self, transfers: Sequence[BlockTransfer]) -> None:
        """Queue the loads of a step, and then its saves."""
        for kind in ("load", "save"):
            for transfer in (transfer for transfer in transfers if transfer.kind == kind):
                is_load = kind == "load"
                slot, block = transfer.source, transfer.destination
                if not is_load:
                    slot, block = block, slot
                for page, saved in zip(self._pages, self.host.slot(slot).split(self._page_bytes), strict=True):
                    here, there = page[block], saved.view(page.dtype).view(page.shape[1:])
                    here.copy_(there) if is_load else there.copy_(here)

    def wait_for_loads(self) -> None:
        """Let the step being queued wait for its own loads."""

    def close(self) -> None:
        """Wait for all copies, and give the memory back."""
        self._pages.clear()
        self.host.close()


class _Attributes(ctypes.Structure):
    """The driver's `CUmemcpyAttributes`: the order, hints at where sources and destinations are, and flags."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


class CudaBlockCopies(BlockCopies):
    """Copies blocks by the copy engines of a GPU, between pages and pinned slots.

    Args:
        pages, host: see `BlockCopies`.
        batched: one call for all copies of a direction, as far as the driver has it (CUDA 12.8); else one for each.
    """

    def __init__(self, pages: Sequence[torch.Tensor], host: HostBlocks, batched: bool = True) -> None:
        super().__init__(pages, host)
        self._device = pages[0].device
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._batched = batched and hasattr(self._driver, "cuMemcpyBatchAsync")
        self._stream = torch.cuda.Stream(self._device)
        self._sizes = np.array(self._page_bytes, dtype=np.uint64)
        self._addresses = np.array([page.data_ptr() for page in pages], dtype=np.uint64)
        # Of a block's pages in its slot.
        self._offsets = np.cumsum(self._sizes) - self._sizes
        self._loaded: torch.cuda.Event | None = None
        # Saves that may be under way: when they have ended, and the blocks.
        self._saving: list[tuple[torch.cuda.Event, set[int]]] = []

    def begin_step(self, batch: ScheduledBatch) -> None:
        """See `BlockCopies`."""
        self.wait_for_loads()
        if not self._saving:
            return
        self._saving = [(saved, blocks) for saved, blocks in self._saving if not saved.query()]
        given = batch.given_blocks if self._saving else set()
        for saved, blocks in self._saving:
            if not blocks.isdisjoint(given):
                saved.wait()

    def queue(self, transfers: Sequence[BlockTransfer]) -> None:
        """See `BlockCopies`."""
        loads = [transfer for transfer in transfers if transfer.kind == "load"]
        saves = [transfer for transfer in transfers if transfer.kind == "save"]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if loads:
            slots, blocks = [load.source for load in loads], [load.destination for load in loads]
            self._copy(self._pages_at(blocks), self._slots_at(slots))
            self._loaded = self._stream.record_event()
        if saves:
            blocks, slots = [save.source for save in saves], [save.destination for save in saves]
            self._copy(self._slots_at(slots), self._pages_at(blocks))
            self._saving.append((self._stream.record_event(), set(blocks)))

    def wait_for_loads(self) -> None:
        """See `BlockCopies`."""
        if self._loaded is not None:
            self._loaded.wait()
            self._loaded = None

    def close(self) -> None:
        """See `BlockCopies`."""
        try:
            self._stream.synchronize()
        finally:
            super().close()

    def _pages_at(self, blocks: list[int]) -> np.ndarray:
        """Return the addresses of blocks' pages, [blocks, pages]."""
        return self._addresses + np.array(blocks, dtype=np.uint64)[:, None] * self._sizes

    def _slots_at(self, slots: list[int]) -> np.ndarray:
        """Return the addresses of the pages in slots, [slots, pages]."""
        starts = np.array([self.host.slot(slot).data_ptr() for slot in slots], dtype=np.uint64)
        return starts[:, None] + self._offsets

    def _copy(self, destinations: np.ndarray, sources: np.ndarray) -> None:
        """Queue copies of pages between addresses, both [blocks, pages]."""
        sizes = np.broadcast_to(self._sizes, sources.shape)
        if not self._batched:
            for destination, source, size in zip(destinations.flat, sources.flat, sizes.flat, strict=True):
                self._call(
                    "cuMemcpyAsync", ctypes.c_uint64(destination), ctypes.c_uint64(source), ctypes.c_size_t(size)
                )
            return
        arrays = [np.ascontiguousarray(item) for item in (destinations, sources, sizes)]
        attributes, first, failed = _Attributes(_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._call(
            "cuMemcpyBatchAsync",
            *(ctypes.c_void_p(item.ctypes.data) for item in arrays),
            ctypes.c_size_t(sizes.size),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
        )

    def _call(self, name: str, *args: Any) -> None:
        """Call the driver for this stream, whose context the calling thread's launches have made current."""
        error = getattr(self._driver, name)(*args, ctypes.c_void_p(self._stream.cuda_stream))
        if error:
            raise RuntimeError(f"{name} failed with CUDA error {error} on {self._device}")
