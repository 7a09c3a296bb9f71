"""Text that comes in parts, read as if it were all there."""

from __future__ import annotations

import re
from collections.abc import Generator

Wait = Generator[None, None, None]
_BRACKETS = {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}
JSON_PARTS = re.compile(r'[{}"\\]')
PYTHON_PARTS = re.compile(r"[\[\](){}\"'\\]")


class TextReader:
    """A position in text that grows, for parsers that are generators.

    A method that needs more text than there is yields None until the text has grown or is final. What it returns
    depends on the text alone, not on how it was cut, so that a parser finds the same in a stream as in a whole text.

    Attributes:
        text: so far; what `trim` has dropped is missing at its start.
        at: the position in it.
        is_final: whether no text follows.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_final = False

    def trim(self) -> None:
        """Drop what lies before the position, to which no parser goes back."""
        self.text, self.at = self.text[self.at :], 0

    def peek(self, *options: str) -> Generator[None, None, str]:
        """Return the longest of some texts that comes next; empty if none does."""
        longest = max(map(len, options))
        while True:
            rest = self.text[self.at : self.at + longest]
            if self.is_final or not any(len(option) > len(rest) and option.startswith(rest) for option in options):
                return max((option for option in options if rest.startswith(option)), key=len, default="")
            yield

    def skip(self, *options: str) -> Generator[None, None, str]:
        """Move past one of some texts, and return it; empty if none comes next."""
        found = yield from self.peek(*options)
        self.at += len(found)
        return found

    def skip_space(self) -> Wait:
        """Move past white space."""
        while True:
            rest = self.text[self.at :]
            self.at += len(rest) - len(rest.lstrip())
            if self.at < len(self.text) or self.is_final:
                return
            yield

    def run_of(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Move past the longest run of characters, each of which matches a pattern, and return it."""
        end = self.at
        while True:
            while end < len(self.text) and pattern.match(self.text[end]):
                end += 1
            if end < len(self.text) or self.is_final:
                found, self.at = self.text[self.at : end], end
                return found
            yield

    def until(self, *ends: str) -> Generator[None, None, tuple[str, str]]:
        """Move past the first of some texts; return what comes before it, and it: empty if the text ends before."""
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


def partial_start(text: str, starts: tuple[str, ...]) -> int:
    """Return where the end of a text begins that may be the first part of one of some texts."""
    longest = max(map(len, starts), default=1) - 1
    for index in range(max(0, len(text) - longest), len(text)):
        if any(start.startswith(text[index:]) for start in starts):
            return index
    return len(text)


class EndFinder:
    """Finds where what begins with a bracket ends, in text that grows.

    Args:
        start: the position of the bracket.
        parts: brackets, quotes and escapes.
        depth: brackets that are open there.
    """

    def __init__(self, start: int, parts: re.Pattern[str] = JSON_PARTS, depth: int = 0) -> None:
        self._at, self._parts, self._depth, self._quote = start, parts, depth, ""

    def find(self, text: str) -> int | None:
        """Return the end; None if it has not come."""
        while (found := self._parts.search(text, self._at)) is not None:
            part = found[0]
            if part == "\\" and self._quote:
                if found.end() == len(text):
                    # What is escaped has not come.
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
