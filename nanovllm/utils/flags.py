"""Creates command-line flags from a dataclass's fields, and a parser with one-line errors.

jsonargparse and tyro do not tell given values from defaults, as a model's `generation_config.json` requires.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

_METAVARS = {int: "N", float: "X", str: "TEXT"}


class CommandParser(argparse.ArgumentParser):
    """A parser that exits with code 2 and a one-line message on an invalid argument."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


@contextmanager
def user_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Exit with code 2 and a one-line message on a user's error inside the `with` block."""
    try:
        yield
    except (ValueError, OSError) as error:
        parser.error(str(error))


def add_flags(
    parser: argparse.ArgumentParser, cls: type[Any], title: str,
    *, renamed: Mapping[str, str] | None = None, positional: str | None = None, description: str | None = None,
    **defaults: Any,
) -> None:  # fmt: skip
    """Add a flag for each field of a dataclass, with help from the entries `name: text` below "Attributes:" in its doc.

    A list's flag can be repeated, a bool's has a `--no-` form, and a mapping's or a dataclass's value is JSON. Optional
    fields that are not strings accept "none".

    Args:
        parser, cls, title: what gets the flags, the dataclass, and their title in the help.
        renamed: flags whose names differ from their fields'.
        positional: a field that may also be given without its flag.
        description: describes the flags and their defaults; without it, each flag shows its default.
        defaults: defaults that replace the class's.
    """
    group = parser.add_argument_group(title, description)
    hints, texts = get_type_hints(cls), field_texts(cls)
    for item in fields(cls):
        flag = f"--{(renamed or {}).get(item.name, item.name).replace('_', '-')}"
        # `python -OO` strips docstrings.
        text = texts.get(item.name, "")
        if description is None:
            text += _default_text(defaults.get(item.name, item.default), item)
        value = {"default": defaults[item.name]} if item.name in defaults else {"default": argparse.SUPPRESS}
        target = group
        if item.name == positional:
            target = group.add_mutually_exclusive_group()
            target.add_argument(
                flag_dest(cls, item.name), nargs="?", metavar=positional.upper(), default=argparse.SUPPRESS,
                help=f"instead of {flag}",
            )  # fmt: skip
        target.add_argument(
            flag, dest=flag_dest(cls, item.name), help=text.replace("%", "%%"), **value, **_reading(hints[item.name])
        )


def flag_values(options: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    """Return by name the fields of a dataclass that flags set, or that have a default in the parser."""
    given = vars(options)
    return {item.name: given[dest] for item in fields(cls) if (dest := flag_dest(cls, item.name)) in given}


def field_texts(cls: type[Any]) -> dict[str, str]:
    """Return the descriptions of a class's attributes in its docstring."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


def flag_dest(cls: type[Any], name: str) -> str:
    """Return the name of a field in the parser's result."""
    # Different classes may share field names.
    return f"{cls.__name__}.{name}"


def _default_text(default: Any, item: Field[Any]) -> str:
    shown = default not in (None, MISSING) and item.type != "bool"
    return f" Default: {default}." if shown else " Default: on." if default is True else ""


def _reading(hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for values of a type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    lists = [kind for kind in kinds if get_origin(kind) in (list, Sequence)]
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if lists:
        (element,) = get_args(lists[0])
        return {"action": "append", "type": element, "metavar": _METAVARS[element]}
    (kind,) = (kind for kind in kinds if kind is not NoneType)
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if kind not in _METAVARS:
        return {"type": json_reader(kind), "metavar": "JSON"}
    return {
        "type": _optional_reader(kind) if NoneType in kinds and kind is not str else kind,
        "metavar": _METAVARS[kind],
    }


def _optional_reader(kind: type[Any]) -> Any:
    def read(text: str) -> Any:
        return None if text == "none" else kind(text)

    # argparse shows this name in errors.
    read.__name__ = kind.__name__
    return read


def json_reader(kind: Any) -> Any:
    """Return a function that makes a mapping, or a dataclass, of a flag's JSON object."""
    construct: Any = kind

    def read(text: str) -> Any:
        try:
            value = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError(f"not a JSON object: {text}")
            return construct(**value) if is_dataclass(kind) else value
        except json.JSONDecodeError as error:
            raise argparse.ArgumentTypeError(f"not JSON: {text}: {error}") from error
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read
