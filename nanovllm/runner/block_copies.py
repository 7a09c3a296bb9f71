"""Copies blocks of the KV cache to the host's memory and back while steps run.

On CUDA the copy engines do it, on a stream of their own. A block lies in two pieces a layer, of some 512 KiB, which the
link moves at two thirds of its rate, so a kernel on another stream gathers a block before it is copied in one piece, or
scatters it afterwards. One block is gathered while another is copied, since kernels wait for multiprocessors. Copies
are made in the order in which they are queued, so that they need not be told apart: what a slot holds is there before
it is loaded. Steps and copies wait for each other on the device:

- copies for the steps before them, which may still use the blocks;
- a step for what earlier ones load, and, if it is asked for, what it loads itself;
- a step for what is being saved of the blocks that it gets, which hardly ever happens: others are evicted first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import torch

from nanovllm.runner.host_blocks import HostBlocks
from nanovllm.runner.messages import BlockTransfer, ScheduledBatch

_NUM_BUFFERS = 2
_HIGH_PRIORITY = -1
"""Of a stream: a small kernel gets the next multiprocessor that is free, before the rest of a large product does."""


class BlockCopies:
    """Copies blocks at once, by the CPU.

    Args:
        stacks: the cache: keys of some layers, or values, [layers, num_blocks, ...] each; a block of a layer has a
            multiple of 8 bytes.
        host: the slots.
    """

    def __init__(self, stacks: Sequence[torch.Tensor], host: HostBlocks) -> None:
        self.host = host
        # As int64, since wide loads are fewer, and no dtype is left that a copy could convert.
        self._stacks = [stack.flatten(2).view(torch.int64) for stack in stacks]
        self._shapes = [(len(stack), stack.shape[2]) for stack in self._stacks]

    def begin_step(self, batch: ScheduledBatch) -> None:
        """Let a step, whose own copies are not queued yet, wait for copies of earlier ones."""

    def queue(self, transfers: Sequence[BlockTransfer]) -> None:
        """Queue the loads of a step, and then its saves."""
        self._load([transfer for transfer in transfers if transfer.kind == "load"])
        self._save([transfer for transfer in transfers if transfer.kind == "save"])

    def wait_for_loads(self) -> None:
        """Let the step being queued wait for its own loads."""

    def close(self) -> None:
        """Wait for all copies, and give the memory back."""
        self._stacks.clear()
        self.host.close()

    def _load(self, loads: list[BlockTransfer]) -> None:
        for load in loads:
            self._scatter(self.host.slot(load.source), load.destination)

    def _save(self, saves: list[BlockTransfer]) -> None:
        for save in saves:
            self._gather(save.source, self.host.slot(save.destination))

    def _gather(self, block: int, content: torch.Tensor) -> None:
        """Copy a block's pages into one piece, [block bytes] uint8."""
        for page, part in self._pages(block, content):
            part.copy_(page)

    def _scatter(self, content: torch.Tensor, block: int) -> None:
        """Copy them back."""
        for page, part in self._pages(block, content):
            page.copy_(part)

    def _pages(self, block: int, content: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a block's pages, and their parts of its content, [layers, numbers] each."""
        parts = content.view(torch.int64).split([layers * size for layers, size in self._shapes])
        for stack, part, shape in zip(self._stacks, parts, self._shapes, strict=True):
            yield stack[:, block], part.view(shape)


class _Buffer:
    """A block in one piece on the device, and when it was last filled and emptied."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.content = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.filled, self.emptied = torch.cuda.Event(), torch.cuda.Event()


class CudaBlockCopies(BlockCopies):
    """Copies blocks by the copy engines of a GPU, between pages and pinned slots; see `BlockCopies`."""

    def __init__(self, stacks: Sequence[torch.Tensor], host: HostBlocks) -> None:
        super().__init__(stacks, host)
        self._device = stacks[0].device
        # Of gathers and scatters, and of copies between buffers and slots.
        self._stream = torch.cuda.Stream(self._device, priority=_HIGH_PRIORITY)
        self._link = torch.cuda.Stream(self._device)
        self._buffers = cycle([_Buffer(host.block_bytes, self._device) for _ in range(_NUM_BUFFERS)])
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
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                super().queue(transfers)
        except BaseException:
            # An event may not have been recorded, and a later copy would not wait for one that runs.
            self._synchronize()
            raise

    def wait_for_loads(self) -> None:
        """See `BlockCopies`."""
        if self._loaded is not None:
            self._loaded.wait()
            self._loaded = None

    def close(self) -> None:
        """See `BlockCopies`."""
        try:
            self._synchronize()
        finally:
            super().close()

    def _synchronize(self) -> None:
        self._stream.synchronize()
        self._link.synchronize()

    def _load(self, loads: list[BlockTransfer]) -> None:
        super()._load(loads)
        if loads:
            self._loaded = self._stream.record_event()

    def _save(self, saves: list[BlockTransfer]) -> None:
        super()._save(saves)
        if saves:
            self._saving.append((self._stream.record_event(), {save.source for save in saves}))

    def _gather(self, block: int, content: torch.Tensor) -> None:
        buffer = next(self._buffers)
        buffer.emptied.wait(self._stream)
        super()._gather(block, buffer.content)
        buffer.filled.record(self._stream)
        with torch.cuda.stream(self._link):
            buffer.filled.wait(self._link)
            content.copy_(buffer.content, non_blocking=True)
            buffer.emptied.record(self._link)

    def _scatter(self, content: torch.Tensor, block: int) -> None:
        buffer = next(self._buffers)
        with torch.cuda.stream(self._link):
            buffer.emptied.wait(self._link)
            buffer.content.copy_(content, non_blocking=True)
            buffer.filled.record(self._link)
        buffer.filled.wait(self._stream)
        super()._scatter(buffer.content, block)
        buffer.emptied.record(self._stream)
