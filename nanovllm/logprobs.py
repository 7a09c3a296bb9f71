"""Log-probabilities of tokens, as arrays that look like the lists of dicts that vLLM returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np

At_co = TypeVar("At_co", bound="dict[int, Logprob] | None", covariant=True)


@dataclass(frozen=True)
class Logprob:
    """One token's natural log-probability at one position; its rank there, from 1; and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def pack_records(values: np.ndarray, token_ids: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return log-probabilities as one record for each position; a shorter record is a prefix of a longer one.

    Args:
        values, token_ids: [num_positions, width]; of the position's own token, then of the most likely ones in order.
        ranks: [num_positions]; of the position's own token, from 1.

    Returns:
        [num_positions, 1 + 2 * width] int32: the rank, then for each token the bits of its float32 and its id.
    """
    records = np.empty((len(values), 1 + 2 * values.shape[1]), dtype=np.int32)
    records[:, 0], records[:, 2::2] = ranks, token_ids
    records[:, 1::2] = np.ascontiguousarray(values, dtype=np.float32).view(np.int32)
    return records


def record_bytes(num_logprobs: int | None) -> int:
    """Return the size of a record, given the number of most likely tokens; 0 for None."""
    return 0 if num_logprobs is None else 4 * (1 + 2 * (1 + num_logprobs))


class Logprobs(Sequence[At_co]):
    """Log-probabilities at consecutive positions: a read-only list of dicts, by token id, of `Logprob`.

    A dict has the position's own token and the most likely ones, fewer if fewer are possible. It is made when its
    position is looked at: 256 rows with five each are 1,536 objects a step, which take longer than the step. It
    compares and prints as the list does, and pickles as the list unless its tokens have no text.

    Args:
        records: as `pack_records` makes them, or their bytes.
        width: tokens in a record.
        decode_token: returns the text of a token; None: they have none.
        num_missing: positions before the first record that have no log-probabilities, and so are None.

    Attributes:
        token_logprobs: [num_positions] float32; of each position's own token, NaN where there are none.
        ranks: [num_positions] int32; of the same token, from 1; 0 where there are none.
    """

    def __init__(
        self,
        records: np.ndarray | bytes | bytearray,
        width: int,
        decode_token: Callable[[int], str | None] | None = None,
        num_missing: int = 0,
    ) -> None:
        found = records if isinstance(records, np.ndarray) else np.frombuffer(records, dtype=np.int32)
        self._records = found.reshape(-1, 1 + 2 * width)
        self._decode_token = decode_token
        self._num_missing = num_missing

    @property
    def token_logprobs(self) -> np.ndarray:
        """See the class."""
        return np.append(np.full(self._num_missing, math.nan, dtype=np.float32), self._values[:, 0])

    @property
    def ranks(self) -> np.ndarray:
        """See the class."""
        return np.append(np.zeros(self._num_missing, dtype=np.int32), self._records[:, 0])

    def __len__(self) -> int:
        return self._num_missing + len(self._records)

    @overload
    def __getitem__(self, index: int) -> At_co: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[At_co]: ...
    def __getitem__(self, index: int | slice) -> At_co | Sequence[At_co]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return list(self)[index]
            return self._stretch(start, max(start, stop))
        position = range(len(self))[index]
        return next(iter(self._stretch(position, position + 1)))

    def __iter__(self) -> Iterator[At_co]:
        missing: Any = None
        for _ in range(self._num_missing):
            yield missing
        # All at once: one number at a time would take several times longer.
        token_ids, ranks = self._records[:, 2::2].tolist(), self._records[:, 0].tolist()
        for values, ids, rank in zip(self._values.tolist(), token_ids, ranks, strict=True):
            logprobs: Any = self._dict(values, ids, rank)
            yield logprobs

    def __add__(self, other: Sequence[At_co]) -> Sequence[At_co]:
        if isinstance(other, Logprobs) and not other._num_missing and self._width == other._width:
            records = np.concatenate((self._records, other._records))
            return Logprobs(records, self._width, self._decode_token, self._num_missing)
        return [*self, *other]

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, Logprobs)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A tokenizer, which decodes the tokens, does not belong in a pickle.
        if self._decode_token is not None:
            return list, (list(self),)
        return Logprobs, (self._records, self._width, None, self._num_missing)

    def with_texts(self, decode_token: Callable[[int], str | None]) -> Logprobs[At_co]:
        """Return the same with the texts of tokens."""
        return Logprobs(self._records, self._width, decode_token, self._num_missing)

    def first(self, count: int) -> Logprobs[At_co]:
        """Return the records of the first positions."""
        return self._stretch(0, count)

    def sum(self) -> float:
        """Return the sum of the positions' own tokens."""
        return float(self.token_logprobs.sum(dtype=np.float64))

    @property
    def _width(self) -> int:
        return self._records.shape[1] // 2

    @property
    def _values(self) -> np.ndarray:
        return np.ascontiguousarray(self._records[:, 1::2]).view(np.float32)

    def _stretch(self, start: int, stop: int) -> Logprobs[At_co]:
        """Return positions `start ... stop - 1`."""
        missing = min(stop, self._num_missing) - min(start, self._num_missing)
        records = self._records[max(0, start - self._num_missing) : max(0, stop - self._num_missing)]
        return Logprobs(records, self._width, self._decode_token, missing)

    def _dict(self, values: list[float], token_ids: list[int], rank: int) -> dict[int, Logprob]:
        own, decode = token_ids[0], self._decode_token or _no_text
        found = {own: Logprob(values[0], rank, decode(own))}
        # The most likely tokens are in order; the position's own may be one of them.
        for place in range(1, len(token_ids)):
            token_id, value = token_ids[place], values[place]
            # Tokens that cannot come are left out: there may be fewer possible ones, and the rest need not be tokens.
            if token_id not in found and value > -math.inf:
                found[token_id] = Logprob(value, place, decode(token_id))
        return found


def _no_text(token_id: int) -> None:
    return None
