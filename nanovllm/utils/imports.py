"""Imports of large packages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Let Python look for no garbage inside the `with` block, which imports.

    Torch and transformers make half a million objects that stay. To go through them again and again, because there are
    so many new ones, takes a fifth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
