"""Divides layers into groups that share a block table.

Where some layers see a window and others all tokens, a block that covers all layers cannot be released while one of
them needs it. So layers of equal windows form groups of equal size, and a block belongs to one group at a time: layer i
of each group has the same tensor of the cache, and all groups take their blocks from one pool. (vLLM's hybrid KV cache
manager does the same.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanovllm.attention.kv_cache_spec import Paged

_MOST_PADDING = 1.25
"""Layers of the kind with most, divided by layers of the kind with fewest, below which each kind is one group."""
_MOST_GROUPS = 16
"""Groups that the layers would make without padding."""


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers (indices) that share a block table; window: tokens that a query sees at most in any of them, or None."""

    window: int | None
    layers: tuple[int, ...]


def have_equal_pages(specs: Sequence[Paged]) -> bool:
    """Whether layers differ in nothing but their windows, so that their blocks can hold one another's tokens."""
    return len({replace(spec, window=None) for spec in specs}) == 1


def single_group(specs: Sequence[Paged]) -> list[KVCacheGroup]:
    """Return all layers as one group."""
    windows = [spec.window for spec in specs if spec.window is not None]
    window = max(windows) if windows and len(windows) == len(specs) else None
    return [KVCacheGroup(window, tuple(range(len(specs))))]


def make_groups(specs: Sequence[Paged], block_size: int, max_blocks: int) -> list[KVCacheGroup]:
    """Return the groups of layers with equal pages; layers that see all tokens come first.

    It is one group where several would not make the longest sequence, of `max_blocks` blocks, hold less.
    """
    counts = Counter(spec.window for spec in specs)
    windows = sorted(counts, key=lambda window: (window is not None, window or 0))
    fewest, most = min(counts.values()), max(counts.values())
    size = most if most < _MOST_PADDING * fewest else max(fewest, -(-len(specs) // _MOST_GROUPS))
    groups = []
    for window in windows:
        layers = [i for i, spec in enumerate(specs) if spec.window == window]
        groups += [KVCacheGroup(window, tuple(layers[i : i + size])) for i in range(0, len(layers), size)]
    spans = [max_blocks if group.window is None else (group.window - 2) // block_size + 2 for group in groups]
    is_less = size * sum(min(span, max_blocks) for span in spans) < len(specs) * max_blocks
    return groups if len(windows) > 1 and is_less else single_group(specs)
