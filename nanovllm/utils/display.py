"""Formats numbers and lists for messages, and shows progress."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm

_MOST_SHOWN = 8


def format_count(count: int) -> str:
    """Format a count with three digits, such as 4.85M, 596M or 8.19B."""
    # tqdm writes G for billions, as for bytes.
    return str(tqdm.format_sizeof(count)).replace("G", "B")


def shown(names: list[str]) -> str:
    """Format the first names and the number of others for a message: mixtures have tens of thousands of tensors."""
    more = len(names) - _MOST_SHOWN
    return f"{names[:_MOST_SHOWN]}" + (f" and {more} more" if more > 0 else "")


def install_hint(extra: str) -> str:
    """Return the command that installs an extra, from a package index or from the source."""
    return f"pip install 'nanovllm[{extra}]', or pip install '.[{extra}]' in its source"


def loading_bar(stage: str, total: int, unit: str, rank: int = 0) -> Any:
    """Return a bar that disappears when closed; shown only by rank 0, on a terminal. Unit "B" is bytes."""
    disable = None if total and rank == 0 else True
    return tqdm(
        total=total, desc=stage, unit=unit, unit_scale=unit == "B", disable=disable, leave=False, dynamic_ncols=True
    )
