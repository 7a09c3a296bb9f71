"""Write the tables of settings in `nanovllm/README.md`: `python -m tests.tools.settings_tables`.

A setting's text comes from its class's docstring, its default from its field.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.flags import field_texts

PAGE = Path(__file__).parents[2] / "nanovllm" / "README.md"
_TABLE = "<!-- settings of {name}: begin -->\n{rows}<!-- settings of {name}: end -->"


def with_tables(page: str) -> str:
    """Return a page with the tables of settings made from the code.

    Raises:
        ValueError: the page does not have the place of a table once.
    """
    for cls in (Config, SamplingParams):
        found = re.findall(_TABLE.format(name=cls.__name__, rows=".*?"), page, re.DOTALL)
        if len(found) != 1:
            raise ValueError(f"the page has {len(found)} places for the settings of {cls.__name__}, not 1")
        page = page.replace(found[0], _TABLE.format(name=cls.__name__, rows=_rows(cls)))
    return page


def _rows(cls: type[Any]) -> str:
    texts = field_texts(cls)
    rows = [f"| `{item.name}` | {_default(item)} | {_escaped(texts[item.name])} |" for item in fields(cls)]
    return "\n".join(["| name | default | meaning |", "|---|---|---|", *rows, ""])


def _default(item: Field[Any]) -> str:
    if item.default is MISSING:
        return ""
    # Strings in the quotes of the docstrings.
    return f"`{json.dumps(item.default) if isinstance(item.default, str) else repr(item.default)}`"


def _escaped(text: str) -> str:
    """Return a docstring's text for a cell, with quoted values as code."""
    return re.sub(r'("[\w:]+")', r"`\1`", text).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
