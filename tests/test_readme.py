"""The README's example runs as it is written, on the bundled model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_example_of_every_capability_runs() -> None:
    pytest.importorskip("llguidance")
    (program,) = [block.split("```")[0] for block in README.split("```python\n")[1:] if "BUNDLED_MODEL" in block]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.Size([2, 256])" in done.stdout and "finished=True" in done.stdout


def test_the_readme_stays_short() -> None:
    assert README.count("\n") <= 300
