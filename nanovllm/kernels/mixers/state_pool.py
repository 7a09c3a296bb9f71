"""States of sequences in blocks of the paged cache.

A state is the bytes of `blocks_per_state` blocks, one after the other: first a block's part in the first layer's keys,
then its part in the second layer's, and so on, as the cache divides it. A layer's tensors lie at fixed offsets in a
state, and a table gives the blocks of each sequence's state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels._triton import jit, tl


@dataclass(frozen=True)
class StatePool:
    """The memory of a cache, as states see it.

    Attributes:
        bytes: [parts, num_blocks, part_bytes] uint8, contiguous; a block has a part in each layer's keys and values.
    """

    bytes: torch.Tensor

    def view(self, dtype: torch.dtype) -> PoolView:
        """Return the pool in elements of a dtype."""
        return PoolView(self.bytes.view(dtype))


@dataclass(frozen=True)
class PoolView:
    """A `StatePool` in elements of one dtype.

    Attributes:
        elements: [parts, num_blocks, part_size].
    """

    elements: torch.Tensor

    @property
    def sizes(self) -> dict[str, int]:
        """Arguments of a kernel that calls `place`."""
        parts, num_blocks, part_size = self.elements.shape
        return {"part_stride": num_blocks * part_size, "PARTS": parts, "PART_SIZE": part_size}

    def offsets(self, index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return the offsets in the pool of elements of a state, int64; table: [blocks_per_state]."""
        parts, num_blocks, part_size = self.elements.shape
        block, part = index // (parts * part_size), index // part_size % parts
        return (part * num_blocks + table.long()[block]) * part_size + index % part_size

    def read(self, first: int, shape: tuple[int, ...], table: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a state that begins at element `first`."""
        index = torch.arange(first, first + torch.Size(shape).numel(), device=table.device)
        return self.elements.view(-1)[self.offsets(index, table)].view(shape)

    def write(self, first: int, values: torch.Tensor, table: torch.Tensor) -> None:
        """Overwrite a tensor of a state that begins at element `first`."""
        index = torch.arange(first, first + values.numel(), device=table.device)
        self.elements.view(-1)[self.offsets(index, table)] = values.reshape(-1)


@jit
def place(index, block, part_stride, PARTS: tl.constexpr, PART_SIZE: tl.constexpr):
    """Return the offsets in a pool of elements of a state; block: from its table, at `index // (PARTS * PART_SIZE)`."""
    part = (index // PART_SIZE % PARTS).to(tl.int64)
    return part * part_stride + block.to(tl.int64) * PART_SIZE + index % PART_SIZE
