"""Outputs of an `LLM`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar, Union, overload

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


class _TokenArray(Protocol):
    """Token ids as an array or a tensor, which `Sequence` does not take for one."""

    @property
    def ndim(self) -> int:
        """Dimensions: 2 for several prompts of one length."""

    def tolist(self) -> Any:
        """Return the ids as lists."""


TokenIds = Union[Sequence[int], _TokenArray]  # noqa: UP007 (Python 3.10 evaluates it)


class _Salted(TypedDict, total=False):
    cache_salt: str


class _Text(TypedDict):
    prompt: str


class TextPrompt(_Text, _Salted):
    """A prompt as text. It shares blocks of the prefix cache with prompts of the same `cache_salt` alone.

    Example:
        >>> outputs = llm.generate(TextPrompt(prompt="Hello", cache_salt="of one user"))
    """


class _TokenIds(_Salted):
    prompt_token_ids: Sequence[int]


class TokensPrompt(_TokenIds, total=False):
    """A prompt as token ids; its text, if it has one, is only shown.

    Example:
        >>> outputs = llm.generate([TokensPrompt(prompt_token_ids=[5, 6]), TokensPrompt(prompt_token_ids=[7])])
    """

    prompt: str


Prompt = Union[str, TextPrompt, TokensPrompt]  # noqa: UP007
"""Besides sequences of token ids."""

# Any iterable of them, such as a generator, is taken too.
Prompts = Union[Prompt, Iterable[Union[Prompt, TokenIds]], Iterable[Any], _TokenArray]  # noqa: UP007
"""What `LLM.generate` takes: one prompt, or several."""


_WHEN_ASKED_FOR: Any = None
"""Stands for a list that is made on first access; see `_made_when_asked_for`."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a function that a model asks for."""

    name: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's outputs.

    Attributes:
        index: of the outputs of its request.
        text: without special tokens, unless asked for; empty without a tokenizer.
        token_ids: the generated tokens, with the EOS or stop token that ended them.
        cumulative_logprob: sum of the tokens' log-probabilities; None unless `logprobs` was asked for.
        logprobs: for each token the most likely tokens' and its own, by token id, fewer if fewer are possible;
            None unless asked for. A `nanovllm.outputs.Logprobs`, which is a read-only list.
        finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
        stop_reason: the text or the token id that ended it; None at an EOS and at the full length.
        tool_calls: of an answer of `LLM.chat` with `tools`: the calls that its text asks for; the text has them too.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    tool_calls: list[ToolCall] = _WHEN_ASKED_FOR


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds.

    Attributes:
        arrival_time: when it was queued, by `time.monotonic`.
        queue_time: until it was first scheduled.
        time_to_first_token, total_time: since its arrival; None until they are known.
    """

    arrival_time: float
    queue_time: float | None = None
    time_to_first_token: float | None = None
    total_time: float | None = None


_KEYS = ("text", "token_ids", "finish_reason", "num_cached_tokens")


@dataclass(slots=True)
class RequestOutput(Mapping[str, Any]):
    """A request and its outputs; also a mapping with nano-vLLM's keys, of the first output.

    Example:
        >>> (output,) = llm.generate("Hello")
        >>> output.outputs[0].text == output["text"]
        True

    Attributes:
        request_id: as `add_request` returned it, or as it was given to `AsyncLLM`.
        prompt: the text, if the request was one.
        prompt_token_ids: the prompt's tokens; a list, which is made of an array when it is asked for.
        outputs: `SamplingParams.n` of them; of a stream, what is new.
        finished: whether all outputs are complete.
        prompt_logprobs: for each token of the prompt the most likely tokens' and its own, by token id; None for
            the first and for those before `prompt_logprobs_start`. None as a whole unless asked for.
        num_cached_tokens: prompt tokens found in the prefix cache.
        metrics: the request's times.
        hidden_states: of `embed`: sums over parts of the prompt, [hidden_size] float32 each.
        error: why it has failed; None unless it has, and `generate` was to return errors.
    """

    request_id: int | str = field(compare=False)
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, compare=False)
    hidden_states: list[np.ndarray] = field(default=_WHEN_ASKED_FOR, repr=False, compare=False)
    error: str | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __len__(self) -> int:
        return len(_KEYS)

    def __getitem__(self, key: str) -> Any:
        if key not in _KEYS:
            raise KeyError(key)
        return self.num_cached_tokens if key == "num_cached_tokens" else getattr(self.outputs[0], key)


def _made_when_asked_for(cls: type, name: str, make: Callable[[Any], list[Any]]) -> None:
    """Turn a field into a property, whose list is made on first access.

    A list of token ids takes as long to make as the rest of an output, and nine times the room of an array; one that
    is empty is work for the garbage collector.

    Args:
        cls: the dataclass.
        name: of the field, which may be given something else than a list.
        make: returns the list of that.
    """
    slot = vars(cls)[name]

    def get(output: Any) -> list[Any]:
        value = slot.__get__(output)
        if not isinstance(value, list):
            value = make(value)
            slot.__set__(output, value)
        return value

    setattr(cls, name, property(get, slot.__set__))


def _as_list(values: array[int] | None) -> list[Any]:
    return [] if values is None else values.tolist()


_made_when_asked_for(CompletionOutput, "tool_calls", _as_list)
_made_when_asked_for(RequestOutput, "prompt_token_ids", _as_list)
_made_when_asked_for(RequestOutput, "hidden_states", _as_list)


def failed_output(
    request_id: int, error: Exception, prompt: str | None, prompt_token_ids: array[int] | None = None
) -> RequestOutput:
    """Return the output of a request that has failed."""
    item = CompletionOutput(0, "", [], finish_reason="error")
    # The field takes an array as well.
    tokens: Any = [] if prompt_token_ids is None else prompt_token_ids
    return RequestOutput(request_id, prompt, tokens, [item], True, error=str(error))


@dataclass
class ScoreOutput:
    """Log-probabilities of a continuation.

    Attributes:
        token_ids: the continuation's tokens.
        token_logprobs: their log-probabilities.
        logprob: the sum of these.
        is_greedy: whether each is the most likely token at its position.
    """

    token_ids: list[int]
    token_logprobs: list[float]
    logprob: float
    is_greedy: bool


@dataclass
class RankedDocument:
    """A document, and how relevant it is to a query.

    Attributes:
        index: its place among the documents that were given.
        score: a cosine, -1 ... 1, or a probability, 0 ... 1.
        document: its text.
    """

    index: int
    score: float
    document: str


@dataclass
class BeamSearchSequence:
    """One beam: its tokens without the prompt's, its text, and its score with length penalty."""

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: str


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class StepResult(NamedTuple):
    """What a step has brought, as `LLM.step` returns it.

    Attributes:
        finished: finished requests by id, also of earlier steps whose results were not collected.
        new_token_ids: tokens that this step added, by request id; further outputs of a request have ids of their own.
        num_prefill_tokens: prompt tokens that were computed: not in the prefix cache, and again for preempted
            requests compute again.
        num_output_tokens: how many new tokens there are.
    """

    finished: list[tuple[int, RequestOutput]]
    new_token_ids: dict[int, list[int]]
    num_prefill_tokens: int
    num_output_tokens: int


class StepError(RuntimeError):
    """A step failed, and with it the requests `request_ids`; the cause is the exception's `__cause__`.

    It can be pickled, as a pool of processes does with exceptions, but for its cause.
    """

    def __init__(self, message: str, request_ids: list[int], cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.request_ids = request_ids
        self.__cause__ = cause

    def __reduce__(self) -> tuple[type[StepError], tuple[str, list[int]]]:
        # A cause may be anything, and the message says what it was.
        return type(self), (str(self), self.request_ids)
