"""What the kernels of a start on Hopper compile to, by version of Triton: the table `kernel_counts.json`.

To write the row of the installed version, after a change that is meant:
`python -m tests.fake_device 90 0.6B bfloat16 | python -m tests.kernel_counts`, with an empty `TRITON_CACHE_DIR`; for
that of another one, with its folder on the `PYTHONPATH`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".json")
CASE = ("90", "0.6B", "bfloat16")
Counts = dict[str, dict[str, int]]
"""By kernel: its variants, the most registers and bank conflicts of one, and the instructions of all."""


def count_kernels(kernels: list[dict[str, Any]]) -> Counts:
    """Sum up what the fake device says of each variant."""
    table: Counts = {}
    for kernel in kernels:
        counts = table.setdefault(kernel["name"], {"variants": 0, "registers": 0, "conflicts": 0})
        counts["variants"] += 1
        for name in ("registers", "conflicts"):
            counts[name] = max(counts[name], kernel[name])
        for name, number in kernel["instructions"].items():
            counts[name] = counts.get(name, 0) + number
    return table


def known_counts(version: str) -> Counts | None:
    """Return a version's row of the table, or None if it has not been measured."""
    row: Counts | None = json.loads(TABLE.read_text()).get(version)
    return row


def changes(counts: Counts, known: Counts) -> list[str]:
    """Return what differs by more than a fifth, in words."""
    found = [f"{kernel} is compiled in one of the two only" for kernel in counts.keys() ^ known.keys()]
    for kernel in counts.keys() & known.keys():
        for name, number in counts[kernel].items():
            if abs(number - known[kernel][name]) > 0.2 * known[kernel][name]:
                found.append(f"{kernel}: {name} {known[kernel][name]} -> {number}")
    return sorted(found)


if __name__ == "__main__":
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    compiled = json.load(sys.stdin)
    table[compiled["triton"]] = count_kernels(compiled["kernels"])
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
