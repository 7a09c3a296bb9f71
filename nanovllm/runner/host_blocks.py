"""Keeps blocks of the KV cache in host memory, and copies them there and back while steps run.

A block's bytes are contiguous, page after page. A thread allocates and pins the memory in chunks, from the start on.

On CUDA the copy engines do the work, on a stream of their own, so that no kernel waits for a multiprocessor. Copies are
made in the order in which they are queued: a slot is filled before it is loaded. Steps and copies wait for each other
on the device:

- copies wait for earlier steps, which may still use the blocks;
- a step waits for loads of earlier steps, and, on request, for its own;
- a step waits for in-flight saves of blocks that it reuses; rare, since blocks with copies are evicted first.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from typing_extensions import override

from nanovllm.runner.messages import BlockTransfer, ScheduledBatch
from nanovllm.utils.device import call_driver

_CHUNK_BYTES = 2**30


class HostBlocks:
    """Memory for `num_slots` blocks, which is allocated while the engine runs, and pinned for CUDA.

    The first rank decides how many slots are used. A rank that can pin fewer backs the rest with pageable memory, whose
    copies the CPU waits for.
    """

    def __init__(self, num_slots: int, block_bytes: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._device = device
        self._slots_per_chunk = min(num_slots, max(1, _CHUNK_BYTES // block_bytes))
        self._chunks: list[torch.Tensor] = []
        # Number of pinned slots, which come first.
        self._num_pinned = 0
        self._changed = threading.Condition()
        # Whether allocation is over, although more slots may be requested.
        self._has_ended = False
        self._thread = threading.Thread(target=self._grow, name="pinning", daemon=True)
        self._thread.start()

    @property
    def num_ready_slots(self) -> int:
        """Number of slots that have memory, which come first."""
        return min(self.num_slots, len(self._chunks) * self._slots_per_chunk)

    @property
    def has_all_slots(self) -> bool:
        """Whether no further slot will have memory."""
        return self._has_ended or self.num_ready_slots == self.num_slots

    def slot(self, slot: int) -> torch.Tensor:
        """Return a slot's memory, [block_bytes] uint8, once allocated; a RuntimeError if the system has no more."""
        if slot >= self.num_ready_slots:
            with self._changed:
                self._changed.wait_for(lambda: slot < self.num_ready_slots or self._has_ended)
            while slot >= self.num_ready_slots:
                self._chunks.append(torch.empty(self._next_bytes(), dtype=torch.uint8))
        chunk, index = divmod(slot, self._slots_per_chunk)
        return self._chunks[chunk][index * self.block_bytes : (index + 1) * self.block_bytes]

    def close(self) -> None:
        """Free the memory; no copies may follow."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._thread.join()
        del self._chunks[self._num_pinned :]
        while self._chunks:
            chunk = self._chunks.pop()
            if self._device.type == "cuda":
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(chunk.data_ptr()))

    def _next_bytes(self) -> int:
        return min(self.num_slots - self.num_ready_slots, self._slots_per_chunk) * self.block_bytes

    def _grow(self) -> None:
        """Allocate memory for all slots, a chunk at a time."""
        while not self.has_all_slots:
            chunk, failure = None, ""
            try:
                chunk = _allocate(self._next_bytes(), self._device)
            except (RuntimeError, OSError, MemoryError) as error:
                failure = f"pinned memory of swap_space ends at {self.num_ready_slots} blocks: {error}"
            with self._changed:
                if chunk is None:
                    self._has_ended = True
                else:
                    self._chunks.append(chunk)
                    self._num_pinned += 1
                self._changed.notify_all()
            if failure:
                warnings.warn(failure, stacklevel=1)


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory, [num_bytes] uint8, pinned for CUDA."""
    if device.type != "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8)
    torch.cuda.set_device(device)
    # Not torch's pinned memory, which stays in this process after the engine exits.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Pages of 2 MiB are pinned several times faster; a kernel may lack them.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Touched before, by several threads: pinning holds a driver lock that the engine's launches wait for.
    chunk = torch.frombuffer(memory, dtype=torch.uint8).zero_()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), num_bytes, 0))
    return chunk


class BlockCopies:
    """Copies blocks by the CPU. stacks: keys, or values, of some layers, [layers, num_blocks, ...] each."""

    def __init__(self, stacks: Sequence[torch.Tensor], host: HostBlocks) -> None:
        self.host = host
        # As bytes, so that a copy converts no dtype.
        self._stacks = [stack.flatten(2).view(torch.uint8) for stack in stacks]
        self._shapes = [(len(stack), stack.shape[2]) for stack in self._stacks]

    def begin_step(self, batch: ScheduledBatch) -> None:
        """Make a step, whose own copies are not queued yet, wait for copies of earlier ones."""

    def queue(self, transfers: Sequence[BlockTransfer]) -> None:
        """Queue the loads of a step, and then its saves."""
        for kind in ("load", "save"):
            self._move([transfer for transfer in transfers if transfer.kind == kind])

    def wait_for_loads(self) -> None:
        """Make the step being queued wait for its own loads."""

    def close(self) -> None:
        """Wait for all copies, and free the memory."""
        self._stacks.clear()
        self.host.close()

    def _move(self, transfers: list[BlockTransfer]) -> None:
        for transfer in transfers:
            source, destination = transfer.source, transfer.destination
            if transfer.kind == "load":
                for page, part in self._pages(destination, self.host.slot(source)):
                    self._copy(page, part)
            else:
                for page, part in self._pages(source, self.host.slot(destination)):
                    self._copy(part, page)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy [layers, bytes] of a block."""
        destination.copy_(source)

    def _pages(self, block: int, content: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a block's pages, and their parts of its content, [layers, bytes] each."""
        parts = content.split([layers * size for layers, size in self._shapes])
        for stack, part, shape in zip(self._stacks, parts, self._shapes, strict=True):
            yield stack[:, block], part.view(shape)


class CudaBlockCopies(BlockCopies):
    """Copies blocks by the copy engines of a GPU, between pages and pinned slots; see `BlockCopies`."""

    def __init__(self, stacks: Sequence[torch.Tensor], host: HostBlocks) -> None:
        super().__init__(stacks, host)
        self._device = stacks[0].device
        self._stream = torch.cuda.Stream(self._device)
        self._loaded: torch.cuda.Event | None = None
        # Saves that may be under way: the event that ends each, and its blocks.
        self._saving: list[tuple[torch.cuda.Event, set[int]]] = []

    @override
    def begin_step(self, batch: ScheduledBatch) -> None:
        self.wait_for_loads()
        if not self._saving:
            return
        self._saving = [(saved, blocks) for saved, blocks in self._saving if not saved.query()]
        given = batch.given_blocks if self._saving else set()
        for saved, blocks in self._saving:
            if not blocks.isdisjoint(given):
                saved.wait()

    @override
    def queue(self, transfers: Sequence[BlockTransfer]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                super().queue(transfers)
        except BaseException:
            # An event may not have been recorded, and a later copy would not wait for one that runs.
            self._stream.synchronize()
            raise

    @override
    def wait_for_loads(self) -> None:
        if self._loaded is not None:
            self._loaded.wait()
            self._loaded = None

    @override
    def close(self) -> None:
        try:
            self._stream.synchronize()
        finally:
            super().close()

    @override
    def _move(self, transfers: list[BlockTransfer]) -> None:
        super()._move(transfers)
        if transfers and transfers[0].kind == "load":
            self._loaded = self._stream.record_event()
        elif transfers:
            self._saving.append((self._stream.record_event(), {save.source for save in transfers}))

    @override
    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        copy_rows(destination, source)


class _Place(ctypes.Structure):
    """Source or destination in CUDA_MEMCPY3D."""

    _fields_ = (
        ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("z", ctypes.c_size_t), ("level", ctypes.c_size_t),
        ("memory_type", ctypes.c_int), ("host", ctypes.c_void_p), ("address", ctypes.c_uint64),
        ("array", ctypes.c_void_p), ("reserved", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class _Copy3D(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        ("source", _Place), ("destination", _Place),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("depth", ctypes.c_size_t),
    )  # fmt: skip


_HOST, _DEVICE = 1, 2
"""CU_MEMORYTYPE_HOST, pinned or pageable, and CU_MEMORYTYPE_DEVICE."""


def copy_rows(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy on the current stream with one call, done by copy engines without occupying multiprocessors.

    Args:
        destination, source: [rows, numbers] of one dtype, on the GPU or in host memory. With pageable memory the call
            returns after the copy. Rows are contiguous, and the row stride is a multiple of the row size.
    """
    rows, numbers = source.shape
    row_bytes = numbers * source.itemsize
    # One plane per row, whose height gives the row stride: with a 2D copy's pitch of over 2 GiB the driver would copy
    # rows one by one.
    from_place, to_place = (
        _Place(pitch=row_bytes, height=side.stride(0) // numbers, **_address(side)) for side in (source, destination)
    )
    copy = _Copy3D(source=from_place, destination=to_place, width=row_bytes, height=1, depth=rows)
    stream = torch.cuda.current_stream().cuda_stream
    call_driver("cuMemcpy3DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(stream))


def _address(side: torch.Tensor) -> dict[str, int]:
    if side.is_cuda:
        return {"memory_type": _DEVICE, "address": side.data_ptr()}
    return {"memory_type": _HOST, "host": side.data_ptr()}
