"""Numbers and lists for people."""

from __future__ import annotations

from tqdm import tqdm

_MOST_SHOWN = 8


def format_count(count: int) -> str:
    """Return a count in three digits, such as 4.85M, 596M or 8.19B."""
    # tqdm writes G, as for bytes.
    return str(tqdm.format_sizeof(count)).replace("G", "B")


def shown(names: list[str]) -> str:
    """Return the first of these names for a message, and how many more there are: mixtures have 10,000s of tensors."""
    more = len(names) - _MOST_SHOWN
    return f"{names[:_MOST_SHOWN]}" + (f" and {more} more" if more > 0 else "")
