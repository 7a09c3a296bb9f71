"""Triton's interpreter with less to do at each call of a device function, which is a third of its time otherwise."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from triton import language as tl
from triton.runtime import interpreter


@functools.cache
def _a_builtin(package: Any) -> str | None:
    return next((name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)), None)


def install() -> None:
    """Have the interpreter look through a package of the language for what to replace once, not at each call.

    A kernel's launch replaces all functions of a package; a call of a device function from it looks again, and finds
    none left.
    """
    replace_builtins = interpreter._patch_builtin

    def replace_if_any(package: Any, *args: Any) -> None:
        name = _a_builtin(package)
        if name is not None and tl.core.is_builtin(getattr(package, name)):
            replace_builtins(package, *args)

    interpreter._patch_builtin = replace_if_any
