"""The README's example runs as it is written, on the bundled model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_of_every_capability_runs() -> None:
    pytest.importorskip("llguidance")
    (program,) = [block.split("```")[0] for block in README.split("```python\n")[1:] if "BUNDLED_MODEL" in block]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.Size([2, 256])" in done.stdout and "finished=True" in done.stdout


def test_its_first_screen_can_be_followed_without_a_package_index() -> None:
    # A screen has some forty lines: what to install, what to run, and what that looks like.
    screen = README.splitlines()[:40]
    for line in ("pip install .  ", "nanovllm chat  ", "![A session"):
        assert any(shown.startswith(line) for shown in screen), line
    assert "nanovllm[" not in README and "--index-url https://download.pytorch.org/whl/cpu" in README
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[1]
    for named in re.findall(r'pip install "\.\[(\w+)\]"', README):
        assert f"\n{named} = [" in extras
    linked = re.findall(r"\]\((?!https?:|#)([^)]+)\)", README)
    assert ".github/chat.svg" in linked and all((ROOT / path).is_file() for path in linked), linked


def test_the_readme_stays_short() -> None:
    assert README.count("\n") <= 300


def test_links_to_files_are_named_after_them() -> None:
    # A package index shows the text alone.
    links = re.findall(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)]*)\)", README)
    assert links and all(text == path for text, path in links), links
