"""Copies blocks of the KV cache to the host's memory and back while steps run.

On CUDA the copy engines do it, on a stream of their own, so that no kernel waits for a multiprocessor. Copies are made
in the order in which they are queued, so that they need not be told apart: what a slot holds is there before it is
loaded. Steps and copies wait for each other on the device:

- copies for the steps before them, which may still use the blocks;
- a step for what earlier ones load, and, if it is asked for, what it loads itself;
- a step for what is being saved of the blocks that it gets, which hardly ever happens: others are evicted first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from nanovllm.runner.host_blocks import HostBlocks
from nanovllm.runner.messages import BlockTransfer, ScheduledBatch
from nanovllm.utils.cuda_driver import copy_rows


class BlockCopies:
    """Copies blocks at once, by the CPU.

    Args:
        stacks: the cache: keys of some layers, or values, [layers, num_blocks, ...] each.
        host: the slots.
    """

    def __init__(self, stacks: Sequence[torch.Tensor], host: HostBlocks) -> None:
        self.host = host
        # As bytes, since a copy converts no dtype then.
        self._stacks = [stack.flatten(2).view(torch.uint8) for stack in stacks]
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
            for page, part in self._pages(load.destination, self.host.slot(load.source)):
                self._copy(page, part)

    def _save(self, saves: list[BlockTransfer]) -> None:
        for save in saves:
            for page, part in self._pages(save.source, self.host.slot(save.destination)):
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
            self._stream.synchronize()
            raise

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

    def _load(self, loads: list[BlockTransfer]) -> None:
        super()._load(loads)
        if loads:
            self._loaded = self._stream.record_event()

    def _save(self, saves: list[BlockTransfer]) -> None:
        super()._save(saves)
        if saves:
            self._saving.append((self._stream.record_event(), {save.source for save in saves}))

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        copy_rows(destination, source)
