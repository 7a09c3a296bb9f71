"""Defines the outputs of an `LLM`."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

At_co = TypeVar("At_co", bound="dict[int, Logprob] | None", covariant=True)


@dataclass(frozen=True)
class Logprob:
    """One token's natural log-probability at a position, its rank there (from 1), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def pack_records(values: np.ndarray, token_ids: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Pack log-probabilities into one record per position; a shorter record is a prefix of a longer one.

    Args:
        values, token_ids: [num_positions, width]; the position's own token first, then the most likely ones in order.
        ranks: [num_positions]; ranks of the positions' own tokens, from 1.

    Returns:
        [num_positions, 1 + 2 * width] int32: the rank, then for each token the bits of its float32 value and its id.
    """
    records = np.empty((len(values), 1 + 2 * values.shape[1]), dtype=np.int32)
    records[:, 0], records[:, 2::2] = ranks, token_ids
    records[:, 1::2] = np.ascontiguousarray(values, dtype=np.float32).view(np.int32)
    return records


def record_bytes(num_logprobs: int | None) -> int:
    """Return the size of a record in bytes, given the number of most likely tokens; 0 for None."""
    return 0 if num_logprobs is None else 4 * (1 + 2 * (1 + num_logprobs))


class Logprobs(Sequence[At_co]):
    """Log-probabilities at consecutive positions: a read-only list of dicts from token id to `Logprob`.

    A dict has the position's own token and the most likely ones, or fewer if fewer are possible. It is created on
    access: 256 rows with five tokens each would be 1,536 objects per step, which take longer than the step. This class
    compares and prints like the list, and pickles as the list unless its tokens have no text.

    Args:
        records: records made by `pack_records`, or their bytes.
        width: number of tokens in a record.
        decode_token: returns a token's text; None: tokens have no text.
        num_missing: positions before the first record, which are None.
    """

    def __init__(
        self, records: np.ndarray | bytes | bytearray, width: int,
        decode_token: Callable[[int], str | None] | None = None, num_missing: int = 0,
    ) -> None:  # fmt: skip
        found = records if isinstance(records, np.ndarray) else np.frombuffer(records, dtype=np.int32)
        self._records = found.reshape(-1, 1 + 2 * width)
        self._decode_token = decode_token
        self._num_missing = num_missing

    @property
    def token_logprobs(self) -> np.ndarray:
        """Log-probability of each position's own token, [num_positions] float32; NaN if missing."""
        return np.append(np.full(self._num_missing, math.nan, dtype=np.float32), self._values[:, 0])

    @property
    def ranks(self) -> np.ndarray:
        """Rank of each position's own token, [num_positions] int32, from 1; 0 if missing."""
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
            return self._stretch(start, max(start, stop)) if step == 1 else list(self)[index]
        position = range(len(self))[index]
        return next(iter(self._stretch(position, position + 1)))

    def __iter__(self) -> Iterator[At_co]:
        missing: Any = None
        for _ in range(self._num_missing):
            yield missing
        # Convert all at once, several times faster than one number at a time.
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
        # Pickle the list: a pickle should not contain the tokenizer behind `decode_token`.
        if self._decode_token is not None:
            return list, (list(self),)
        return Logprobs, (self._records, self._width, None, self._num_missing)

    def with_texts(self, decode_token: Callable[[int], str | None]) -> Logprobs[At_co]:
        """Return a copy whose tokens have texts."""
        return Logprobs(self._records, self._width, decode_token, self._num_missing)

    def first(self, count: int) -> Logprobs[At_co]:
        """Return the records of the first positions."""
        return self._stretch(0, count)

    def sum(self) -> float:
        """Return the sum over the positions' own tokens."""
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
        own, decode = token_ids[0], self._decode_token or (lambda token_id: None)
        found = {own: Logprob(values[0], rank, decode(own))}
        # The most likely tokens are in order; the position's own token may be among them.
        for place in range(1, len(token_ids)):
            token_id, value = token_ids[place], values[place]
            # Omit impossible tokens: if fewer are possible, the remaining entries may not be tokens.
            if token_id not in found and value > -math.inf:
                found[token_id] = Logprob(value, place, decode(token_id))
        return found


@dataclass(frozen=True)
class ToolCall:
    """A function call requested by the model."""

    name: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's outputs.

    Attributes:
        index: index among the request's outputs.
        text: the text, by default without special tokens; empty without a tokenizer.
        token_ids: the generated tokens, including a final EOS or stop token.
        cumulative_logprob: sum of the tokens' log-probabilities; None unless `logprobs` was requested.
        logprobs: for each token the log-probabilities of the most likely tokens and its own, by token id, fewer if
            fewer are possible; None unless requested. A `nanovllm.outputs.Logprobs`, which is a read-only list.
        finish_reason: "stop", "length", "abort" or "error"; None while unfinished.
        stop_reason: the stop string or token id that ended it; None at an EOS and at the length limit.
        tool_calls: calls in an answer of `LLM.chat` with `tools`; they also remain in the text.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds.

    Attributes:
        arrival_time: time when it was queued, by `time.monotonic`.
        queue_time: time until it was first scheduled.
        time_to_first_token, total_time: times since its arrival; None until known.
    """

    arrival_time: float
    queue_time: float | None = None
    time_to_first_token: float | None = None
    total_time: float | None = None


_KEYS = ("text", "token_ids", "finish_reason", "num_cached_tokens")


@dataclass(slots=True)
class RequestOutput(Mapping[str, Any]):
    """A request and its outputs; also supports nano-vLLM's keys, for the first output.

    Example:
        >>> (output,) = llm.generate("Hello")
        >>> output.outputs[0].text == output["text"]
        True

    Attributes:
        request_id: the id returned by `add_request`, or given to `AsyncLLM`.
        prompt: the prompt's text, if given.
        prompt_token_ids: the prompt's tokens; the list is created from an array on first access.
        outputs: `SamplingParams.n` outputs; in a stream only their new parts.
        finished: whether all outputs are complete.
        prompt_logprobs: for each token of the prompt the log-probabilities of the most likely tokens and its own, by
            token id; None for the first token and for tokens before `prompt_logprobs_start`. None unless requested.
        num_cached_tokens: prompt tokens found in the prefix cache.
        metrics: the request's times.
        hidden_states: for each layer in `SamplingParams.hidden_states` the states of the prompt's tokens,
            [num_tokens, hidden_size] float32; for `embed`: sums over parts of the prompt, [hidden_size] float32 each.
            Empty unless requested, or if the request was aborted before its prompt was computed.
        error: the error message of a failed request, if `generate` returns errors; else None.
    """

    request_id: int | str = field(compare=False)
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, compare=False)
    hidden_states: list[np.ndarray] = field(default_factory=list, repr=False, compare=False)
    error: str | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __len__(self) -> int:
        return len(_KEYS)

    def __getitem__(self, key: str) -> Any:
        if key not in _KEYS:
            raise KeyError(key)
        return self.num_cached_tokens if key == "num_cached_tokens" else getattr(self.outputs[0], key)


_given_token_ids = vars(RequestOutput)["prompt_token_ids"]


def _prompt_token_ids(output: RequestOutput) -> list[int]:
    """Return the tokens of a prompt, and turn an array into a list: it takes as long as the rest of an output."""
    token_ids = _given_token_ids.__get__(output)
    if not isinstance(token_ids, list):
        token_ids = token_ids.tolist()
        _given_token_ids.__set__(output, token_ids)
    return token_ids


setattr(RequestOutput, "prompt_token_ids", property(_prompt_token_ids, _given_token_ids.__set__))  # noqa: B010 (a field)


class StepResult(NamedTuple):
    """The result of `LLM.step`.

    Attributes:
        finished: finished requests by id, including uncollected results of earlier steps.
        new_token_ids: tokens added by this step, by request id; additional outputs of a request have their own ids.
        num_prefill_tokens: computed prompt tokens: excludes prefix cache hits, includes recomputation after preemption.
        num_output_tokens: number of new tokens.
    """

    finished: list[tuple[int, RequestOutput]]
    new_token_ids: dict[int, list[int]]
    num_prefill_tokens: int
    num_output_tokens: int


class StepError(RuntimeError):
    """A step failed, and with it the requests `request_ids`; `__cause__` is the cause.

    It can be pickled, as process pools require, with its cause if that can be; see `portable`.
    """

    def __init__(self, message: str, request_ids: list[int], cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.request_ids = request_ids
        self.__cause__ = cause

    def __reduce__(self) -> tuple[type[StepError], tuple[str, list[int], BaseException | None]]:
        return type(self), (str(self), self.request_ids, portable(self.__cause__))


def portable(error: BaseException | None) -> BaseException | None:
    """Return an error, without its cause, if it can be pickled and read again."""
    try:
        return pickle.loads(pickle.dumps(error))
    # Any error that an exception class raises on pickling; the message still describes it.
    except Exception:
        return None
