"""The README's examples run as they are written, and what it says of the package is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.plain_install import plain_environment
from tests.test_architecture import CORE, closure, direct_imports
from tests.tools.settings_tables import with_tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "nanovllm"
INSIDE = (PACKAGE / "README.md").read_text(encoding="utf-8")
END = "-- a block --"
LOCAL_LINK = r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#]*)"


class Block(NamedTuple):
    """A block of code, and the comment before it, if it says how the block is run."""

    language: str
    code: str
    mark: str


def blocks() -> list[Block]:
    pattern = r"(?:<!-- ((?:not run|extras):[^>]*?) -->\n+)?^```(python|bash)\n(.*?)^```$"
    found = re.findall(pattern, README + INSIDE, flags=re.MULTILINE | re.DOTALL)
    return [Block(language, code, mark) for mark, language, code in found]


BLOCKS = {f"{number}-{block.code.split(chr(10))[0][:30]}": block for number, block in enumerate(blocks())}
PLAIN = [block.code for block in BLOCKS.values() if block.language == "python" and not block.mark]


def test_marks_stand_before_blocks() -> None:
    """A block is run as on a machine with a plain install and no network, unless the comment before it says otherwise.

    `<!-- not run: REASON -->` leaves it out, and `<!-- extras: NAME NAME -->` has these installed as well.
    """
    marks = re.findall(r"<!-- (?:not run|extras):", README + INSIDE)
    assert len(marks) == sum(bool(block.mark) for block in BLOCKS.values())
    run = [block.language for block in BLOCKS.values() if not block.mark]
    assert {"python", "bash"} <= set(run)


@pytest.mark.parametrize(
    "block",
    [
        # Each starts a process; those in Python that need no extra run in one.
        pytest.param(block, id=name, marks=[pytest.mark.compat] if block.language == "python" else [])
        for name, block in BLOCKS.items()
        if block.code not in PLAIN
    ],
)
def test_a_block_runs(block: Block, tmp_path: Path) -> None:
    kind, _, value = block.mark.partition(":")
    if kind == "not run":
        pytest.skip(value.strip())
    (tmp_path / "environment").mkdir()
    try:
        environment = plain_environment(tmp_path / "environment", value.split())
    except PackageNotFoundError as error:
        pytest.skip(f"needs {error}")
    # As in the repository; files that it writes stay here.
    for path in ROOT.iterdir():
        (tmp_path / path.name).symlink_to(path)
    program = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    done = subprocess.run(
        [*program, block.code], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() or block.language == "bash"
    check_printed(block.code, done.stdout)


def check_printed(code: str, printed: str) -> None:
    """A line that is a comment says what the program prints."""
    for said in re.findall(r"^# (.*)$", code, flags=re.MULTILINE):
        assert said in printed


def test_python_blocks_run_in_a_plain_install_without_a_network(tmp_path: Path) -> None:
    """One process for all, whose imports take the time; each block has names of its own."""
    pytest.importorskip("llguidance")
    program = f"""
import importlib.util, socket
import torch, transformers, nanovllm
assert importlib.util.find_spec("llguidance") is None and importlib.util.find_spec("pytest") is None
for call in (lambda: __import__("llguidance"), lambda: socket.create_connection(("192.0.2.1", 80))):
    try:
        call()
    except (ImportError, OSError) as error:
        print(error)
for code in {PLAIN!r}:
    print({END!r})
    exec(code, {{"__name__": "__main__"}})
"""
    environment = plain_environment(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, *printed = done.stdout.split(END)
    assert first.splitlines() == ["No module named 'llguidance'", "192.0.2.1 is another machine"]
    for code, text in zip(PLAIN, printed, strict=True):
        assert text.strip()
        check_printed(code, text)


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
    assert README.count("\n") <= 170


def test_the_reading_order_is_true() -> None:
    section = INSIDE.split("## Reading order\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w/.]+)` \| (\d+) \|", section, flags=re.MULTILINE)
    counts = [len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file, _ in rows]
    for (file, stated), count in zip(rows, counts, strict=True):
        assert abs(int(stated) - count) <= max(10, count // 10), f"{file} has {count} lines"
    names = {file.removesuffix(".py").replace("/", ".") for file, _ in rows}
    more = {other for other in set().union(*map(direct_imports, names)) - names if not other.endswith("__init__")}
    core = closure(*CORE)
    stated = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d\b", section.split("|")[0])]
    figures = [len(rows), sum(counts), len(more), len(core), sum(core.values())]
    assert all(abs(said - found) <= found // 20 for said, found in zip(stated, figures, strict=True)), figures
    # All of them take part where there is no Triton, and no process is started and no socket opened meanwhile.
    program = f"""
import sys
forbidden = "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "socket.bind", "socket.connect"
def watch(event, arguments):
    assert event not in forbidden, (event, arguments)
sys.modules["triton"] = None
import torch, transformers
sys.addaudithook(watch)
from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
ran = set()
def profile(frame, event, argument):
    ran.add(frame.f_code.co_filename.replace(chr(92), "/").split("nanovllm/")[-1])
with LLM(BUNDLED_MODEL, device="cpu", max_model_len=256) as llm:
    sys.setprofile(profile)
    llm.generate("hello", SamplingParams(max_tokens=2), use_tqdm=False)
    sys.setprofile(None)
assert set({[file for file, _ in rows]}) <= ran, set({[file for file, _ in rows]}) - ran
loaded = {{name.split(".")[1] for name in sys.modules if name.startswith("nanovllm.")}}
assert not loaded & set("serve integrations cli".split()), loaded
assert "nanovllm.client.async_llm" not in sys.modules
assert not [file for file in ran if file.startswith("serve/") or "hopper" in file]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_links_to_files_are_named_after_them() -> None:
    # A package index shows the text alone.
    links = re.findall(LOCAL_LINK, README)
    assert links and all(text == path for text, path in links), links


def test_the_tables_of_settings_are_those_of_the_code() -> None:
    assert with_tables(INSIDE) == INSIDE, "python -m tests.tools.settings_tables writes them"


def test_every_page_of_the_package_is_in_the_index_and_leads_back() -> None:
    pages = sorted(PACKAGE.glob("*/**/README.md"))
    index = [path for _, path in re.findall(LOCAL_LINK, INSIDE.split("\n## ")[0])]
    for page in pages:
        assert page.relative_to(PACKAGE).as_posix() in index
        top = page.read_text(encoding="utf-8").splitlines()[2]
        assert f"]({os.path.relpath(PACKAGE / 'README.md', page.parent)})" in top, page
    for page in [PACKAGE / "README.md", *pages]:
        for _, path in re.findall(LOCAL_LINK, page.read_text(encoding="utf-8")):
            assert (page.parent / path).exists(), f"{page} leads to {path}"
