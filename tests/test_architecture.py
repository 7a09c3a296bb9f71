"""Imports point one way, and the host side needs no torch."""

from __future__ import annotations

import ast
from pathlib import Path

import nanovllm

ROOT = Path(nanovllm.__file__).parent
# Each part may import those before it, and its own.
LAYERS = [
    {"utils.checks", "utils.context", "utils.interrupt", "utils.hub", "utils.device", "utils.communicator",
     "utils.symmetric", "config",
     "sampling_params", "model_config", "model_shard", "kernels", "assets"},
    {"attention"},
    {"layers"},
    {"models"},
    {"utils.loader"},
]  # fmt: skip
HOST = {"engine.sequence", "engine.block_manager", "engine.scheduler", "engine.messages", "engine.shared_prefix",
        "engine.channel"}  # fmt: skip
DEVICE = {"engine.model_runner", "engine.input_buffers", "engine.prompt_arrays", "engine.prefix_buffers",
          "engine.cuda_graph", "engine.rank", "engine.ranks", "engine.parallel_runner"}  # fmt: skip


def imports() -> dict[str, set[str]]:
    """Every module of the package, with all that it imports."""
    found = {}
    for file in ROOT.rglob("*.py"):
        if file.name == "train.py":
            continue
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        names = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
        found[name] = names
    return found


def own(names: set[str]) -> set[str]:
    return {name.removeprefix("nanovllm.") for name in names if name.startswith("nanovllm.")}


def part(name: str) -> int | None:
    for i, layer in enumerate(LAYERS):
        if name in layer or name.split(".", maxsplit=1)[0] in layer:
            return i
    return None


def test_lower_parts_never_import_higher_ones() -> None:
    checked = 0
    for name, names in imports().items():
        level = part(name)
        if level is None:
            continue
        for target in own(names):
            target_level = part(target)
            assert target_level is not None and target_level <= level, f"{name} imports {target}"
            checked += 1
    assert checked > 20


def test_scheduling_knows_neither_torch_nor_the_runner() -> None:
    found = imports()
    for name in HOST:
        assert not any(target.split(".")[0] in ("torch", "triton", "transformers") for target in found[name])
        assert own(found[name]) <= HOST | {"sampling_params"}, name
    assert "torch" not in found["engine.llm_engine"]


def test_the_runner_never_sees_a_sequence() -> None:
    found = imports()
    for name in DEVICE:
        assert not own(found[name]) & {"engine.sequence", "engine.scheduler", "engine.block_manager"}, name


def test_files_stay_short() -> None:
    for file in ROOT.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert text.count("\n") <= 300, file
