"""The package's extras, its optional dependencies."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """Return the command that installs an extra, from a package index or from the source."""
    return f"pip install 'nanovllm[{extra}]', or pip install '.[{extra}]' in its source"
