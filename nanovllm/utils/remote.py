"""Paths that fsspec opens: `s3://`, `gs://`, `memory://` and the like."""

from __future__ import annotations

from typing import Any

from nanovllm.utils.extras import install_hint


def is_url(path: str) -> bool:
    """Return whether fsspec opens a path, and not Python."""
    return "://" in path


def filesystem(path: str) -> tuple[Any, str]:
    """Return fsspec's file system of a path, and the path in it.

    Raises:
        ValueError: fsspec or what it needs for this kind of path is not installed, or the kind is unknown.
    """
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415

        found: tuple[Any, str] = url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{path} cannot be opened: {error}; {install_hint('remote')}") from error
    return found
