"""The bundled checkpoint, trained by `tests/tools/training`, which the history of the repository has."""

from __future__ import annotations

from pathlib import Path

BUNDLED_MODEL = str(Path(__file__).resolve().parent / "qwen3-tiny")
"""Folder of a Qwen3 of 4.9 million parameters, for machines with no network and no GPU."""
