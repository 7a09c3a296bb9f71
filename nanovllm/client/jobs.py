"""Jobs: many prompts in one call, read, checked and encoded ahead of the engine.

A thread prepares a thousand prompts at a time. The engine gets only enough of them to keep its batch full, so that a
job's memory, except for its outputs, does not grow with its length.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock, Semaphore, Thread
from typing import Any, Generic, Literal, TypeVar

from tqdm.auto import tqdm

from nanovllm.client.engine_client import EngineClient, News, RequestState
from nanovllm.engine.engine import Engine
from nanovllm.engine.request import Request
from nanovllm.outputs import CompletionOutput, RequestOutput, StepError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.input_processor import InputProcessor, of_prompt, parse_prompt
from nanovllm.utils.checks import check_int
from nanovllm.utils.interrupt import deferred_signals

CHUNK_SIZE = 1000
"""Prompts prepared in one call: tokenizers then use every core, and their lists become arrays soon."""

T = TypeVar("T")
U = TypeVar("U")
Schedule = Literal["prefix", "arrival"]
"""Running order of prompts with equal priority: "prefix" runs prompts with a common prefix in succession, so that
they find each other's blocks before eviction; "arrival" keeps the given order.
"""
_NUM_CHUNKS = 2
_FIRST_SIZE = 128
"""Most items of the first chunk, for which the device waits."""
_PATIENCE_SECONDS = 0.05
"""Longest wait for a full chunk, since a source may be slow or may itself wait for earlier results."""


class ReadAhead(Generic[T, U]):
    """Chunks of a source, made by `prepare` in a thread, at most two ahead; to be closed. A short list needs none."""

    def __init__(self, source: Iterable[T], prepare: Callable[[list[T]], U], size: int) -> None:
        self._prepare = prepare
        self._closed = self._ended = False
        # The whole source, if no thread is started.
        self._small = source if isinstance(source, list) and len(source) <= size else None
        # Items read but not prepared yet, and the time of the oldest.
        self._items: list[T] = []
        self._since = 0.0
        self._lock = Lock()
        # Chunks; at the end None, or the error of the source.
        self._chunks: SimpleQueue[U | BaseException | None] = SimpleQueue()
        self._room = Semaphore(_NUM_CHUNKS)
        self._preparing = Lock()
        if self._small is None:
            Thread(target=self._read, args=(source, size), name="read-ahead", daemon=True).start()

    def take(self, wait: bool) -> U | None:
        """Return the next chunk, or raise the source's error; None at the end or, unless `wait`, if it is not ready."""
        if self._small is not None:
            items, self._small = self._small, []
            return self._prepare(items) if items else None
        while not self._ended:
            try:
                chunk = self._chunks.get(block=wait, timeout=_PATIENCE_SECONDS)
            except Empty:
                if items := self._take_items(_PATIENCE_SECONDS):
                    return self._prepare(items)
                if wait:
                    continue
                return None
            self._room.release()
            if isinstance(chunk, BaseException):
                self._ended = True
                raise chunk
            self._ended = chunk is None
            return chunk
        return None

    def close(self) -> None:
        """End the thread, at the latest with the next item of its source; nothing is prepared from now on."""
        self._closed = self._ended = True
        self._room.release()
        # The interpreter may exit next, and must not kill a thread in a tokenizer's native code.
        with self._preparing:
            pass

    def _take_items(self, patience: float = 0.0) -> list[T]:
        """Take the items of an incomplete chunk, if the oldest has waited for `patience` seconds."""
        with self._lock:
            if not self._items or time.monotonic() - self._since < patience:
                return []
            items, self._items = self._items, []
            return items

    def _read(self, source: Iterable[T], size: int) -> None:
        num_awaited = min(size, _FIRST_SIZE)
        try:
            for item in source:
                if self._closed:
                    return
                with self._lock:
                    if not self._items:
                        self._since = time.monotonic()
                    self._items.append(item)
                    is_full = len(self._items) >= num_awaited
                if is_full:
                    self._pass_on()
                    num_awaited = size
            self._pass_on()
        except BaseException as error:
            self._chunks.put(error)
        self._chunks.put(None)

    def _pass_on(self) -> None:
        items = self._take_items()
        with self._preparing:
            if self._closed or not items:
                return
            chunk = self._prepare(items)
        self._room.acquire()
        self._chunks.put(chunk)


@dataclass(slots=True)
class PreparedPrompt:
    """A prompt: its index in its call, its source, and its request, or the reason why it cannot be served."""

    index: int
    source: Any
    request: Request | ValueError


class Job:
    """The prompts of a call, and their parameters; see `LLM.generate`.

    `template` makes the text of a conversation; `pooling` asks for hidden states. ValueError if the prompts are
    invalid, or the number of parameters or priorities differs from theirs.
    """

    def __init__(
        self, processor: InputProcessor, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None = None,
        *, schedule: Schedule = "prefix", template: Callable[[Any], str] | None = None, pooling: str | None = None,
    ) -> None:  # fmt: skip
        if schedule not in ("prefix", "arrival"):
            raise ValueError(f"schedule must be 'prefix' or 'arrival', not {schedule!r:.80}")
        self._processor = processor
        self._schedule = schedule
        self._template, self._pooling = template, pooling
        self._prompts: list[Any] | Iterable[Any] = as_prompts(prompts)
        self.num_prompts = len(self._prompts) if isinstance(self._prompts, list) else None
        if self.num_prompts is None and (isinstance(params, (list, tuple)) or priority is not None):
            raise ValueError("sampling_params and priorities for each prompt need prompts in a list")
        # If prompts come one by one, one value stands for each.
        num_given = 1 if self.num_prompts is None else self.num_prompts
        self._params, self._priorities = expand_params(params, num_given), check_priorities(priority, num_given)
        # If all of them are prepared in one call, or their number is unknown.
        self._sorts_requests = schedule == "prefix" and (self.num_prompts or 0) <= CHUNK_SIZE
        # Noise follows from the index: a request's first output has the number `first + index * num_outputs`.
        self._num_outputs = max((p.n for p in self._params if isinstance(p, SamplingParams)), default=1)
        self._first_number = processor.seeds.reserve(self._num_outputs * (self.num_prompts or 0))

    def read(self) -> ReadAhead[tuple[int, Any], list[PreparedPrompt]]:
        """Return the prompts in the order in which they run; prompts of an iterator are ordered within each chunk."""
        prompts = self._prompts
        if not isinstance(prompts, list):
            return ReadAhead(enumerate(prompts), self._prepare, CHUNK_SIZE)
        items = ((index, prompts[index]) for index in self._order(prompts))
        return ReadAhead(list(items) if len(prompts) <= CHUNK_SIZE else items, self._prepare, CHUNK_SIZE)

    def _order(self, prompts: list[Any]) -> Sequence[int]:
        """Return the indices of prompts in the order in which they run."""
        order: Sequence[int] = range(len(prompts))
        if self._schedule == "prefix" and not self._sorts_requests:
            # Texts of conversations with a common prefix have one too.
            keys = list(map(_prefix_key, prompts)) if self._template is None else list(map(repr, prompts))
            order = sorted(order, key=keys.__getitem__)
        return sorted(order, key=self._priorities.__getitem__) if any(self._priorities) else order

    def _prepare(self, items: list[tuple[int, Any]]) -> list[PreparedPrompt]:
        count, num_outputs, seeds = len(items), self._num_outputs, self._processor.seeds
        if self.num_prompts is None:
            first = seeds.reserve(num_outputs * count) - items[0][0] * num_outputs
            params, priorities = self._params * count, self._priorities * count
        else:
            first = self._first_number
            params, priorities = [self._params[i] for i, _ in items], [self._priorities[i] for i, _ in items]
        requests = self._processor.process_each(
            [prompt for _, prompt in items],
            params,
            priorities,
            pooling=self._pooling,
            template=self._template,
            seeds=[seeds.of(first + index * num_outputs) for index, _ in items],
        )
        prepared = [PreparedPrompt(*item, request) for item, request in zip(items, requests, strict=True)]
        if self._sorts_requests:
            prepared.sort(key=_request_key)
        return prepared


class Progress:
    """A progress bar over requests, with rates and the engine's state; `disable=None` shows it only on a terminal."""

    def __init__(self, engine: Engine, total: int | None, unit: str, *, disable: bool | None) -> None:
        self._engine = engine
        self._bar: Any = tqdm(total=total, desc="Generating", unit=unit, dynamic_ncols=True, disable=disable)
        self.close = self._bar.close
        self._started, self._before = time.perf_counter(), engine.stats()

    def update(self, num_done: int) -> None:
        """Show that `num_done` more requests are done."""
        if num_done and not self._bar.disable:
            stats, seconds = self._engine.stats(), time.perf_counter() - self._started
            names = "num_prompt_tokens", "num_output_tokens"
            rates = [(stats[name] - self._before[name]) / seconds for name in names]
            cache = stats["num_used_blocks"] / max(1, stats["num_used_blocks"] + stats["num_free_blocks"])
            self._bar.set_postfix_str(
                f"{rates[0]:.0f} tok/s in, {rates[1]:.0f} out, {stats['num_running']} running, "
                f"{stats['num_waiting']} waiting, cache {cache:.0%}",
                refresh=False,
            )
        self._bar.update(num_done)


Done = list[tuple[PreparedPrompt, RequestOutput]]


@dataclass
class JobRun:
    """Runs prompts that are read ahead, at most `most_pending` in the engine at a time.

    Attributes:
        deliver: gets the requests finished by each step, and prompts that cannot be served.
        returns_errors: whether prompts that cannot be served, and requests that fail while the engine continues, get an
            output with their error.
    """

    client: EngineClient
    prompts: ReadAhead[Any, list[PreparedPrompt]]
    deliver: Callable[[Done], None]
    progress: Progress
    most_pending: int
    returns_errors: bool
    # Requests that the engine does not need yet; the source of each is its prompt.
    _ready: deque[RequestState] = field(default_factory=deque)

    def run(self) -> None:
        """Run all prompts; on any exception drop queued requests."""
        with closing(self.prompts), closing(self.progress), closing(self.client.run(self._fill)) as steps:
            for news in steps:
                finished = [state for state in news.values() if state.is_done]
                if finished:
                    # An interrupted text would look like one that cannot be decoded.
                    with deferred_signals():
                        done: Done = [(state.source, self._result(state)) for state in finished]
                    self._deliver(done)

    def _deliver(self, done: Done) -> None:
        self.deliver(done)
        self.progress.update(len(done))

    def _fill(self, pending: News) -> None:
        """Queue requests until there are enough; without pending requests, wait for a chunk."""
        while (missing := self.most_pending - len(pending)) > 0:
            if not self._ready:
                chunk = self.prompts.take(wait=not pending)
                if chunk is None:
                    return
                self._take_chunk(chunk)
            states = [self._ready.popleft() for _ in range(min(missing, len(self._ready)))]
            self.client.add_pending(states, pending)

    def _take_chunk(self, chunk: list[PreparedPrompt]) -> None:
        refused: Done = []
        for item in chunk:
            if isinstance(item.request, Request):
                self._ready.append(RequestState(item.request, self.client.processor, item))
            elif self.returns_errors:
                text = item.source if isinstance(item.source, str) else None
                refused.append((item, _failed_output(-1, item.request, text)))
        if not self.returns_errors:
            _raise_refused(chunk)
        if refused:
            self._deliver(refused)

    def _result(self, state: RequestState) -> RequestOutput:
        try:
            return state.result()
        except StepError as error:
            if not self.returns_errors:
                raise
            return _failed_output(state.request_id, error, state.request.prompt, state.request.token_ids)


def _raise_refused(chunk: list[PreparedPrompt]) -> None:
    """Raise the error of the first prompt that cannot be served, with its index unless it concerns all prompts."""
    errors = {item.index: item.request for item in chunk if isinstance(item.request, ValueError)}
    if not errors:
        return
    first = min(errors)
    concerns_all = all(error is errors[first] for error in errors.values()) and len(errors) == len(chunk)
    raise errors[first] if concerns_all and (len(chunk) > 1 or first == 0) else of_prompt(first, errors[first])


def _failed_output(
    request_id: int, error: Exception, prompt: str | None, prompt_token_ids: array[int] | None = None
) -> RequestOutput:
    item = CompletionOutput(0, "", [], finish_reason="error")
    # The field takes an array as well.
    tokens: Any = [] if prompt_token_ids is None else prompt_token_ids
    return RequestOutput(request_id, prompt, tokens, [item], True, error=str(error))


def as_prompts(prompts: Any) -> Any:
    """Return prompts as a list, a single text or dict as a list of one; other iterables as they are."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    num_dimensions = getattr(prompts, "ndim", None)
    if num_dimensions == 2 and hasattr(prompts, "tolist"):
        return prompts.tolist()
    if isinstance(prompts, (list, tuple)):
        return list(prompts)
    if num_dimensions is not None or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a string or a list, or give prompts, not {type(prompts).__name__}")
    return prompts


def expand_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return sampling parameters for `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)):
        raise ValueError(f"sampling_params must be SamplingParams, or a list of them, not {params!r}")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts: give one for all, or one each")
    return list(params)


def check_priorities(priority: Sequence[int] | None, count: int) -> list[int]:
    """Return a priority for each of `count` prompts."""
    if priority is None:
        return [0] * count
    if not isinstance(priority, (list, tuple)) or len(priority) != count:
        raise ValueError(f"priority must be a list of {count} integers, one for each prompt, not {priority!r:.80}")
    return [check_int("priority", value) for value in priority]


def _request_key(item: PreparedPrompt) -> tuple[int, str, bytes]:
    request = item.request
    if isinstance(request, ValueError):
        return 0, "", b""
    return request.priority, request.cache_salt or "", request.token_ids.tobytes()


def _prefix_key(prompt: Any) -> tuple[str, str, bytes]:
    """Return a sort key that groups prompts by common prefix; invalid prompts sort first."""
    try:
        ids, text, salt = parse_prompt(prompt)
        packed = b"" if ids is None else struct.pack(f"{len(ids)}i", *ids)
    except (ValueError, TypeError, struct.error):
        return "", "", b""
    return salt or "", text or "", packed
