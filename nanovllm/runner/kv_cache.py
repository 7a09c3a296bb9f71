"""The paged KV cache of one device."""

from __future__ import annotations

import torch

from nanovllm.attention.backend import AttentionBackend
from nanovllm.layers.attention import Attention
from nanovllm.runner.messages import BlockTransfer


class KVCache:
    """Blocks of keys and values, the same in every layer.

    Args:
        layers: the attention layers, which get their share.
        backend: what they attend with.
        num_blocks, block_size: tokens of a block.
        num_kv_heads: of this rank.
        dtype, device: of the cache.

    Attributes:
        tensor: [2, layers, num_blocks, block_size, num_kv_heads, head_dim]; keys, then values.
    """

    def __init__(
        self,
        layers: list[Attention],
        backend: AttentionBackend,
        *,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = 2, len(layers), num_blocks, block_size, num_kv_heads, layers[0].head_dim
        # Zeros, because a masked key still meets a product, and garbage may be NaN.
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        for layer, k_cache, v_cache in zip(layers, *self.tensor, strict=True):
            layer.bind(k_cache, v_cache, backend)

    def transfer(self, transfers: list[BlockTransfer]) -> None:
        """Copy blocks, of which one may be the source of one copy and the destination of another."""
        pairs = torch.tensor([(transfer.source, transfer.destination) for transfer in transfers])
        on_device = (pairs.pin_memory() if self.tensor.is_cuda else pairs).to(self.tensor.device, non_blocking=True)
        sources, destinations = on_device.unbind(1)
        # Layer by layer, since all layers' blocks of many sequences would be gigabytes at once.
        for layer in self.tensor.flatten(0, 1):
            layer[destinations] = layer[sources]
