"""What an attention layer keeps in the KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVCacheSpec:
    """What one layer caches of each token on this rank.

    Attributes:
        num_kv_heads: heads of keys and values.
        key_size, value_size: elements of a head's key and of its value.
        window: tokens that a query sees at most, its own included; None for all before it.
        dtype: of keys and values.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None
    dtype: torch.dtype


def common_window(specs: Iterable[KVCacheSpec]) -> int | None:
    """Return how many tokens some layer sees at most; None if one sees all."""
    windows = [spec.window for spec in specs]
    known = [window for window in windows if window is not None]
    return max(known) if known and len(known) == len(windows) else None
