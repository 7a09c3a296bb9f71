"""Numbers for people."""

from __future__ import annotations

from tqdm import tqdm


def format_count(count: int) -> str:
    """Return a count in three digits, such as 4.85M, 596M or 8.19B."""
    # tqdm's G is that of bytes.
    return str(tqdm.format_sizeof(count)).replace("G", "B")
