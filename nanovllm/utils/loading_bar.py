"""Progress bars for the stages of an engine's start."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


def loading_bar(stage: str, total: int, unit: str, rank: int = 0) -> Any:
    """Return a bar that disappears when closed; shown only by rank 0, on a terminal.

    Args:
        stage: name of the stage.
        total: total work in `unit`; may be 0.
        unit: unit of `total`; "B" for bytes.
        rank: rank of the process.
    """
    disable = None if total and rank == 0 else True
    return tqdm(
        total=total, desc=stage, unit=unit, unit_scale=unit == "B", disable=disable, leave=False, dynamic_ncols=True
    )
