"""Outputs of an `LLM`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypedDict, Union

import numpy as np

from nanovllm.logprobs import Logprob


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
            None unless asked for. A `nanovllm.logprobs.Logprobs`, which is a read-only list.
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
