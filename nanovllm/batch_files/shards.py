"""Which lines of an input a run answers, where several runs share it without talking to each other."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shard:
    """A share of an input's lines; those of all shards are the whole input.

    Attributes:
        index: of the shard, from 0.
        count: of shards.
        num_lines: of the input, whose stretch `index` of `count` the shard is; None: every `count`th line.
    """

    index: int = 0
    count: int = 1
    num_lines: int | None = None

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that `index/count` names.

        Raises:
            ValueError: the text is no such pair, or the index is none of the shards.
        """
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if found is None:
            raise ValueError(f"a shard is an index and the number of shards, such as 0/4, not {text!r:.80}")
        index, count = map(int, found.groups())
        if index >= count:
            raise ValueError(f"shard {text} is out of range: the first of {count} is 0, and the last {count - 1}")
        return cls(index, count)

    def contiguous(self, num_lines: int) -> Shard:
        """Return the shard of neighbouring lines, so that what begins alike stays together."""
        return replace(self, num_lines=num_lines)

    def takes(self, number: int) -> bool:
        """Return whether a line, counted from 1, is one of this shard."""
        if self.num_lines is None:
            return (number - 1) % self.count == self.index
        return (number - 1) * self.count // self.num_lines == self.index


WHOLE = Shard()
"""All lines, in one run."""
