"""Progress bars of the stages of an engine's start."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


def loading_bar(stage: str, total: int, unit: str, rank: int = 0) -> Any:
    """Return a bar that vanishes when it is closed; rank 0 alone shows it, and only on a terminal.

    Args:
        stage: what is done.
        total: of what there is to do, 0 for nothing.
        unit: of `total`; "B" for bytes.
        rank: of the process.
    """
    disable = None if total and rank == 0 else True
    return tqdm(
        total=total, desc=stage, unit=unit, unit_scale=unit == "B", disable=disable, leave=False, dynamic_ncols=True
    )
