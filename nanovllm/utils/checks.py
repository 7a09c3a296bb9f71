"""A user's values, checked: each failure is a `ValueError` that names the value and the limit."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from numbers import Integral, Real
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


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return an integer of any integral type, but bool, as an int, if it is in `low ... high`."""
    limit = f">= {low}" if high is None else f"in {low} ... {high}"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer {limit}, not {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {limit}, not {number}")
    return number


def check_float(name: str, value: Any) -> float:
    """Return a real number of any type, but bool, as a float, if it is finite and not negative."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and number >= 0:
            return number
    raise ValueError(f"{name} must be a finite number >= 0, not {value!r:.40}")


def check_bool(name: str, value: Any) -> None:
    """Refuse what is not a bool, and would pass for one by its truth."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def read_json(path: str) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
    except ValueError as error:
        raise ValueError(f"{os.path.basename(path)} in {os.path.dirname(path)!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{os.path.basename(path)} in {os.path.dirname(path)!r} must hold a JSON object")
    return content
