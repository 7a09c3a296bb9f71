"""Keyword arguments that say so when they are misspelled."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

T = TypeVar("T")


def strict_keywords(cls: type[T]) -> type[T]:
    """Make a dataclass answer an unknown keyword with a `ValueError` that lists the known ones."""
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    init = cls.__init__

    @functools.wraps(init)
    def checked_init(self: T, *args: Any, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - set(known))
        if unknown:
            raise ValueError(f"unknown argument {', '.join(unknown)}; {cls.__name__} takes {', '.join(known)}")
        init(self, *args, **kwargs)

    cls.__init__ = checked_init  # type: ignore[method-assign, assignment]
    return cls
