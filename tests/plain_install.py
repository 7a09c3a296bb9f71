"""The environment of a plain `pip install nanovllm`, without a network, as variables for processes that tests start.

What plain dependencies do not bring cannot be imported there, though it is installed. Connections to other machines are
refused, caches are empty, and `pip` does nothing, since what it would install is there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Older Pythons have it as tomli, which pytest brings along.
tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).parents[1]
OWN = "nanovllm"
# Python runs it at the start of each process that finds it, before any other import.
_SITECUSTOMIZE = """
import importlib.machinery, socket, sys

absent = frozenset({absent})
find_spec = importlib.machinery.PathFinder.find_spec
local = {{"", "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()}}


def find_present(name, path=None, target=None):
    return None if name in absent else find_spec(name, path, target)


def refuse_others(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        place = arguments[1] if event == "socket.connect" else arguments
        if isinstance(place, tuple) and isinstance(place[0], str) and place[0] not in local:
            raise OSError(f"{{place[0]}} is another machine")


importlib.machinery.PathFinder.find_spec = find_present
sys.addaudithook(refuse_others)
"""


def plain_environment(folder: Path, extras: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables of an environment with the plain dependencies, and with those that extras add.

    Args:
        folder: an empty one, for what the environment needs.
        extras: which are installed as well.

    Raises:
        PackageNotFoundError: a dependency of theirs is not installed.
    """
    present = _needed(frozenset(extras))
    modules = packages_distributions().items()
    absent = sorted(name for name, owners in modules if not present & {canonicalize_name(owner) for owner in owners})
    commands = folder / "bin"
    commands.mkdir()
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(absent=absent))
    for name, program in {
        "python": f'exec {sys.executable} "$@"',
        "nanovllm": f'exec {sys.executable} -m nanovllm "$@"',
        "pip": "exit 0",
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{program}\n")
        (commands / name).chmod(0o755)
    closed = "http://127.0.0.1:1"
    return os.environ | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "huggingface"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        # Of curl and the like, which no hook of Python's sees.
        **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), closed),
        "no_proxy": "127.0.0.1,localhost",
    }


@cache
def _needed(extras: frozenset[str]) -> frozenset[str]:
    """Return the names of all distributions that the package and these extras need, and its own."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = project["optional-dependencies"]
    found = _closure(project["dependencies"], own)
    for extra in extras:
        added = _closure(own[extra], own)
        for name in added - found - {OWN}:
            # Raises where the extra is not installed.
            distribution(name)
        found |= added
    return frozenset({OWN, *found})


def _closure(texts: Iterable[str], own: dict[str, list[str]]) -> set[str]:
    """Return the names of what requirements need; `own` has what this package's extras need."""
    seen, queue = set[tuple[str, frozenset[str]]](), list(_holding(texts))
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        if name == OWN:
            queue += _holding(text for extra in requirement.extras for text in own[extra])
        else:
            # What is not installed cannot be imported anyway.
            with suppress(PackageNotFoundError):
                queue += _holding(distribution(name).requires or (), requirement.extras)
    return {name for name, _ in seen}


def _holding(texts: Iterable[str], extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """Yield the requirements whose conditions hold here, with some extras of the package that has them."""
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement
