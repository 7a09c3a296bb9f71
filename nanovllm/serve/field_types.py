"""The forms that fields of requests have, and how many entries.

A field with several forms is checked by the one that was given, which its type tells, so that an error says what is
wrong with that. The first fault ends the check of a list: an error for each of a million entries would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

MOST_PROMPTS = 1024
_MOST_TOKENS = 2**20
MOST_MESSAGES = 4096
_MOST_STOPS = 64
_FORMS: dict[type, str] = {str: "<text>", list: "<list>", dict: "<object>"}


def _form(given: Any) -> str | None:
    """Return which form was given, or is to be dumped; None: no field has it."""
    return "<object>" if isinstance(given, BaseModel) else _FORMS.get(type(given))


def _prompt_form(given: Any) -> str | None:
    first = given[0] if isinstance(given, list) and given else None
    is_number = isinstance(first, (int, float))
    return "<ids>" if is_number else "<lists>" if isinstance(first, list) else _form(given)


def one_of(forms: str, get_form: Callable[[Any], str | None] = _form) -> Discriminator:
    """Return what chooses among the forms of a field; `forms`: what the error says where it is none of them."""
    return Discriminator(get_form, custom_error_type="form_type", custom_error_message=f"Input should be {forms}")


IsText, IsList, IsObject = Tag("<text>"), Tag("<list>"), Tag("<object>")
Text = Annotated[str, IsText]
Object = Annotated[dict[str, Any], IsObject]
Nothing = Annotated[dict[str, Any], Field(max_length=0)]
# JSON's true and 1.0 are no ids.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(max_length=_MOST_TOKENS, fail_fast=True)]
_TokenLists = Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(max_length=MOST_PROMPTS, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
TextOrTexts = Annotated[Text | Annotated[Texts, IsList], one_of("a string or a list of strings")]
Stops = Annotated[list[str], Field(max_length=_MOST_STOPS, fail_fast=True)]
TextOrStops = Annotated[Text | Annotated[Stops, IsList], one_of("a string or a list of strings")]
TextOrObject = Annotated[Text | Object, one_of("a string or an object")]
Objects = Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES, fail_fast=True)]
TextOrObjects = Annotated[Text | Annotated[Objects, IsList], one_of("a string or a list of objects")]
Parts = Annotated[list[TextOrObject], Field(max_length=MOST_MESSAGES, fail_fast=True)]
TextOrParts = Annotated[Text | Annotated[Parts, IsList], one_of("a string or a list of parts")]
Prompts = Annotated[
    Text | Annotated[Texts, IsList] | Annotated[TokenIds, Tag("<ids>")] | Annotated[_TokenLists, Tag("<lists>")],
    one_of("a string, a list of strings, a list of token ids, or a list of such lists", _prompt_form),
]
ToolChoiceMode = Annotated[Literal["auto", "none", "required"], IsText]
TOOL_CHOICE = one_of("'auto', 'none', 'required' or an object")


def prompt_list(prompts: Any) -> list[Any]:
    """Return a request's prompts; a list of token ids is one."""
    return [prompts] if isinstance(prompts, str) or isinstance(prompts[0], int) else list(prompts)
