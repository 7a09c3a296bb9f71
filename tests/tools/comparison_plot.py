"""Plot the README's table of throughput: `python -m tests.tools.comparison_plot` writes `.github/comparison.png`."""

from __future__ import annotations

import re
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
_COLORS = {"nanovllm": "#1f6feb", "vLLM": "#9aa4b1", "nano-vLLM": "#d0d7de"}


def rates(readme: str) -> dict[str, list[list[float]]]:
    """Return the table's rates by workload: for each model, nanovllm's, vLLM's and nano-vLLM's."""
    found = {}
    for name, cells in re.findall(r"^\| `(\w+)`[^|]*\| \w+ tokens/s \|(.*)\|$", readme, flags=re.MULTILINE):
        values = [float(cell.strip(" *").replace(",", "")) for cell in cells.split("|")]
        found[name] = [values[:3], values[3:]]
    return found


def floors(readme: str) -> list[float]:
    """Return the rates of `bench` that the hardware allows, a model each."""
    ((first, second),) = re.findall(r"^\| `bench` \(floor: ([\d,]+) and ([\d,]+)\)", readme, flags=re.MULTILINE)
    return [float(value.replace(",", "")) for value in (first, second)]


def main() -> None:
    """Write the plot."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table, floor = rates(readme), floors(readme)
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for index, axes in enumerate(figure.subplots(1, 2, sharey=True)):
        for number, (engine, color) in enumerate(_COLORS.items()):
            shares = [values[index][number] / values[index][1] for values in table.values()]
            places = [place + 0.27 * (number - 1) for place in range(len(table))]
            bars = axes.bar(places, shares, 0.25, label=engine, color=color)
            if engine == "nanovllm":
                axes.bar_label(bars, fmt="%.2f", fontsize=8)
        place = list(table).index("bench")
        axes.hlines(floor[index] / table["bench"][index][1], place - 0.4, place + 0.4, "#d1242f", label="floor")
        axes.set_xticks(range(len(table)), list(table))
        axes.set_title(("Qwen3-0.6B", "Qwen3-8B")[index], fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("throughput, vLLM = 1")
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(ROOT / ".github" / "comparison.png", dpi=110)


if __name__ == "__main__":
    main()
