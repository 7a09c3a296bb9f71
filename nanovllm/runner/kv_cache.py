"""The paged KV cache of one device: allocated by each layer's cache spec, and bound to the layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.attention.kv_cache_groups import KVCacheGroup
from nanovllm.attention.kv_cache_spec import NO_STATES, Paged, StateLayout
from nanovllm.kernels.qkv_rope_store import KVPages, KVScales
from nanovllm.layers.attention import CachedAttention
from nanovllm.layers.state import StateLayer
from nanovllm.runner.host_blocks import BlockCopies, CudaBlockCopies, HostBlocks
from nanovllm.runner.messages import ScheduledBatch, StateCache
from nanovllm.utils.device import to_device

_INTERVAL = 16
"""Blocks of a prompt from one kept state to the next."""
_SMALL_STATE = 0.1
"""States of less than this fraction of a block are kept at every block end."""


def state_kind(num_bytes: int, block_bytes: int) -> StateCache:
    """Return the engine's view of states that take blocks of `block_bytes`."""
    is_small = num_bytes < _SMALL_STATE * block_bytes
    return StateCache(-(-num_bytes // block_bytes), interval=1 if is_small else _INTERVAL)


def block_bytes(specs: Sequence[Paged], groups: Sequence[KVCacheGroup], block_size: int) -> int:
    """Return the bytes of a block in all layers of a group."""
    sizes = [spec.num_kv_heads * (spec.key_size + spec.value_size) * spec.dtype.itemsize for spec in specs]
    return block_size * max(sum(sizes[i] for i in group.layers) for group in groups)


@dataclass(frozen=True)
class CacheTensors:
    """Pages of layers with one cache spec, keys before values: [layers, num_blocks, block_size, num_kv_heads, size]."""

    keys: torch.Tensor
    values: torch.Tensor

    def state_pool(self) -> torch.Tensor:
        """Return the same memory in bytes, see `StateTensor`; a ValueError if keys and values differ in size."""
        if self.keys.shape != self.values.shape:
            raise ValueError("states need keys and values of one size")
        num_layers, num_blocks = self.keys.shape[:2]
        shape, stride = (2 * num_layers, *self.keys.shape[1:]), self.keys.stride()
        both = self.keys.as_strided(shape, stride)
        return both.view(torch.uint8).view(2 * num_layers, num_blocks, -1)

    @classmethod
    def zeros(
        cls, spec: Paged, num_layers: int, num_blocks: int, block_size: int, device: torch.device
    ) -> CacheTensors:
        """Allocate zeroed pages, because a masked key is still multiplied, and garbage may be NaN."""
        shape = num_layers, num_blocks, block_size, spec.num_kv_heads
        rows = num_layers * num_blocks * block_size * spec.num_kv_heads
        size = rows * (spec.key_size + spec.value_size)
        if device.type == "cpu":
            # NumPy asks for zeroed memory, which the system provides page by page; filling 1 GiB takes up to 2 s.
            flat = torch.from_numpy(np.zeros(size * spec.dtype.itemsize, np.uint8)).view(spec.dtype)
        else:
            flat = torch.zeros(size, dtype=spec.dtype, device=device)
        keys, values = flat.split([rows * spec.key_size, rows * spec.value_size])
        return cls(keys.view((*shape, spec.key_size)), values.view((*shape, spec.value_size)))


class KVCache:
    """Blocks of keys and values: block i holds the same tokens in each layer of the group that it belongs to.

    Args:
        layers, specs: the attention layers, which get their pages, and their cache specs.
        groups: groups of layers that share blocks; the i-th layers of several groups have equal pages, and share them.
        backend: their attention backend.
        num_clipped: [1] int64 on their device, a running count across caches, if they are in e4m3; see `KVScales`.
        state_layers, layout: the layers with states, and the places of their tensors in a state.

    Attributes:
        tensors: the pages by cache spec; with several groups, regardless of windows.
        copies: copy blocks to host memory and back; None if blocks are not kept there.
    """

    def __init__(
        self, layers: Sequence[CachedAttention], specs: Sequence[Paged], groups: Sequence[KVCacheGroup],
        backend: AttentionBackend, num_clipped: torch.Tensor,
        *, num_blocks: int, block_size: int, state_layers: Sequence[StateLayer] = (), layout: StateLayout = NO_STATES,
    ) -> None:  # fmt: skip
        self._layers: list[CachedAttention | StateLayer] = [*layers, *state_layers]
        self._device = num_clipped.device
        self.copies: BlockCopies | None = None
        is_e4m3 = any(spec.dtype == torch.float8_e4m3fn for spec in specs)
        self.num_clipped = num_clipped if is_e4m3 else None
        for layer, spec in zip(layers, specs, strict=True):
            backend.check(spec, layer.options)
        # The blocks of several groups share one tensor.
        pages = specs if len(groups) == 1 else [replace(spec, window=None) for spec in specs]
        counts = [Counter(pages[i] for i in group.layers) for group in groups]
        self.tensors = {
            page: CacheTensors.zeros(page, max(count[page] for count in counts), num_blocks, block_size, self._device)
            for page in dict.fromkeys(pages)
        }
        for index, group in enumerate(groups):
            free = {page: zip(tensors.keys, tensors.values, strict=True) for page, tensors in self.tensors.items()}
            for i in group.layers:
                k_cache, v_cache = next(free[pages[i]])
                layers[i].bind(KVPages(k_cache, v_cache, self._scales(layers[i])), backend, index)
        if state_layers:
            if len(self.tensors) > 1:
                raise ValueError("a model with states needs attention layers with pages of one size")
            (tensors,) = self.tensors.values()
            pool = tensors.state_pool()
            for state_layer, places in zip(state_layers, layout.places, strict=True):
                state_layer.bind(pool, places)

    def _scales(self, layer: CachedAttention) -> KVScales | None:
        """Return the scales of a layer's e4m3, from the checkpoint, or 1."""
        if self.num_clipped is None:
            return None
        if layer.scales is not None:
            return KVScales(layer.scales.k_scale, layer.scales.v_scale, self.num_clipped)
        keys, values = torch.ones(2, layer.num_kv_heads, device=self._device)
        return KVScales(keys, values, self.num_clipped)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers of a group."""
        return sum(layer[0].nbytes for layer in self.pages())

    @property
    def most_copied_bytes(self) -> int:
        """Bytes of one layer's part of a block; a copy within the device holds one such part at a time."""
        return max(layer[0].nbytes for layer in self.pages())

    def keep_blocks(self, num_slots: int) -> None:
        """Keep blocks in `num_slots` slots in host memory as well, until `unbind`."""
        copies = CudaBlockCopies if self._device.type == "cuda" else BlockCopies
        self.copies = copies(self.stacks(), HostBlocks(num_slots, self.block_bytes, self._device))

    def unbind(self) -> None:
        """Take the pages from the layers, and drop all copies in host memory."""
        if self.copies is not None:
            self.copies.close()
        for layer in self._layers:
            layer.unbind()

    def begin_step(self, batch: ScheduledBatch) -> None:
        """Copy a step's blocks within the device, before the step's inputs are sent."""
        if self.copies is not None:
            self.copies.begin_step(batch)
        # A block may be the source of one copy and the destination of another.
        copies = [(transfer.source, transfer.destination) for transfer in batch.transfers if transfer.kind == "copy"]
        if not copies:
            return
        sources, destinations = to_device(torch.tensor(copies), self._device).unbind(1)
        # Layer by layer, since all layers' blocks of many sequences would be gigabytes at once.
        for layer in self.pages():
            pages = layer.view(torch.uint8) if self.num_clipped is not None else layer
            pages[destinations] = pages[sources]

    def load_and_save(self, batch: ScheduledBatch) -> None:
        """Queue a step's loads and saves once its inputs are sent, which would wait for them on the same link."""
        if self.copies is None:
            return
        moves = [transfer for transfer in batch.transfers if transfer.kind != "copy"]
        if moves:
            self.copies.queue(moves)
        if batch.waits_for_loads:
            self.copies.wait_for_loads()

    def pages(self) -> Iterator[torch.Tensor]:
        """The keys of each layer, and the values, [num_blocks, ...]."""
        return chain.from_iterable(self.stacks())

    def stacks(self) -> list[torch.Tensor]:
        """The keys, and the values, of the layers that cache alike, [layers, num_blocks, ...]."""
        return [stack for tensors in self.tensors.values() for stack in (tensors.keys, tensors.values)]
