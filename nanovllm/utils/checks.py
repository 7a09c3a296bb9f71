"""Validates user input; unless stated otherwise, a failed check raises a `ValueError` with the value and limit."""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from array import array
from numbers import Integral, Real
from operator import index
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class UnsupportedError(ValueError):
    """A possibly valid value of a model's config that this library's own models do not support."""


def strict_keywords(cls: type[T]) -> type[T]:
    """Make a dataclass raise a `ValueError` with the known keywords when it gets an unknown one."""
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    init = cls.__init__

    @functools.wraps(init)
    def checked_init(self: T, /, *args: Any, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - set(known))
        if unknown:
            raise ValueError(f"unknown argument {', '.join(unknown):.80}; {cls.__name__} takes {', '.join(known)}")
        init(self, *args, **kwargs)

    cls.__init__ = checked_init  # type: ignore[method-assign, assignment]
    return cls


def check_int(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return `value`, of any integral type except bool, as an int in `low ... high`."""
    # Test the exact type first: abstract base classes are slow, and would dominate the check of a request.
    is_integer = type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    number = int(value) if is_integer else 0
    if is_integer and (low is None or number >= low) and (high is None or number <= high):
        return number
    limit = "" if low is None else f" >= {low}" if high is None else f" in {low} ... {high}"
    if not is_integer:
        raise ValueError(f"{name} must be an integer{limit}, not {value!r:.40}")
    raise ValueError(f"{name} must be{limit}, not {number!r:.40}")


def check_number(
    name: str, value: Any, low: float | None = None, high: float | None = None, *, above: bool = False
) -> float:
    """Return `value`, of any real type except bool, as a finite float in `low ... high`; `above` excludes `low`."""
    number = math.nan
    if type(value) is float or (isinstance(value, Real) and not isinstance(value, bool)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    too_low = low is not None and (number < low or (above and number == low))
    if not too_low and (high is None or number <= high) and math.isfinite(number):
        return number
    limits = [] if low is None else [f"{'>' if above else '>='} {low}"]
    limits += [] if high is None else [f"<= {high}"]
    bounds = f" {' and '.join(limits)}" if limits else ""
    raise ValueError(f"{name} must be a finite number{bounds}, not {value!r:.40}")


def check_strings(name: str, values: Any) -> list[str]:
    """Check that `value` is a list of non-empty strings and return it; None becomes an empty list."""
    if values is None:
        return []
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) and value for value in values):
        raise ValueError(f"{name} must be a list of strings that are not empty, not {values!r:.80}")
    return list(values)


def token_list(token_ids: Any) -> Any:
    """Convert a tuple, or a one-dimensional array or tensor, of token ids to a list; return other values unchanged."""
    if isinstance(token_ids, (tuple, array)):
        return list(token_ids)
    if getattr(token_ids, "ndim", None) == 1 and hasattr(token_ids, "tolist"):
        return token_ids.tolist()
    return token_ids


def check_token_ids(token_ids: Any, vocab_size: int) -> array[int]:
    """Return a list or an array of integers (not bools) in `0 ... vocab_size - 1` as an array of int32.

    TypeError if it is something else, ValueError if it is empty, or an id is outside the vocabulary.
    """
    if not isinstance(token_ids, list | array):
        raise TypeError("not a list")
    if not token_ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    try:
        # Takes half the time of array("i", token_ids).
        packed = array("i", struct.pack(f"{len(token_ids)}i", *token_ids))
        values = np.asarray(packed)
        low, high = int(values.min()), int(values.max())
    except struct.error:
        # Not an integer (`index` raises TypeError), or over 32 bits, which is outside every vocabulary.
        low, high = min(map(index, token_ids)), max(map(index, token_ids))
    if low <= 1 and bool in set(map(type, token_ids)):
        raise TypeError("True and False are no token ids")
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"the prompt's token id {bad} is outside the vocabulary, 0 ... {vocab_size - 1}")
    return packed


def check_bool(name: str, value: Any) -> None:
    """Raise unless `value` is a bool, not merely truthy."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")
