"""Blocks of the KV cache in the host's memory, by slot: memory that the device copies from and to without the CPU.

A block's bytes lie in one piece, page after page, as `KVCache.block` has them. A thread begins at the start to take
memory and to pin it, a chunk at a time.
"""

from __future__ import annotations

import mmap
import threading
import warnings
from contextlib import suppress

import torch

_CHUNK_BYTES = 2**30


class HostBlocks:
    """Memory for blocks, which is taken from the system while the engine runs.

    The first rank decides how many slots are used. A rank that can pin fewer backs the rest with pageable memory, whose
    copies the CPU waits for.

    Args:
        num_slots: blocks.
        block_bytes: bytes of each.
        device: what they are copied from and to; memory is pinned for CUDA.
    """

    def __init__(self, num_slots: int, block_bytes: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._device = device
        self._slots_per_chunk = min(num_slots, max(1, _CHUNK_BYTES // block_bytes))
        self._chunks: list[torch.Tensor] = []
        # How many of them, the first ones, are pinned.
        self._num_pinned = 0
        self._changed = threading.Condition()
        # Whether it grows no more, although it may be asked to.
        self._has_ended = False
        self._thread = threading.Thread(target=self._grow, name="pinning", daemon=True)
        self._thread.start()

    @property
    def num_ready_slots(self) -> int:
        """How many slots, the first ones, have memory."""
        return min(self.num_slots, len(self._chunks) * self._slots_per_chunk)

    @property
    def has_all_slots(self) -> bool:
        """Whether no further slot will have memory."""
        return self._has_ended or self.num_ready_slots == self.num_slots

    def slot(self, slot: int) -> torch.Tensor:
        """Return a slot's memory, [block_bytes] uint8; waits until it has some.

        Raises:
            RuntimeError: the system has no more memory, pageable or not.
        """
        if slot >= self.num_ready_slots:
            with self._changed:
                self._changed.wait_for(lambda: slot < self.num_ready_slots or self._has_ended)
            while slot >= self.num_ready_slots:
                self._chunks.append(torch.empty(self._next_bytes(), dtype=torch.uint8))
        chunk, index = divmod(slot, self._slots_per_chunk)
        return self._chunks[chunk][index * self.block_bytes : (index + 1) * self.block_bytes]

    def close(self) -> None:
        """Give the memory back; nothing may be copied any more."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._thread.join()
        del self._chunks[self._num_pinned :]
        while self._chunks:
            _release(self._chunks.pop(), self._device)

    def _next_bytes(self) -> int:
        return min(self.num_slots - self.num_ready_slots, self._slots_per_chunk) * self.block_bytes

    def _grow(self) -> None:
        """Take memory for all slots, a chunk at a time."""
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
    # Not torch's pinned memory, which stays in this process when the engine has ended.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Pages of 2 MiB are pinned several times faster; a kernel may have none.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Touched before, by several threads: pinning holds a lock of the driver's, for which the engine's launches wait.
    chunk = torch.frombuffer(memory, dtype=torch.uint8).zero_()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), num_bytes, 0))
    return chunk


def _release(chunk: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(chunk.data_ptr()))
