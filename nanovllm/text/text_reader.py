"""Incremental text reader for parsers written as generators."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence

Wait = Generator[None, None, None]
_BRACKETS = {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}
JSON_PARTS = re.compile(r'[{}"\\]')
PYTHON_PARTS = re.compile(r"[\[\](){}\"'\\]")


class TextReader:
    """A position in a growing text, for parsers that are generators.

    A method that needs more text yields None until the text has grown or is final. Its result depends only on the text,
    not on how it was split, so a parser finds the same in a stream as in a whole text.

    Attributes:
        text: the text so far, without the beginning that `trim` dropped.
        at: the position in the text.
        is_final: whether no text follows.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_final = False

    def trim(self) -> None:
        """Drop the text before the position; parsers must not go back."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self, *options: str, after_space: bool = True) -> Generator[None, None, str]:
        """Return the longest of some texts that is next, and skip white space before it; empty without a match."""
        if after_space:
            yield from self.skip_space()
        longest = max(map(len, options))
        while True:
            rest = self.text[self.at : self.at + longest]
            if self.is_final or not any(len(option) > len(rest) and option.startswith(rest) for option in options):
                return max((option for option in options if rest.startswith(option)), key=len, default="")
            yield

    def skip(self, *options: str, after_space: bool = True) -> Generator[None, None, str]:
        """Skip one of some texts and return it, like `peek`."""
        found = yield from self.peek(*options, after_space=after_space)
        self.at += len(found)
        return found

    def skip_space(self) -> Wait:
        """Skip white space."""
        while True:
            rest = self.text[self.at :]
            self.at += len(rest) - len(rest.lstrip())
            if self.at < len(self.text) or self.is_final:
                return
            yield

    def run_of(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Skip and return the longest run of characters that each match a pattern."""
        end = self.at
        while True:
            while end < len(self.text) and pattern.match(self.text[end]):
                end += 1
            if end < len(self.text) or self.is_final:
                found, self.at = self.text[self.at : end], end
                return found
            yield

    def until(self, *ends: str) -> Generator[None, None, tuple[str, str]]:
        """Skip the first of some texts; return the text before it, and the match: empty if the text ends first."""
        pattern, longest = re.compile("|".join(map(re.escape, ends))), max(map(len, ends))
        searched = self.at
        while True:
            if (found := pattern.search(self.text, searched)) is not None:
                before, self.at = self.text[self.at : found.start()], found.end()
                return before, found[0]
            if self.is_final:
                before, self.at = self.text[self.at :], len(self.text)
                return before, ""
            searched = max(self.at, len(self.text) - longest + 1)
            yield

    def pieces_to(self, finder: EndFinder) -> Generator[str | None, None, None]:
        """Skip and yield the text up to the end that a finder finds."""
        while True:
            end = finder.find(self.text)
            before, self.at = self.at, len(self.text) if end is None else end
            if self.at > before:
                yield self.text[before : self.at]
            if end is not None or self.is_final:
                return
            yield None


def partial_start(text: str, starts: Sequence[str]) -> int:
    """Return the start of a suffix that may be the beginning of one of some texts."""
    longest = max(map(len, starts), default=1) - 1
    for index in range(max(0, len(text) - longest), len(text)):
        if any(start.startswith(text[index:]) for start in starts):
            return index
    return len(text)


class EndFinder:
    """Finds the matching end of a bracket at `start` in a growing text.

    `parts`: pattern of brackets, quotes and escapes; `depth`: number of open brackets before it.
    """

    def __init__(self, start: int, parts: re.Pattern[str] = JSON_PARTS, depth: int = 0) -> None:
        self._at, self._parts, self._depth, self._quote = start, parts, depth, ""

    def find(self, text: str) -> int | None:
        """Return the end position; None if it is not in the text yet."""
        while (found := self._parts.search(text, self._at)) is not None:
            part = found[0]
            if part == "\\" and self._quote:
                if found.end() == len(text):
                    # The escaped character is not there yet.
                    return None
                self._at = found.end() + 1
                continue
            self._at = found.end()
            if self._quote:
                self._quote = "" if part == self._quote else self._quote
            elif part in "\"'":
                self._quote = part
            else:
                self._depth += _BRACKETS.get(part, 0)
                if self._depth <= 0:
                    return self._at
        self._at = max(self._at, len(text))
        return None
