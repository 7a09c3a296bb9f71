"""A user's values, checked: each failure is a `ValueError` that names the value and the limit."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import struct
from array import array
from numbers import Integral, Real
from operator import index
from typing import Any, TypeVar

import numpy as np

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


def check_token_ids(token_ids: Any, vocab_size: int) -> array[int]:
    """Return a list of integers, of any type but bool, as an array, if all are in `0 ... vocab_size - 1`.

    Raises:
        TypeError: it is no list, or not of integers.
    """
    if not isinstance(token_ids, list):
        raise TypeError("not a list")
    if not token_ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    try:
        # Half the time of array("i", token_ids); the first step of a `generate` waits for this, over all its prompts.
        packed = array("i", struct.pack(f"{len(token_ids)}i", *token_ids))
        values = np.asarray(packed)
        low, high = int(values.min()), int(values.max())
    except struct.error:
        # Something that is no integer, or one of more than 32 bits, which no vocabulary has.
        low, high = min(map(index, token_ids)), max(map(index, token_ids))
    if low <= 1 and bool in set(map(type, token_ids)):
        raise TypeError("True and False are no token ids")
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(f"token id {bad} is outside the vocabulary, 0 ... {vocab_size - 1}")
    return packed


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


def refuse_remote_code(folder: str, file: str, auto_class: str) -> None:
    """Refuse a folder whose JSON file `file` names code of its own, in its `auto_map`, for transformers' `auto_class`.

    Raises:
        ValueError: it does; names the code.
    """
    path = os.path.join(folder, file)
    auto_map = read_json(path).get("auto_map") if os.path.isfile(path) else None
    # Tokenizers of old have a list, of the slow class and the fast one.
    code = auto_map.get(auto_class) if isinstance(auto_map, dict) else auto_map
    if code:
        raise ValueError(
            f"{file} in {folder!r} names code to run for {auto_class}: {code!r}; read it, and pass "
            "trust_remote_code=True to allow it"
        )
