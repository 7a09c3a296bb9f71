"""Formats numbers and lists for messages."""

from __future__ import annotations

from tqdm import tqdm

_MOST_SHOWN = 8


def format_count(count: int) -> str:
    """Format a count with three digits, such as 4.85M, 596M or 8.19B."""
    # tqdm writes G for billions, as for bytes.
    return str(tqdm.format_sizeof(count)).replace("G", "B")


def shown(names: list[str]) -> str:
    """Format the first names and the number of others for a message: mixtures have tens of thousands of tensors."""
    more = len(names) - _MOST_SHOWN
    return f"{names[:_MOST_SHOWN]}" + (f" and {more} more" if more > 0 else "")
