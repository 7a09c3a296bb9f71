"""The layers of the package follow from its folders; imports go down only, and the host side needs no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import nanovllm

ROOT = Path(nanovllm.__file__).parent
# From the top down; a folder or a file may import what stands below it, and a folder its own files.
LAYERS = [
    "__main__", "cli", "commands", "bench", "batch_files", "__init__", "integrations", "serve", "openai_format",
    "openai_answers", "async_llm", "llm", "stats_plot", "text", "engine", "workers", "runner", "models", "sampling",
    "layers", "quantization", "attention", "distributed", "kernels", "model_config", "config", "sampling_params",
    "outputs", "logprobs", "assets", "utils",
]  # fmt: skip
# Plain data that crosses from one side to the other.
MESSAGES = "runner.messages"
HEAVY = {"torch", "triton", "transformers", "tokenizers", "safetensors"}


def imported(tree: ast.Module) -> Iterator[str]:
    """Every module that a file imports, wherever it does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules() -> dict[str, set[str]]:
    """Every module of the package, with all that it imports; the package's own without its name."""
    found = {}
    for file in ROOT.rglob("*.py"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        found[name] = set(imported(ast.parse(file.read_text(encoding="utf-8"))))
    for name, names in found.items():
        own = {other.removeprefix("nanovllm.") for other in names if other.startswith("nanovllm.")}
        own |= {f"{other}.__init__" for other in own}
        found[name] = {other for other in names if not other.startswith("nanovllm")} | (own & set(found)) - {name}
    return found


def layer(name: str) -> int:
    return LAYERS.index(name.split(".", maxsplit=1)[0])


def test_imports_go_down() -> None:
    found = modules()
    assert {name.split(".", maxsplit=1)[0] for name in found} == set(LAYERS)
    for name, names in found.items():
        for other in names & set(found):
            assert layer(name) <= layer(other), f"{name} imports {other}"


def test_no_files_import_each_other() -> None:
    found = modules()
    # Raises CycleError, which names them.
    assert list(TopologicalSorter({name: names & set(found) for name, names in found.items()}).static_order())


def test_the_engine_needs_no_torch_and_knows_of_the_runner_its_messages_alone() -> None:
    found = modules()
    needed = ["engine." + file.stem for file in (ROOT / "engine").glob("*.py")] + [MESSAGES, "outputs"]
    for name in needed:
        assert not {other.split(".", maxsplit=1)[0] for other in found[name]} & HEAVY, name
        below = {other for other in found[name] & set(found) if layer(other) > layer("engine.x")}
        leaves = {"config", "sampling_params", "outputs", "logprobs"} | {f for f in found if f[:5] == "utils"}
        assert below <= {MESSAGES, *leaves}, name


def test_files_stay_short() -> None:
    # A file is as long as its subject; one with more code than this, docstrings apart, has two of them.
    for file in ROOT.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = [
            node.body[0]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
        ]
        num_prose = sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in docstrings)
        assert text.count("\n") - num_prose <= 350, file
