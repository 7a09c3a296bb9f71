"""Calls of tools in a model's answer, as text comes.

Tags tell formats apart, so one parser reads all formats that have some, whatever the model's template teaches: models
are fine-tuned away from their templates. What has no tags, Llama's JSON and lists of Python calls, is looked for where
the format says so.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from nanovllm.text.text_reader import EndFinder, TextReader, partial_start
from nanovllm.text.tool_call_reader import CallReader, Events, ToolCallDelta
from nanovllm.text.tool_call_syntax import BARE_TAGS, SYNTAX_BY_TAG, ToolCallFormat


class ToolCallParser:
    """Splits the text of one output into calls and other text.

    The name comes with the first delta of a call, and its arguments as the model writes them: JSON by the character,
    other forms by the argument. What looks like a call and is none stays text.

    Args:
        form: how the model is taught to write calls.
        allows_several: whether calls after the first one are wanted; without, they are dropped.
        functions: that can be called, each with its `name` and, if it has any, `parameters`, a JSON schema: it says
            which arguments that are written without quotes are texts.
    """

    def __init__(
        self, form: ToolCallFormat, allows_several: bool = True, functions: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self._allows_several = allows_several
        self._tags = (*SYNTAX_BY_TAG, *((*BARE_TAGS, "{", "[") if form.is_bare else ()))
        self._tag_pattern = re.compile("|".join(map(re.escape, self._tags)))
        self._reader = TextReader()
        self._calls = CallReader(self._reader, form.has_bare_names, functions)
        self._events = self._run()
        # Whether nothing but space stands before the position in its line, or since the last call.
        self._is_new_line = True

    def append(self, text: str, final: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """Return what new text adds to the text beside the calls, and to the calls. `final`: no text follows."""
        self._reader.text += text
        self._reader.is_final = final
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        for event in self._events:
            if event is None:
                break
            if isinstance(event, str):
                content.append(event)
            elif self._allows_several or event.index == 0:
                calls.append(event)
        return "".join(content), calls

    def _run(self) -> Events:
        reader, space = self._reader, ""
        while True:
            space = yield from self._text()
            reader.trim()
            if not reader.text:
                yield space
                return self._calls.num_calls > 0
            tag = yield from reader.peek(*self._tags)
            if tag in SYNTAX_BY_TAG:
                is_call = yield from self._calls.tagged_calls(tag)
            else:
                reader.at += len(tag) if tag in BARE_TAGS else 0
                yield from reader.skip_space()
                is_call = yield from self._calls.bare_calls(self._is_new_line)
            if is_call:
                yield from reader.skip_space()
                self._is_new_line = True
            else:
                reader.at = len(tag)
                yield space + tag
                self._is_new_line = False
                if tag == "{":
                    yield from self._plain_object()

    def _text(self) -> Generator[str | None, None, str]:
        """Yield the text before the next tag, or before the end; return the space before it."""
        reader = self._reader
        while True:
            found = self._tag_pattern.search(reader.text, reader.at)
            end = found.start() if found else len(reader.text)
            if found is None and not reader.is_final:
                end = reader.at + partial_start(reader.text[reader.at :], self._tags)
            before = reader.text[reader.at : end]
            text = before.rstrip()
            if text:
                yield text
                reader.at += len(text)
                self._is_new_line = False
            if found or reader.is_final:
                space, reader.at = reader.text[reader.at : end], end
                self._is_new_line = self._is_new_line or "\n" in space
                return space
            reader.trim()
            yield None

    def _plain_object(self) -> Generator[str | None, None, None]:
        """Yield an object that is no call, whose objects are none either."""
        reader = self._reader
        start = reader.at
        yield from reader.skip_space()
        is_object = bool((yield from reader.peek('"')))
        reader.at = start
        finder = EndFinder(start, depth=1)
        while is_object:
            end = finder.find(reader.text)
            stop = len(reader.text) if end is None else end
            yield reader.text[reader.at : stop]
            reader.at = stop
            if end is not None or reader.is_final:
                return
            yield None
